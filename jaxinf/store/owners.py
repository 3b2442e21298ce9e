"""The owner of the chunks on a CSD: a note beside them names the store.

Invariant: of a store and its copy without the CSDs, only one writes to them.
"""

import json
from pathlib import Path

from jaxinf.errors import StoreFormatError
from jaxinf.io import write_json_atomically
from jaxinf.store.directory import StoreDirectory

__all__ = ["check_owners", "claim_csds"]


def claim_csds(directory: StoreDirectory) -> None:
    """Notes on every CSD whose chunks these are.

    Raises:
      StoreFormatError: they are those of another store that is still there, of
        which this one is a copy without its CSDs.
    """
    own = str(directory.path.resolve())
    for csd in range(len(directory.manifest.csds)):
        note = directory.csd_directory(csd) / "store.json"
        owner = _read_owner(note)
        if owner == own:
            continue
        _check_owner(directory, owner, note)
        write_json_atomically(note, {"store": own})


def check_owners(directory: StoreDirectory) -> None:
    """Refuses CSDs whose chunks are another store's.

    Raises:
      StoreFormatError: as `claim_csds`.
    """
    for csd in range(len(directory.manifest.csds)):
        note = directory.csd_directory(csd) / "store.json"
        _check_owner(directory, _read_owner(note), note)


def _check_owner(directory: StoreDirectory, owner: str | None, note: Path) -> None:
    """Refuses a CSD's directory that belongs to another store that is there."""
    if owner is None or owner == str(directory.path.resolve()):
        return
    if _store_id_at(Path(owner)) == directory.manifest.store_id:
        raise StoreFormatError(
            f"{directory.path}: expected a store of its own, found a copy of {owner}, "
            f"whose chunks on a CSD ({note.parent}) it would overwrite; open that "
            "one, or make a store that shares nothing with it "
            '("jaxinf checkpoint STORE export", then "import")'
        )


def _read_owner(note: Path) -> str | None:
    """The store that a CSD's directory belongs to; None where that is not noted."""
    try:
        return str(json.loads(note.read_text())["store"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def _store_id_at(path: Path) -> str | None:
    try:
        return str(json.loads((path / "jaxinf.json").read_text())["store_id"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
