"""A committed step at a URL: raw zarr v3 chunks, and a manifest that comes last.

      export-begun.json ─► chunks ─► documents ─► export.json

Invariant: memory stays within the budget. A chunk that is there and right is not
  written again, and no other is believed; `MANIFEST` is written when every other has
  been read back. A copy from there uses an object if it is as the manifest says, and a
  name becomes a path only if it is one of `BESIDE`.
"""

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import numpy as np
from msgspec import Meta, structs

from jaxinf.documents import Document
from jaxinf.errors import ExchangeError, StoreCorruptError, StoreFormatError
from jaxinf.exchange.object_store import ObjectStore, Stamp, is_url, stamp_of
from jaxinf.exchange.params import DEFAULT_MEMORY_BYTES, ExportOptions
from jaxinf.layout import scale_chunks
from jaxinf.store import (
    BESIDE,
    CommitRecord,
    CopySource,
    Id,
    LeafRecord,
    Manifest,
    StateRecord,
    StepReader,
    Sum,
    WholeStep,
    carry_files,
    check_free_space,
    checked_carry,
    over,
    read_carry,
    read_document,
    seal,
    step_documents,
)
from jaxinf.transfer import BufferPool, crc32c, crc32c_combine
from jaxinf.typing import Array

BEGUN = "export-begun.json"
"""The first object: whose export lies here."""

MANIFEST = "export.json"
"""The last object."""

_PLACE = {"format": "jaxinf exports", "format_version": 1}
_ROOT = "exports.json"
_WHAT = "the manifest of an export"
_REMEDY = "export to this URL again, use a newer jaxinf, or remove what is there"

_COPIES = 5  # of an object: in the reader, as read, as bytes, in tensorstore, sent
_MOST_THREADS = 8
_NUM_GETS = 8  # documents that are read at once
_AGAIN = "export to this URL again, which writes what is missing or differs"

_Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**62)]


class ExportManifest(Document, frozen=True):
    """What an export has.

    Attributes:
      commit: CRC-32C of the step's ``commit.json``.
      objects: bytes and CRC-32C of each object by name, but for the two of the export
        itself.
    """

    format: Literal["jaxinf export"]
    format_version: Literal[1]
    store_id: Id
    step: _Count
    commit: Sum
    objects: dict[Annotated[str, Meta(max_length=4096)], tuple[_Count, Sum]]

    @classmethod
    def read(cls, place: ObjectStore, name: str) -> "ExportManifest | None":
        """Reads `MANIFEST` or `BEGUN`; None if it is not there."""
        raw, where = place.read(name), f"{place.where}: {name}"
        if raw is None:
            return None
        try:
            return read_document(where, cls, _WHAT, _REMEDY, raw=raw)
        except StoreFormatError as error:
            raise ExchangeError(str(error)) from error

    @classmethod
    def found(cls, place: ObjectStore) -> "ExportManifest | None":
        """Reads what is at a place, complete or not."""
        return cls.read(place, MANIFEST) or cls.read(place, BEGUN)


def export_url_at(place: str) -> str | None:
    """Returns the URL of an export, given as such or as its directory, else None."""
    if is_url(place):
        return place
    directory = Path(os.path.abspath(os.path.expanduser(place)))
    return f"file://{directory}" if (directory / MANIFEST).is_file() else None


class UrlReport(NamedTuple):
    """The result of an export to a URL.

    Attributes:
      step: the step.
      num_objects: objects of the export.
      num_bytes: their bytes.
      num_kept: chunks that an earlier call had written already.
    """

    step: int
    num_objects: int
    num_bytes: int
    num_kept: int


class _ChunkObject(NamedTuple):
    """A chunk as an object: its elements, and zeros up to the grid's chunk shape."""

    leaf: LeafRecord
    state: StateRecord
    number: int
    name: str
    stamp: Stamp


@lru_cache(maxsize=1024)
def _stamp_of_zeros(num_bytes: int) -> Stamp:
    return stamp_of(bytes(num_bytes))


def _chunk_objects(manifest: Manifest, commit: CommitRecord) -> Iterator[_ChunkObject]:
    """Yields the held chunks of a step, state by state in each leaf."""
    for leaf in manifest.leaves:
        grid = leaf.grid.chunks()
        for state in leaf.states:
            chunks = scale_chunks(leaf.grid, grid) if state.codec == "scale" else grid
            name = leaf.array_name(state.name)
            for place, number in enumerate(leaf.held):
                chunk, checksum = chunks[number], int(commit.checksums[name][place])
                num_bytes = chunk.stored_elements * state.itemsize
                elements_bytes = chunk.num_elements * state.itemsize
                padding, crc = _stamp_of_zeros(num_bytes - elements_bytes)
                whole = crc32c_combine([(checksum, elements_bytes), (crc, padding)])
                key = f"{name}/{chunk.key}"
                yield _ChunkObject(leaf, state, number, key, (num_bytes, whole))


def export_url(
    step: WholeStep,
    url: str,
    *,
    beside: Mapping[str, bytes] | None = None,
    options: ExportOptions | None = None,
) -> UrlReport:
    """Writes a step as objects below a URL; blocks until all have been read back.

    The objects are a zarr v3 group and an Orbax checkpoint. After an interruption, call
    it again with the same step: it reads what is there, and writes what is missing or
    differs.

    Args:
      step: the step to export, with all chunks.
      url: a place with nothing else; see `ObjectStore`.
      beside: further files by name, which a copy from there puts into the store.
      options: how it moves; by default in 256 MiB.

    Raises:
      ExchangeError: the place cannot be used, or has another export or other objects.
      ValueError: too little memory; says how much is needed.
      StoreSpaceError: there is no room.
      StoreCorruptError: a chunk is damaged.
      StoreError: the step cannot be read.
    """
    if step.manifest.member is not None:
        raise StoreFormatError(
            f"{step.path}: expected a whole step, found a member's part; give the path "
            "of the run"
        )
    options = options or ExportOptions()
    place = ObjectStore(url, options.stop)
    chunks = list(_chunk_objects(step.manifest, step.commit))
    num_threads = _num_at_once(step.manifest, options.memory_bytes)
    documents = _documents(step, beside or {})
    commit = f"{stamp_of(documents['commit.json'])[1]:08x}"
    store_id, number = step.manifest.store_id, step.commit.step
    own = ExportManifest("jaxinf export", 1, store_id, number, commit, {})
    there = place.names()
    _check_free(place, there, own)
    if place.directory is not None:
        check_free_space(
            {place.directory: sum(x.stamp[0] for x in chunks if x.name not in there)},
            "the export takes",
            "free some, or export to another place",
        )
    place.put(BEGUN, seal(own))
    total_bytes, done_bytes, num_kept = sum(x.stamp[0] for x in chunks), 0, 0
    with step.reader(options.memory_bytes // _COPIES) as reader:

        def bring(chunk: _ChunkObject) -> bool:
            """Writes a chunk, unless it is there and right; returns whether it was."""
            if chunk.name in there and place.has(chunk.name, chunk.stamp):
                return True
            pieces = reader.stored(chunk.leaf, chunk.state, chunk.number)
            content = b"".join(piece.values.tobytes() for piece in pieces)
            place.put(chunk.name, content.ljust(chunk.stamp[0], b"\0"))
            return False

        for chunk, was_there in over(chunks, bring, num_threads):
            num_kept += was_there
            done_bytes += chunk.stamp[0]
            if options.progress is not None:
                options.progress(done_bytes, total_bytes)
    for name, value in documents.items():
        place.put(name, value)
    objects = {chunk.name: chunk.stamp for chunk in chunks}
    objects |= {name: stamp_of(value) for name, value in documents.items()}
    place.check_all(objects, "they were written: try again")
    listed = {n: (num, f"{crc:08x}") for n, (num, crc) in objects.items()}
    place.put(MANIFEST, seal(structs.replace(own, objects=listed)))
    num_bytes = sum(length for length, _ in objects.values())
    return UrlReport(own.step, len(objects) + 2, num_bytes, num_kept)


def least_memory(manifest: Manifest) -> int:
    """Returns memory in which a store's chunks can be exported: copies of the largest.

    An object is written whole.
    """
    sizes = (
        math.prod(leaf.chunk_shape) * state.itemsize
        for leaf in manifest.leaves
        for state in leaf.states
        if leaf.csds  # it has chunks
    )
    return max(1, _COPIES * max(sizes, default=0))


def _num_at_once(manifest: Manifest, memory_bytes: int) -> int:
    """Returns the number of threads that may have an object each; refuses none."""
    least = least_memory(manifest)
    if memory_bytes < least:
        raise ValueError(
            f"memory of {memory_bytes} bytes: expected at least {least}, {_COPIES} "
            "times the largest chunk, as an object is written whole; give --memory "
            f"{-(-least >> 20)}MiB"
        )
    return min(_MOST_THREADS, memory_bytes // least)


def _documents(step: WholeStep, beside: Mapping[str, bytes]) -> dict[str, bytes]:
    leaves = [structs.replace(n, csds=(0,) * len(n.csds)) for n in step.manifest.leaves]
    manifest = structs.replace(step.manifest, csds=(), leaves=tuple(leaves))
    carry = step.commit.carry
    return {
        **dict(step_documents(manifest, time.time_ns(), carry)),
        "jaxinf.json": seal(manifest.to_json()),
        "commit.json": seal(step.commit.to_json()),
        **beside,
        **carry_files(carry, read_carry(step.path, carry)),
    }


def _check_free(place: ObjectStore, there: set[str], own: ExportManifest) -> None:
    """Refuses a place with another export, or with other objects."""
    if there <= {BEGUN}:
        return
    found = ExportManifest.found(place)
    if found is None:
        raise ExchangeError(
            f"{place.where}: expected nothing there, found other objects, such as "
            f"{min(there)}; give another URL"
        )
    if structs.replace(found, objects={}) != own:
        raise ExchangeError(
            f"{place.where}: expected nothing, or the same export, interrupted; "
            f"found step {found.step} of store {found.store_id}, exporting step "
            f"{own.step} of {own.store_id}; give another URL, or go on with that "
            "step (--checkpoint)"
        )


def url_of_step(url: str, step: int) -> str:
    """Returns the place of one of a run's exports, which have a URL together."""
    return f"{url.rstrip('/')}/{step}"


def check_exports(url: str, step: int) -> None:
    """Refuses a place to which a run's steps cannot be exported; blocks.

    It is written to: ``exports.json`` says what the place is.

    Args:
      url: the place.
      step: the next step to be exported, of which there must be no export.
    """
    there = ObjectStore(url_of_step(url, step))
    found = ExportManifest.found(there)
    if found is not None:
        raise ExchangeError(
            f"{there.where}: expected nothing, as step {step} of this run is to be "
            f"exported there, found step {found.step} of store {found.store_id}; give "
            "another URL, or remove it"
        )
    ObjectStore(url).put(_ROOT, seal(_PLACE))


# --- out of an export ---------------------------------------------------------------


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

    def get(name: str) -> bytes:
        if name not in listed:
            raise ExchangeError(
                f"{place.where}: expected {name} in {MANIFEST}, found it not; {_AGAIN}"
            )
        return place.get(name, listed[name])

    where = f"{place.where}: commit.json"
    manifest = Manifest.read(f"{place.where}: jaxinf.json", get("jaxinf.json"))
    commit = CommitRecord.read(where, get("commit.json"))
    commit.check_fits(where, manifest)
    chunks = {chunk.name for chunk in _chunk_objects(manifest, commit)}
    carried = {one.chunk for one in commit.carry}
    if missing := sorted((chunks | carried) - set(listed)):
        get(missing[0])  # raises
    small = {
        name: content
        for name, content in over(sorted(listed.keys() - chunks), get, _NUM_GETS)
        if name in carried or BESIDE.fullmatch(name)  # others are only checked
    }

    def read_pieces(
        _root: Path,
        name: str,
        num_bytes: int,
        _pool: BufferPool,
        check: Callable[[int], object],
        *,
        piece_bytes: int,
        **_options: Any,
    ) -> Iterator[Array]:
        """Reads a chunk's object as `stored_pieces` reads its file."""
        content = np.frombuffer(get(name), np.uint8)[:num_bytes]
        try:
            check(crc32c(content) if num_bytes else 0)
        except StoreCorruptError as error:
            raise ExchangeError(
                f"{place.where}: {name}: expected the CRC-32C that its commit.json "
                f"says, found another ({error}); {_AGAIN}"
            ) from None
        for offset in range(0, num_bytes, piece_bytes):
            yield content[offset : offset + piece_bytes]

    def read_carried(step: WholeStep) -> list[bytes]:
        return [checked_carry(x, small[x.chunk], place.where) for x in commit.carry]

    return CopySource(
        place.where,
        [manifest],
        {"a": WholeStep(Path(place.where), manifest, commit, ())},
        {name: small[name] for name in small.keys() - carried},
        lambda step: StepReader(step.path, step.commit, read_pieces=read_pieces),
        has_links=False,
        read_carry=read_carried,
        num_threads=_num_at_once(manifest, memory_bytes),
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
