"""Checks all entries below a store and its directories on CSDs.

      STORE ── every entry ──► directory: descend    file: fine
                               link: one that the format makes, or refused
                               pipe, device, socket: refused

Invariant: links are read and compared, never followed, and only directories are opened.
So later writes below a scanned tree stay in it.
"""

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from jaxinf.errors import StoreFormatError
from jaxinf.io.failures import translated

__all__ = ["chunk_link_roots", "scan_csd"]

_MOST_LEVELS = 64
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

# The part of a path before a chunk's place on a CSD: CSD root and store's directory.
_BEFORE = re.compile(r"(/.*)?/jaxinf-[0-9a-f]{32}")
_STEPS = ("checkpoints", "snapshots")
# Names of the format; other entries are not touched, and may be anything.
_NAMES = {
    *("jaxinf.json", "rebalance.json", "lock", "publish.lock", "checkpoints.lock"),
    *("current", "current.tmp", "slots", "checkpoints", "snapshots", "stream"),
    "tokenizer",
    *("a", "b", "store.json"),  # on a CSD
}
_REMEDY = (
    "jaxinf neither makes nor follows it: find out who did, and remove it (a copy of a "
    "store that is made with cp -a is whole)"
)


def chunk_link_roots(store: Path) -> set[str]:
    """Checks every entry of a store; blocks.

    Args:
      store: the store's directory; the path to it may have links.

    Returns:
      The directories on CSDs that the links of chunks lead to.

    Raises:
      StoreFormatError: a link does not belong to the format, or an entry is neither a
        file nor a directory.
      StoreIOError: a directory cannot be read.
    """
    found = set()
    with translated("scan", store):
        top = os.open(store, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        for parts, target in _links(top, store, ()):
            if _is_fixed(parts, target):
                continue
            before = _chunk_root(parts, target)
            if before is None:
                raise _refused(store.joinpath(*parts), f"a symlink to {target!r}")
            found.add(before)
    return found


def scan_csd(folder: Path) -> None:
    """Checks every entry of a store's directory on a CSD; blocks.

    Raises:
      StoreFormatError: an entry is neither a file nor a directory.
      StoreIOError: a directory is missing or cannot be read.
    """
    with translated("scan", folder):
        for parts, target in _links(os.open(folder, _DIRECTORY), folder, ()):
            raise _refused(folder.joinpath(*parts), f"a symlink to {target!r}")


def _links(
    directory: int, top: Path, parts: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yields the links below an open directory, with their targets, and closes it."""
    folders = []
    try:
        if len(parts) > _MOST_LEVELS:
            raise _refused(top.joinpath(*parts), f"{len(parts)} directories")
        with os.scandir(directory) as entries:
            for entry in entries:
                if not parts and entry.name not in _NAMES:
                    continue
                here = (*parts, entry.name)
                try:
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.name)
                    elif entry.is_symlink():
                        yield here, os.readlink(entry.name, dir_fd=directory)
                    elif not entry.is_file(follow_symlinks=False):
                        _check_file(directory, here, top)
                except FileNotFoundError:  # a running writer has removed it
                    continue
        for name in folders:
            try:
                below = os.open(name, _DIRECTORY, dir_fd=directory)
            except FileNotFoundError:
                continue
            else:
                yield from _links(below, top, (*parts, name))
    finally:
        os.close(directory)


def _check_file(directory: int, parts: tuple[str, ...], top: Path) -> None:
    """Refuses an entry that is still there and is not a file."""
    mode = os.stat(parts[-1], dir_fd=directory, follow_symlinks=False).st_mode
    if not stat.S_ISREG(mode):
        raise _refused(top.joinpath(*parts), "something that is no file")


def _is_fixed(parts: tuple[str, ...], target: str) -> bool:
    """Whether a link is one of those within a store."""
    if parts in (("current",), ("current.tmp",)):
        return target in ("slots/a", "slots/b")
    if len(parts) == 3 and parts[0] == "checkpoints":
        return parts[2] == "state" and target == "default"
    if len(parts) == 4 and parts[0] == "checkpoints" and parts[2] == "default":
        return target == f"../{parts[3]}"
    return False


def _chunk_root(parts: tuple[str, ...], target: str) -> str | None:
    """Returns the directory on a CSD that a chunk's link leads to; None if invalid."""
    steps, *rest = parts
    if len(rest) < 3 or rest[2] != "c":  # slot or name, array, "c", the chunk's key
        return None
    place, *file = rest
    if file[-1].endswith(".new"):  # left by an interrupted rebalance
        file[-1] = file[-1].removesuffix(".new")
    end = "/" + "/".join((place, *file))
    if steps in _STEPS:
        end = f"/{steps}{end}"
    elif steps != "slots" or place not in ("a", "b"):
        return None
    if steps == "checkpoints" and place.startswith((".new-", ".gone-")):
        # While it is made or removed, links have its later or earlier name.
        words = target.split("/")
        if len(words) <= len(file) + 1 or words[-len(file) - 1] in ("", ".", ".."):
            return None
        end = "/" + "/".join(("checkpoints", words[-len(file) - 1], *file))
    before = target.removesuffix(end)
    is_chunk = before != target and _BEFORE.fullmatch(before)
    return before if is_chunk else None


def _refused(path: Path, found: str) -> StoreFormatError:
    return StoreFormatError(
        f"{path}: expected the files of a jaxinf store, found {found}; {_REMEDY}"
    )
