"""Links a committed step under another name, for snapshots and checkpoints.

Invariant: links lead to real files inside the same CSD root, because a link to a
symlink would pin nothing, and hard links do not cross file systems.
"""

import contextlib
import shutil
from collections.abc import Sequence
from pathlib import Path

from jaxinf.store.carry import link_carry
from jaxinf.store.commit import CarriedArray
from jaxinf.store.directory import StoreDirectory
from jaxinf.store.links import link_or_copy


def link_arrays(
    directory: StoreDirectory,
    source: str,
    place: str,
    root: Path,
    carry: Sequence[CarriedArray],
) -> None:
    """Links every array of a step.

    Args:
      source: the place of the step: a slot or a checkpoint.
      place: the new place, which decides the directories on CSDs.
      root: existing directory in the store that receives the arrays.
      carry: arrays that the step carries.
    """
    link_carry(directory.step_path(source), root, carry)
    has_csds = bool(directory.manifest.csds)
    for leaf, record in enumerate(directory.manifest.leaves):
        for state in record.states:
            name = record.array_name(state.name)
            array = root / name
            array.mkdir()
            held = directory.array_path(source, leaf, state.name)
            link_or_copy(held / "zarr.json", array / "zarr.json")
            made: set[Path] = set()
            for number in record.held:
                link = array / directory.state_chunk(leaf, number, state).key
                real = directory.chunk_file(place, leaf, number, state.name)
                target = real if has_csds else link
                for parent in {link.parent, target.parent} - made:
                    parent.mkdir(parents=True, exist_ok=True)
                    made.add(parent)
                old = directory.chunk_file(source, leaf, number, state.name)
                link_or_copy(old, target)
                if has_csds:
                    link.symlink_to(real)


def remove_step(directory: StoreDirectory, place: str) -> None:
    """Removes the result of `link_arrays` at a place, on every CSD and in the store."""
    for csd in range(len(directory.manifest.csds)):
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(directory.data_path(place, csd))
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(directory.step_path(place))
