"""Compares a committed step's files with its record, chunk by chunk.

Invariant: files are only read, through one small buffer for each thread. All damage is
found, not only the first, and a file that two steps share is read once.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from jaxinf.documents import MOST_BYTES, DocumentError, parse_json
from jaxinf.errors import StoreError, StoreFormatError
from jaxinf.store.commit import CarriedArray
from jaxinf.store.directory import SLOTS, StoreDirectory
from jaxinf.store.files import TIMES, read_carry, step_files
from jaxinf.store.manifest import ChunkFile
from jaxinf.store.reader import StepReader, over
from jaxinf.store.steps import find_step, step_of
from jaxinf.transfer import check_length, read_beneath
from jaxinf.typing import ProgressCallback


@dataclass(frozen=True)
class Damage:
    """A damaged chunk, document or link of a step."""

    file: Path  # the real one, even if it is missing
    what: str  # leaf, state, chunk and CSD, or the document
    problem: str  # the expected and the found value


def step_bytes(directory: StoreDirectory) -> int:
    """Returns the bytes of state in one committed step, without padding."""
    return sum(one.num_bytes for one in directory.manifest.held())


def verify_step(
    directory: StoreDirectory,
    step_path: Path,
    progress: ProgressCallback | None = None,
    *,
    seen: dict[tuple[int, int], int] | None = None,
    num_threads: int = 4,
) -> list[Damage]:
    """Returns all damage of a step; blocks.

    Args:
      step_path: a slot, a checkpoint, or a snapshot, whose own links are new: with it
        those of both slots are looked at.
      progress: called with the bytes done and in all.
      seen: checksums of files by device and inode, to which those of this step are
        added, so that a file of several steps is read once.
    """
    place, damages = directory.place_of(step_path), list[Damage]()
    try:
        step = step_of(directory, step_path)
        step.check()
    except StoreFormatError as error:
        return [Damage(step_path / "commit.json", "commit record", str(error))]
    for file, what, check in _checks(directory, place, step.commit.carry):
        try:
            check()
        except (StoreError, ValueError) as error:
            damages.append(Damage(file, what, str(error)))
    seen, total, done = {} if seen is None else seen, step_bytes(directory), 0
    with StepReader(step) as reader:

        def damage_of(one: ChunkFile) -> Damage | None:
            root, problem = step.places[one.csd], ""
            sums = step.commit.checksums[one.array]
            expected = int(sums[one.leaf.places[one.chunk]])
            try:
                check_length(root, one.name, one.num_bytes)
                status = os.lstat(root / one.name)
                inode = (status.st_dev, status.st_ino)
                if inode not in seen:
                    seen[inode] = reader.checksum(root, one)
                if (found := seen[inode]) != expected:
                    problem = f"expected CRC-32C {expected:08x}, found {found:08x}"
                elif (size := status.st_size) != one.file_bytes:  # for stock readers
                    problem = f"expected a file of {one.file_bytes} bytes, found {size}"
            except (StoreError, OSError) as error:
                problem = str(error)
            return Damage(root / one.name, str(one), problem) if problem else None

        for one, damage in over(directory.manifest.held(), damage_of, num_threads):
            damages += [damage] if damage is not None else []
            done += one.num_bytes
            if progress is not None:
                progress(done, total)
    return damages


def _checks(
    directory: StoreDirectory, place: str, carry: Sequence[CarriedArray]
) -> Iterator[tuple[Path, str, Callable[[], object]]]:
    """Yields what a step has beside chunks: file, description, and what checks it."""
    is_pinned = place.startswith("snapshots/")
    for own in (place, *SLOTS) if is_pinned else (place,):
        step = directory.step_path(own)
        for name, what in step_files(directory, own, carry):
            match what:
                case str() if own != place or not is_pinned:
                    check = partial(_check_link, directory, step / name, what)
                    yield step / name, f"link {name}", check
                case bytes() if own == place:
                    yield step / name, name, partial(_check_document, step, name, what)
                case CarriedArray() if own == place:
                    yield step / name, name, partial(read_carry, step, [what])
    if place.startswith("checkpoints/"):
        check = partial(find_step, directory, place.removeprefix("checkpoints/"))
        file = directory.step_path(place) / "jaxinf.json"
        yield file, "jaxinf.json", check


def _check_document(step: Path, name: str, expected: bytes) -> None:
    found = read_beneath(step, name, MOST_BYTES)
    if found != expected and _content(found) != _content(expected):
        raise StoreFormatError("expected what jaxinf writes, found others")


def _content(raw: bytes) -> Any:
    """Returns what a document says; its spelling and times may differ."""
    try:
        found = parse_json(raw)
    except DocumentError:
        return raw
    for name in TIMES:
        if isinstance(found, dict) and isinstance(found.get(name), int):
            del found[name]
    return found


def _check_link(directory: StoreDirectory, link: Path, target: str) -> None:
    directory.check_folder(directory.path, link.parent)
    try:
        found = f"one to {os.readlink(link)}"
    except FileNotFoundError:
        found = "nothing"
    except OSError:
        found = "another file"
    if found != f"one to {target}":
        raise StoreFormatError(f"expected a symbolic link to {target}, found {found}")
