"""An export at a URL as what a copy begins with, with the codecs that it had.

Invariant: an object is used if it is as the manifest of the export says, and a name of
  the export becomes a path only if it is one of `BESIDE`.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxinf.errors import ExchangeError, StoreCorruptError
from jaxinf.exchange.object_store import ObjectStore, Stamp
from jaxinf.exchange.params import DEFAULT_MEMORY_BYTES
from jaxinf.exchange.url_export import (
    BEGUN,
    MANIFEST,
    ExportManifest,
    chunk_objects,
    num_at_once,
)
from jaxinf.io import BufferPool, crc32c
from jaxinf.store import (
    BESIDE,
    CommitRecord,
    CopySource,
    Manifest,
    StepReader,
    WholeStep,
    checked_carry,
    over,
)
from jaxinf.typing import Array

_NUM_GETS = 8  # documents that are read at once
_AGAIN = "export to this URL again, which writes what is missing or differs"


def export_source(url: str, memory_bytes: int = DEFAULT_MEMORY_BYTES) -> CopySource:
    """Returns the step of an `export_url`, whose objects are all there; blocks.

    Args:
      url: its place.
      memory_bytes: memory for data in transit.

    Raises:
      ExchangeError: there is no export, it was interrupted, or objects are gone or
        torn; names them.
      StoreFormatError: its manifest or record is of another format.
      ValueError: too little memory; says how much is needed.
    """
    place = ObjectStore(url)
    listed = _listed(place)
    with tempfile.TemporaryDirectory() as folder:
        for name in ("jaxinf.json", "commit.json"):
            if name not in listed:
                raise ExchangeError(f"{place.where}: {MANIFEST} lists no {name}")
            (Path(folder) / name).write_bytes(place.get(name, listed[name]))
        manifest = Manifest.read(Path(folder) / "jaxinf.json")
        commit = CommitRecord.read(Path(folder) / "commit.json")
        commit.check_fits(Path(folder) / "commit.json", manifest)
    chunks = list(chunk_objects(manifest, commit))
    names = {chunk.name for chunk in chunks} | {one.chunk for one in commit.carry}
    missing = sorted(names - set(listed))
    if missing:
        raise ExchangeError(
            f"{place.where}: {MANIFEST} does not list {missing[0]}, a chunk of its "
            f"jaxinf.json; {_AGAIN}"
        )
    beside = listed.keys() - {chunk.name for chunk in chunks}
    for _ in over(sorted(beside), lambda n: place.get(n, listed[n]), _NUM_GETS):
        pass

    def files_beside() -> dict[str, bytes]:
        names = filter(BESIDE.fullmatch, listed)
        return {name: place.get(name, listed[name]) for name in names}

    def read_carried(step: WholeStep) -> list[bytes]:
        pairs = [(x, place.get(x.chunk, listed[x.chunk])) for x in step.commit.carry]
        return [checked_carry(one, raw, place.where) for one, raw in pairs]

    read_pieces = _pieces_of(place, listed)
    return CopySource(
        place.where,
        [manifest],
        {"a": WholeStep(Path(place.where), manifest, commit, ())},
        files_beside,
        lambda step: StepReader(step.path, step.commit, read_pieces=read_pieces),
        has_links=False,
        read_carry=read_carried,
        num_threads=num_at_once(manifest, memory_bytes),
    )


def _listed(place: ObjectStore) -> dict[str, Stamp]:
    """Returns bytes and CRC-32C of each object of a complete export, by name."""
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
    return listed


def _pieces_of(
    place: ObjectStore, listed: Mapping[str, Stamp]
) -> Callable[..., Iterator[Array]]:
    """Returns what reads a chunk's object as `stored_pieces` reads its file."""

    def pieces(
        _root: Path,
        name: str,
        num_bytes: int,
        _pool: BufferPool,
        check: Callable[[int], object],
        *,
        piece_bytes: int,
        **_options: Any,
    ) -> Iterator[Array]:
        content = np.frombuffer(place.get(name, listed[name]), np.uint8)[:num_bytes]
        found = crc32c(content) if num_bytes else 0
        try:
            check(found)
        except StoreCorruptError:
            raise ExchangeError(
                f"{place.where}: {name}: expected the CRC-32C that its commit.json "
                f"says, found {found:08x}; {_AGAIN}"
            ) from None
        for offset in range(0, num_bytes, piece_bytes):
            yield content[offset : offset + piece_bytes]

    return pieces
