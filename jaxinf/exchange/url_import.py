"""A new store from an export at a URL, bit for bit, with the codecs that it had.

Invariant: an object is used if it is as the manifest of the export says, and a name of
  the export becomes a path only if this module has made it from the store's manifest.
"""

import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxinf.errors import ExchangeError
from jaxinf.exchange.object_store import ObjectStore
from jaxinf.exchange.own_import import make_of
from jaxinf.exchange.step_files import DEFAULT_MEMORY_BYTES
from jaxinf.exchange.store_import import ImportReport
from jaxinf.exchange.url_export import (
    ChunkObject,
    check_memory,
    chunk_objects,
    over,
)
from jaxinf.exchange.url_manifest import BEGUN, MANIFEST, ExportManifest
from jaxinf.io import crc32c, opened_to_write, write_bytes_atomically
from jaxinf.io.failures import translated
from jaxinf.store import (
    CommitRecord,
    GivenStep,
    Manifest,
    Slot,
    StoreDirectory,
)
from jaxinf.typing import ProgressCallback

_BESIDE = re.compile(r"(?:stream|tokenizer)/[A-Za-z0-9_]+\.[a-z]+")
_NUM_GETS = 8  # documents that are read at once
_AGAIN = "export to this URL again, which writes what is missing or differs"


@dataclass(frozen=True)
class _UrlSource:
    """An export at a URL whose objects are all there.

    Attributes:
      listed: bytes and CRC-32C of each object, by name.
    """

    place: ObjectStore
    listed: Mapping[str, tuple[int, int]]
    manifest: Manifest
    commit: CommitRecord

    @classmethod
    def open(cls, url: str) -> "_UrlSource":
        """Reads the documents of an export, and lists its objects; blocks.

        Raises:
          ExchangeError: there is no export, it was interrupted, or objects are gone or
            torn; names them.
          StoreFormatError: its manifest or record is of another format.
        """
        place = ObjectStore(url)
        export = ExportManifest.read(place, MANIFEST)
        if export is None:
            begun = ExportManifest.read(place, BEGUN)
            found = "nothing of one"
            if begun is not None:
                found = (
                    f"none, and {BEGUN} of step {begun.step}: the export was "
                    "interrupted, or the manifest is gone"
                )
            raise ExchangeError(
                f"{place.where}: expected {MANIFEST}, which completes an export, found "
                f"{found}; {_AGAIN if begun else 'check the URL'}"
            )
        listed = {n: (b, int(crc, 16)) for n, (b, crc) in export.objects.items()}
        place.check_all(listed, f"they were removed: {_AGAIN}")
        with tempfile.TemporaryDirectory() as folder:
            for name in ("jaxinf.json", "commit.json"):
                if name not in listed:
                    raise ExchangeError(f"{place.where}: {MANIFEST} lists no {name}")
                content = place.get(name, *listed[name])
                (Path(folder) / name).write_bytes(content)
            manifest = Manifest.read(Path(folder) / "jaxinf.json")
            commit = CommitRecord.read(Path(folder) / "commit.json")
            commit.check_fits(Path(folder) / "commit.json", manifest)
        source = cls(place, listed, manifest, commit)
        missing = sorted({chunk.name for chunk in source.chunks} - set(source.listed))
        if missing:
            raise ExchangeError(
                f"{place.where}: {MANIFEST} does not list {missing[0]}, a chunk of its "
                f"jaxinf.json; {_AGAIN}"
            )
        beside = listed.keys() - {chunk.name for chunk in source.chunks}
        for _ in over(sorted(beside), lambda n: place.get(n, *listed[n]), _NUM_GETS):
            pass
        return source

    @property
    def chunks(self) -> list[ChunkObject]:
        return list(chunk_objects(self.manifest, self.commit))

    def content(self, chunk: ChunkObject) -> bytes:
        """Reads a chunk's elements; blocks.

        Raises:
          ExchangeError: it is missing or torn.
        """
        value = self.place.get(chunk.name, *self.listed[chunk.name])
        value = value[: chunk.num_elements_bytes]
        found = crc32c(np.frombuffer(value, np.uint8)) if value else 0
        if (len(value), found) != (chunk.num_elements_bytes, chunk.elements_sum):
            raise ExchangeError(
                f"{self.place.where}: {chunk.name}: expected CRC-32C "
                f"{chunk.elements_sum:08x}, as its commit.json says, found "
                f"{found:08x}; {_AGAIN}"
            )
        return value


def import_url(
    url: str,
    store: Path,
    *,
    csds: Sequence[Path] = (),
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    progress: ProgressCallback | None = None,
) -> ImportReport:
    """Makes a new store from an export at a URL; blocks.

    Args:
      url: the place of an `export_url`.
      store: path of the new store; missing or an empty directory.
      csds: absolute CSD roots to spread it over; by default the store itself.
      memory_bytes: memory for data in transit.
      progress: called with the bytes of chunks done and those in all.

    Raises:
      ExchangeError: there is no complete export, or objects are gone or torn; no store
        was made.
      StoreFormatError: something is in the store's place.
      StoreSpaceError: there is no room; nothing was written.
      ValueError: too little memory; says how much is needed.
      StoreError: a drive failed.
    """
    source = _UrlSource.open(url)
    step = _step(source, memory_bytes, progress)
    return make_of(step, store, csds, lambda: _keep_beside(source, store))


def url_step(
    url: str, *, memory_bytes: int, progress: ProgressCallback | None = None
) -> GivenStep:
    """Returns the step of an `export_url`, whose objects are all there; blocks.

    Raises:
      ExchangeError, StoreFormatError, ValueError: as `import_url`.
    """
    return _step(_UrlSource.open(url), memory_bytes, progress)


def _step(
    source: _UrlSource, memory_bytes: int, progress: ProgressCallback | None
) -> GivenStep:
    num_threads = check_memory(source.chunks, memory_bytes)

    def fill(directory: StoreDirectory, slot: Slot) -> None:
        places = {
            (leaf.path, state.name, chunk): (number, chunk, state.name)
            for number, leaf in enumerate(directory.manifest.leaves)
            for state in leaf.states
            for chunk in leaf.held
        }
        held = [
            (chunk, places[key])
            for chunk in source.chunks
            if (key := (chunk.leaf.path, chunk.state.name, chunk.number)) in places
        ]
        total_bytes, done_bytes = sum(chunk.num_bytes for chunk, _ in held), 0

        def bring(one: tuple[ChunkObject, tuple[int, int, str]]) -> None:
            chunk, place = one
            file = directory.prepare_write(slot, *place)
            _write_chunk(file, source.content(chunk))

        for (chunk, _), _ in over(held, bring, num_threads):
            done_bytes += chunk.num_bytes
            if progress is not None:
                progress(done_bytes, total_bytes)

    return GivenStep(source.place.where, source.manifest, source.commit, fill)


def _keep_beside(source: _UrlSource, store: Path) -> None:
    """Writes the files of `files_beside`; other names are left out."""
    for name, expected in source.listed.items():
        if _BESIDE.fullmatch(name):
            (store / name).parent.mkdir(exist_ok=True)
            write_bytes_atomically(store / name, source.place.get(name, *expected))


def _write_chunk(file: Path, content: bytes) -> None:
    """Writes the elements of a chunk into its file, which has room; blocks."""
    done = 0
    with translated("write", file), opened_to_write(file) as fd:
        while done < len(content):
            done += os.pwrite(fd, memoryview(content)[done:], done)
