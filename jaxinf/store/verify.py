"""Compares a committed step's files with its record, chunk by chunk.

Invariant: files are only read, through one small buffer for each thread. All damage is
found, not only the first, and a file that two steps share is read once.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

from jaxinf.errors import StoreError, StoreFormatError
from jaxinf.store.commit import CarriedArray, CommitRecord
from jaxinf.store.directory import SLOTS, StoreDirectory
from jaxinf.store.manifest import ChunkFile, Manifest
from jaxinf.store.reader import PIECE_BYTES, Damage, file_checksum, over
from jaxinf.store.stock import document_problems, orbax_links
from jaxinf.transfer import BufferPool, open_beneath
from jaxinf.typing import ProgressCallback


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
    is_item = place.startswith("checkpoints/")
    damages = []
    for own in SLOTS if place.startswith("snapshots/") else (place,):
        damages += _link_damages(directory, own, record.carry if is_item else ())
    problems = document_problems(step_path, manifest, record.carry, is_item=is_item)
    damages += [Damage(step_path / name, name, why) for name, why in problems]
    if is_item:
        damages += _manifest_damages(step_path / "jaxinf.json", manifest)
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


def _link_damages(
    directory: StoreDirectory, place: str, carry: Sequence[CarriedArray]
) -> Iterator[Damage]:
    """Yields links of a step that are missing or have a wrong target."""
    step_path, links = directory.step_path(place), dict[str, str]()
    if place.startswith("checkpoints/"):
        links = orbax_links(directory.manifest, carry)
    for one in directory.manifest.held() if directory.manifest.csds else ():
        try:
            directory.check_folder(directory.path, (step_path / one.name).parent)
            links[one.name] = str(directory.file_of(place, one))
        except StoreError as error:
            what = f"leaf {one.leaf.name}, {one.state.name}"
            yield Damage(step_path / one.array, what, str(error))
    for name, expected in links.items():
        try:
            found = f"one to {os.readlink(step_path / name)}"
        except FileNotFoundError:
            found = "nothing"
        except OSError:
            found = "another file"
        if found != f"one to {expected}":
            problem = f"expected a symbolic link to {expected}, found {found}"
            yield Damage(step_path / name, f"link {name}", problem)


def _manifest_damages(file: Path, manifest: Manifest) -> Iterator[Damage]:
    """Yields the damage of a checkpoint's manifest."""
    try:
        held = Manifest.read(file)
        if (held.store_id, held.leaves) == (manifest.store_id, manifest.leaves):
            return
        problem = "expected the arrays of this store, found another manifest"
    except StoreFormatError as error:
        problem = str(error)
    yield Damage(file, file.name, problem)
