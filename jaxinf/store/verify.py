"""Compares the files of a committed step with what its record says.

Invariant: files are only read, through one small buffer for each thread. All damage is
found, not only the first, and a file that two steps share is read once.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxinf.documents import MOST_BYTES, DocumentError, parse_json
from jaxinf.errors import StoreError, StoreFormatError
from jaxinf.store.carried_arrays import CarriedArray, read_carry
from jaxinf.store.directory import SLOTS, StoreDirectory, check_no_link
from jaxinf.store.manifest import ChunkFile
from jaxinf.store.reader import StepReader, map_in_threads
from jaxinf.store.step_files import TIMES, step_files
from jaxinf.store.steps import find_step, read_step
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
    return sum(chunk.num_bytes for chunk in directory.manifest.held_chunks())


def verify_step(
    directory: StoreDirectory,
    step_path: Path,
    progress: ProgressCallback | None = None,
    *,
    seen: dict[tuple[int, int], int] | None = None,
    num_threads: int = 4,
) -> list[Damage]:
    """Returns all damage of a step: a slot, a checkpoint or a snapshot; blocks.

    A snapshot's own links are new: those of both slots are checked in their place.

    Args:
      progress: Called with the bytes done and in all.
      seen: Checksums of files by device and inode, so that a file of several steps is
        read once; this step's are added.
    """
    try:
        step = read_step(directory, step_path)
        step.check()
    except StoreFormatError as error:
        return [Damage(step_path / "commit.json", "commit record", str(error))]
    place = directory.place_of(step_path)
    damages = [*_find_damaged_files(directory, place, step.commit.carry)]
    seen, total, done = {} if seen is None else seen, step_bytes(directory), 0
    with StepReader(step) as reader:

        def find_damage(chunk: ChunkFile) -> Damage | None:
            root, name, problem = step.chunk_roots[chunk.csd], chunk.name, ""
            checksums = step.commit.checksums[chunk.array_name]
            expected = int(checksums[chunk.leaf.positions[chunk.number]])
            try:
                check_length(root, name, chunk.num_bytes)
                status = os.lstat(root / name)
                inode = (status.st_dev, status.st_ino)
                if inode not in seen:
                    seen[inode] = reader.checksum(root, chunk)
                wanted, size = chunk.file_bytes, status.st_size
                if (found := seen[inode]) != expected:
                    problem = f"expected CRC-32C {expected:08x}, found {found:08x}"
                elif size != wanted:  # other zarr readers read the padding, too
                    problem = f"expected a file of {wanted} bytes, found {size}"
            except (StoreError, OSError) as error:
                problem = str(error)
            return Damage(root / name, str(chunk), problem) if problem else None

        chunks = directory.manifest.held_chunks()
        for chunk, damage in map_in_threads(chunks, find_damage, num_threads):
            damages += [damage] if damage is not None else []
            done += chunk.num_bytes
            if progress is not None:
                progress(done, total)
    return damages


def _find_damaged_files(
    directory: StoreDirectory, place: str, carry: Sequence[CarriedArray]
) -> Iterator[Damage]:
    """Yields the damage of a step's files that are no chunks."""
    is_pinned = place.startswith("snapshots/")
    for checked in (place, *SLOTS) if is_pinned else (place,):
        step = directory.step_path(checked)
        for name, content in step_files(directory, checked, carry):
            try:
                match content:
                    case str() if checked != place or not is_pinned:
                        _check_link(directory, step / name, content)
                    case bytes() if checked == place:
                        found = read_beneath(step, name, MOST_BYTES)
                        if found != content and _content(found) != _content(content):
                            raise ValueError(
                                "expected what jaxinf writes, found others"
                            )
                    case CarriedArray() if checked == place:
                        read_carry(step, [content])
            except (StoreError, ValueError) as error:
                what = f"link {name}" if isinstance(content, str) else name
                yield Damage(step / name, what, str(error))
    if place.startswith("checkpoints/"):
        try:
            find_step(directory, place.removeprefix("checkpoints/"))
        except (StoreError, ValueError) as error:
            file = directory.step_path(place) / "jaxinf.json"
            yield Damage(file, file.name, str(error))


def _content(raw: bytes) -> Any:
    """Returns what a document says, without its spelling and its times."""
    try:
        content = parse_json(raw)
    except DocumentError:
        return raw
    for name in TIMES:
        if isinstance(content, dict) and isinstance(content.get(name), int):
            del content[name]
    return content


def _check_link(directory: StoreDirectory, link: Path, target: str) -> None:
    check_no_link(directory.path, link.parent, os.O_DIRECTORY)
    try:
        found = f"one to {os.readlink(link)}"
    except FileNotFoundError:
        found = "nothing"
    except OSError:
        found = "another file"
    if found != f"one to {target}":
        raise StoreFormatError(f"expected a symbolic link to {target}, found {found}")
