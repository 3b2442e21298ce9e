"""Compares a committed step's files with its record, chunk by chunk.

Invariant: files are only read, through one small buffer for each thread. All damage is
found, not only the first, and a file that two steps share is read once.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxinf.documents import MOST_BYTES, DocumentError, parse_json
from jaxinf.errors import StoreError, StoreFormatError
from jaxinf.store.commit import CarriedArray, CommitRecord
from jaxinf.store.creation import step_links
from jaxinf.store.directory import SLOTS, StoreDirectory
from jaxinf.store.manifest import ChunkFile, Manifest
from jaxinf.store.reader import PIECE_BYTES, file_checksum, over
from jaxinf.store.stock import TIMES, read_carry, step_documents
from jaxinf.transfer import BufferPool, open_beneath, read_beneath
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
    record_path, manifest = step_path / "commit.json", directory.manifest
    try:
        record = CommitRecord.read(record_path)
        record.check_fits(record_path, manifest)
    except StoreFormatError as error:
        return [Damage(record_path, "commit record", str(error))]
    place = directory.place_of(step_path)
    damages = [*_damages_of_names(directory, place, record.carry)]
    seen, total, done = {} if seen is None else seen, step_bytes(directory), 0
    with closing(BufferPool(num_threads * PIECE_BYTES)) as pool:

        def verify(one: ChunkFile) -> Damage | None:
            root = directory.data_path(place, one.csd)
            expected = int(record.checksums[one.array][one.leaf.places[one.chunk]])
            problem = _problem(root, one, expected, seen, pool)
            return Damage(root / one.name, str(one), problem) if problem else None

        for one, damage in over(manifest.held(), verify, num_threads):
            damages += [damage] if damage is not None else []
            done += one.num_bytes
            if progress is not None:
                progress(done, total)
    return damages


def _problem(
    root: Path,
    one: ChunkFile,
    expected: int,
    seen: dict[tuple[int, int], int],
    pool: BufferPool,
) -> str | None:
    try:
        fd = open_beneath(root, one.name)
        try:
            status = os.fstat(fd)
        finally:
            os.close(fd)
        if status.st_size < one.num_bytes:
            return f"truncated: expected {one.num_bytes} bytes, found {status.st_size}"
        inode = (status.st_dev, status.st_ino)
        if (found := seen.get(inode)) is None:
            found = file_checksum(root / one.name, one.num_bytes, pool)
            seen[inode] = found
    except FileNotFoundError:
        return "expected a chunk file, found none"
    except (StoreError, OSError) as error:
        return str(error)
    if found != expected:
        return f"expected CRC-32C {expected:08x}, found {found:08x}"
    if status.st_size != one.file_bytes:  # stock readers need as much
        return f"expected a file of {one.file_bytes} bytes, found {status.st_size}"
    return None


def _damages_of_names(
    directory: StoreDirectory, place: str, carry: Sequence[CarriedArray]
) -> Iterator[Damage]:
    """Yields what is wrong with documents, carried arrays and links of a step.

    Spelling and times of documents may differ.
    """
    step, manifest = directory.step_path(place), directory.manifest
    is_item = place.startswith("checkpoints/")
    for name, expected in step_documents(manifest, carry, is_item=is_item):
        try:
            found = read_beneath(step, name, MOST_BYTES)
            if found != expected and _content(found) != _content(expected):
                problem = "expected what jaxinf writes, found others"
                yield Damage(step / name, name, problem)
        except (StoreError, DocumentError) as error:
            yield Damage(step / name, name, f"cannot be read ({error})")
    for one in carry:
        try:
            read_carry(step, [one])
        except StoreError as error:
            yield Damage(step / one.chunk, one.chunk, str(error))
    for own in SLOTS if place.startswith("snapshots/") else (place,):
        for name, target in step_links(directory, own, carry):
            file, wanted = directory.step_path(own) / name, f"one to {target}"
            try:
                directory.check_folder(directory.path, file.parent)
                found = f"one to {os.readlink(file)}"
            except FileNotFoundError:
                found = "nothing"
            except StoreError as error:
                found = str(error)
            except OSError:
                found = "another file"
            if found != wanted:
                problem = f"expected a symbolic link to {target}, found {found}"
                yield Damage(file, f"link {name}", problem)
    if is_item:
        file, problem = step / "jaxinf.json", ""
        try:
            held = Manifest.read(file)
            if (held.store_id, held.leaves) != (manifest.store_id, manifest.leaves):
                problem = "expected the arrays of this store, found another manifest"
        except StoreFormatError as error:
            problem = str(error)
        if problem:
            yield Damage(file, file.name, problem)


def _content(raw: bytes) -> Any:
    """Returns what a document says, but for times."""
    found = parse_json(raw)
    for name in TIMES:
        if isinstance(found, dict) and isinstance(found.get(name), int):
            del found[name]
    return found
