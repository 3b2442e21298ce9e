"""Compares a committed step's files with its record, chunk by chunk.

Invariant: files are only read, through one small buffer for each thread. All damage is
found, not only the first, and a file that two steps share is reported once.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np

from jaxinf.errors import StoreError, StoreFormatError
from jaxinf.io import BufferPool, open_beneath
from jaxinf.store.carry import carry_problems
from jaxinf.store.commit import CommitRecord
from jaxinf.store.damage import Damage
from jaxinf.store.directory import StoreDirectory, document_problem, link_problem
from jaxinf.store.manifest import Manifest
from jaxinf.store.reader import PIECE_BYTES, file_checksum
from jaxinf.store.stock_documents import (
    ARRAYS,
    STOCK_DOCUMENTS,
    document_checksum,
)
from jaxinf.store.whole import member_name
from jaxinf.store.zarr_metadata import ORBAX_ITEM, ORBAX_STATE
from jaxinf.typing import ProgressCallback


@dataclass(frozen=True)
class _ChunkFile:
    """A chunk's file, and its expected content.

    Attributes:
      root: the directory of the step's chunks on its CSD.
      file_bytes: its length with padding, since stock readers refuse shorter files.
      expected: CRC-32C of the elements.
    """

    root: Path
    name: str
    what: str
    num_bytes: int
    file_bytes: int
    expected: int

    @property
    def file(self) -> Path:
        return self.root / self.name


_Seen: TypeAlias = dict[tuple[int, int], int]


def step_bytes(directory: StoreDirectory) -> int:
    """Returns the bytes of state in one committed step, without padding."""
    return sum(
        directory.state_bytes(number, chunk, state)
        for number, _, state, chunk in directory.held()
    )


class Verifier:
    """Verifies steps of one store; a file that several steps share is read once.

    Args:
      directory: the store.
      num_workers: number of threads that read.
    """

    def __init__(self, directory: StoreDirectory, *, num_workers: int = 4) -> None:
        self._directory = directory
        self._num_workers = num_workers
        self._seen: _Seen = {}

    def verify(
        self, step_path: Path, progress: ProgressCallback | None = None
    ) -> list[Damage]:
        """Returns all damage of a step.

        Args:
          step_path: a slot, a checkpoint, or a snapshot.
          progress: called with the bytes done and in all.
        """
        record_path = step_path / "commit.json"
        try:
            record = CommitRecord.read(record_path)
        except StoreFormatError as error:
            return [Damage(step_path, record_path, "commit record", str(error))]
        place = self._place(step_path)
        damages = self.links(place) if place else []
        damages += self._exchanged(step_path)
        damages += self._documents(step_path)
        damages += self._checkpoint_documents(step_path, place or "")
        for damage in self._sealed(step_path, record):
            if damage.what != ARRAYS or not damages:  # otherwise it is listed already
                damages.append(damage)
        damages += self._carried(step_path, place or "", record)
        total, done = step_bytes(self._directory), 0
        with (
            closing(BufferPool(self._num_workers * PIECE_BYTES)) as pool,
            ThreadPoolExecutor(self._num_workers) as threads,
        ):
            files = list(self._chunk_files(step_path, place, record, damages))
            problems = threads.map(lambda item: self._problem(item, pool), files)
            for item, problem in zip(files, problems, strict=True):
                if problem:
                    damages.append(Damage(step_path, item.file, item.what, problem))
                done += item.num_bytes
                if progress is not None:
                    progress(done, total)
        return damages

    def _exchanged(self, step_path: Path) -> Iterator[Damage]:
        """Checks that a run's member lies at its own place in the run."""
        member, path = self._directory.manifest.member, self._directory.path
        own = None if member is None else member_name(member.number)
        if own in (None, path.name) or not path.name.startswith("process-"):
            return
        yield Damage(
            step_path,
            path / "jaxinf.json",
            "member",
            f"expected this member of a run in {own}, found it in {path.name}; were "
            "directories of members exchanged? Rename them back",
        )

    def links(self, place: str) -> list[Damage]:
        """Returns links of a step that are missing or have a wrong target.

        Args:
          place: as for `StoreDirectory.step_path`.
        """
        directory, damages = self._directory, []
        step_path = directory.step_path(place)

        def compare(link: Path, expected: Path) -> None:
            if problem := link_problem(link, expected):
                what = f"link {link.relative_to(step_path)}"
                damages.append(Damage(step_path, link, what, problem))

        if is_checkpoint := place.startswith("checkpoints/"):
            compare(step_path / ORBAX_STATE, Path(ORBAX_ITEM))
            compare(step_path / ORBAX_ITEM / "_METADATA", Path("../_METADATA"))
        for number, leaf, _ in directory.leaves():
            for state in leaf.states:
                name = leaf.array_name(state.name)
                if is_checkpoint:
                    compare(step_path / ORBAX_ITEM / name, Path("..", name))
                try:
                    for chunk in leaf.held if directory.manifest.csds else ():
                        at = place, number, chunk, state.name
                        compare(directory.chunk_name(*at), directory.chunk_file(*at))
                except StoreError as error:
                    what, array = f"leaf {leaf.name}, {state.name}", step_path / name
                    damages.append(Damage(step_path, array, what, str(error)))
        return damages

    def _place(self, step_path: Path) -> str | None:
        """Returns the step's place in the store; None for a copy elsewhere."""
        if not step_path.is_relative_to(self._directory.path):
            return None
        parts = step_path.relative_to(self._directory.path).parts
        if parts == ("current",):
            return self._directory.committed_slot()
        return parts[1] if parts[:1] == ("slots",) else "/".join(parts)

    def _checkpoint_documents(self, step_path: Path, place: str) -> Iterator[Damage]:
        """Checks a checkpoint's manifest, and the documents that Orbax needs."""
        if not place.startswith("checkpoints/"):
            return
        file, manifest = step_path / "jaxinf.json", self._directory.manifest
        try:
            held = Manifest.read(file)
        except StoreFormatError as error:
            yield Damage(step_path, file, "manifest", str(error))
        else:
            if (held.store_id, held.leaves) != (manifest.store_id, manifest.leaves):
                problem = "expected the arrays of this store, found another manifest"
                yield Damage(step_path, file, "manifest", problem)
        marker = step_path / "orbax.checkpoint"
        if not marker.is_file():
            problem = "expected the file by which Orbax knows a checkpoint, found none"
            yield Damage(step_path, marker, "orbax.checkpoint", problem)

    def _problem(self, item: _ChunkFile, pool: BufferPool) -> str | None:
        try:
            fd = open_beneath(item.root, item.name)
            try:
                status = os.fstat(fd)
            finally:
                os.close(fd)
            if status.st_size < item.num_bytes:
                found_bytes = f"{item.num_bytes} bytes, found {status.st_size}"
                return f"truncated: expected {found_bytes}"
            inode = (status.st_dev, status.st_ino)
            found = self._seen.get(inode)
            if found is None:
                found = file_checksum(item.file, item.num_bytes, pool)
                self._seen[inode] = found
        except FileNotFoundError:
            return "expected a chunk file, found none"
        except (StoreError, OSError) as error:
            return str(error)
        if found != item.expected:
            return f"expected CRC-32C {item.expected:08x}, found {found:08x}"
        if status.st_size != item.file_bytes:
            return f"expected a file of {item.file_bytes} bytes, found {status.st_size}"
        return None

    def _chunk_files(
        self,
        step_path: Path,
        place: str | None,
        record: CommitRecord,
        damages: list[Damage],
    ) -> Iterator[_ChunkFile]:
        directory = self._directory
        for number_of_leaf, leaf in enumerate(directory.manifest.leaves):
            num_chunks = len(leaf.held)
            for state in leaf.states:
                name = leaf.array_name(state.name)
                sums = record.checksums.get(name, np.zeros(0, np.uint32))
                if len(sums) != num_chunks:
                    damages.append(
                        Damage(
                            step_path,
                            step_path / "commit.json",
                            f"leaf {leaf.name}, {state.name}",
                            f"expected {num_chunks} checksums, found {len(sums)}",
                        )
                    )
                    continue
                for number, expected in zip(leaf.held, sums, strict=True):
                    chunk = directory.state_chunk(number_of_leaf, number, state)
                    csd = leaf.csds[number]
                    yield _ChunkFile(
                        directory.data_path(place, csd) if place else step_path,
                        f"{name}/{chunk.key}",
                        f"leaf {leaf.name}, {state.name}, chunk {number} of "
                        f"{len(leaf.csds)}, on CSD {csd}",
                        chunk.num_elements * state.itemsize,
                        chunk.stored_elements * state.itemsize,
                        int(expected),
                    )

    def _sealed(self, step_path: Path, record: CommitRecord) -> Iterator[Damage]:
        """Checks the documents that have checksums in the record."""
        for name in STOCK_DOCUMENTS:
            expected = record.documents.get(name)
            if expected is None:
                problem = "expected its CRC-32C in commit.json, found none"
                yield Damage(step_path, step_path / name, name, problem)
                continue
            try:
                found = document_checksum(step_path, self._directory.manifest, name)
            except StoreError as error:
                yield Damage(step_path, step_path / name, name, str(error))
                continue
            if found != expected:
                problem = f"expected CRC-32C {expected}, found {found}"
                yield Damage(step_path, step_path / name, name, problem)

    def _carried(
        self, step_path: Path, place: str, record: CommitRecord
    ) -> Iterator[Damage]:
        """Checks the arrays that a step carries, and Orbax's links to them."""
        for name, problem in carry_problems(step_path, record.carry):
            yield Damage(step_path, step_path / name, name, problem)
        for one in record.carry if place.startswith("checkpoints/") else ():
            link = step_path / ORBAX_ITEM / one.name
            if problem := link_problem(link, Path("..", one.name)):
                what = f"link {link.relative_to(step_path)}"
                yield Damage(step_path, link, what, problem)

    def _documents(self, step_path: Path) -> Iterator[Damage]:
        """Checks the zarr metadata, by which other tools read the arrays."""
        for leaf in self._directory.manifest.leaves:
            for state in leaf.states:
                name = f"{leaf.array_name(state.name)}/zarr.json"
                file = step_path / name
                problem = document_problem(step_path, name, leaf, state)
                if problem:
                    what = f"leaf {leaf.name}, {state.name}, zarr metadata"
                    yield Damage(step_path, file, what, problem)
