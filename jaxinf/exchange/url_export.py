"""A committed step at a URL: raw zarr v3 chunks, and a manifest that comes last.

      export-begun.json ─► chunks ─► documents ─► export.json

Invariant: memory stays within the budget. A chunk that is there is compared, and only
written again if it differs; `MANIFEST` is written when every other object has been read
back. A copy from there uses an object if its bytes match the manifest, and a name
becomes a path only if it matches `FILES_BESIDE`. No credential, and no part of a URL
that may be one, is in an error.
"""

import math
import os
import re
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import tensorstore
from msgspec import Meta

from jaxinf.documents import Document, first_few
from jaxinf.errors import ExchangeError
from jaxinf.exchange.params import TRANSIT_BYTES, ExportOptions
from jaxinf.store import (
    FILES_BESIDE,
    Checksum,
    ChunkFile,
    CommitRecord,
    CommittedStep,
    CopySource,
    Id,
    Manifest,
    StepReader,
    check_free_space,
    map_in_threads,
    read_document,
    seal,
    step_documents,
    without_csds,
)
from jaxinf.terminal import format_bytes
from jaxinf.transfer import crc32c

_SCHEMES = ("file", "gs", "s3")
_URL = re.compile(r"([a-z][a-z0-9+.-]*)://(.*)", re.DOTALL)
# Tensorstore's errors: of a wrong spec, of a file system, of any other service.
_FAILURES = (ValueError, OSError, RuntimeError)
_POLL_S = 0.1  # between looks at whether to stop


def is_url(text: str) -> bool:
    """Whether a destination or a source is a URL, and not a path."""
    return _URL.match(text) is not None


class ObjectStore:
    """Objects below a URL. Thread-safe; all methods block.

    Rights and credentials are tensorstore's: the environment, and files that the
    tools of the clouds have. For an S3-compatible server ``AWS_ENDPOINT_URL`` is its
    URL, and ``AWS_REGION`` its region.

    Args:
      url: ``file:///directory``, ``gs://bucket/path`` or ``s3://bucket/path``.
      stop: Once it is set, methods raise ExchangeError.

    Attributes:
      where: The URL as it may be shown.
      directory: The directory of a ``file://`` URL.

    Raises:
      ExchangeError: The URL is of another kind, or the place refuses an action.
    """

    def __init__(self, url: str, stop: threading.Event | None = None) -> None:
        self._stop = stop or threading.Event()
        self.where, spec = _parse_url(url)
        self.directory = Path(spec["path"]) if spec["driver"] == "file" else None
        self._store: Any = self._await("open", lambda: tensorstore.KvStore.open(spec))

    def names(self) -> set[str]:
        """Lists the names of all objects."""
        keys = self._await("list its objects", self._store.list)
        return {key.decode() for key in keys}

    def read(self, name: str) -> bytes | None:
        """Returns an object; None if there is none."""
        result = self._await(f"read {name}", lambda: self._store.read(name))
        return result.value if result.state == "value" else None

    def put(self, name: str, value: bytes) -> None:
        """Writes an object, and reads it back."""
        self._await(f"write {name}", lambda: self._store.write(name, value))
        if (found := self.read(name)) != value:
            raise ExchangeError(
                f"{self.where}: {name}: expected the {_format_object(value)} that were "
                f"written, found {_format_object(found)}; this place does not keep "
                "what it is given, or not at once: try again"
            )

    def _await(self, action: str, begin: Callable[[], Any]) -> Any:
        """Waits for tensorstore, which retries at a busy server for minutes."""
        try:
            future = begin()
            while not self._stop.is_set():
                try:
                    return future.result(timeout=_POLL_S)
                except TimeoutError:
                    if future.done():  # by now, or the error is the service's
                        return future.result()
            future.cancel()
        except _FAILURES as error:
            # What follows " [" are details of the request, which may name a key's id.
            why = str(error).split(" [", 1)[0]
            raise ExchangeError(
                f"{self.where}: cannot {action}: {why}; check the URL, and the rights "
                "and the room that this user has there"
            ) from None
        raise ExchangeError(f"{self.where}: it was given up")


def _parse_url(url: str) -> tuple[str, dict[str, Any]]:
    """Returns a URL as it may be shown, and tensorstore's spec."""
    match = _URL.match(url)
    scheme, rest = match.groups() if match else ("", url)
    if scheme not in _SCHEMES:
        raise ExchangeError(
            f"expected a URL of {', '.join(f'{s}://' for s in _SCHEMES)}, found "
            f"{scheme + '://…' if scheme else 'none'}; give a directory without a "
            "scheme for the other formats"
        )
    plain = re.split(r"[?#]", rest, maxsplit=1)[0]
    if scheme != "file" and (plain != rest or "@" in plain.split("/", 1)[0]):
        raise ExchangeError(
            f"{scheme}://…: expected {scheme}://BUCKET/PATH alone, found more; "
            "credentials and an endpoint are taken from the environment"
        )
    shown = f"{scheme}://{plain.rstrip('/')}"
    try:
        spec = tensorstore.KvStore.Spec(f"{shown}/").to_json()
    except _FAILURES as error:
        why = str(error).rsplit(": ", 1)[-1]
        raise ExchangeError(f"{shown}: not a URL to export to: {why}") from None
    env = os.environ.get
    endpoint = env("AWS_ENDPOINT_URL_S3") or env("AWS_ENDPOINT_URL")
    if scheme == "s3" and endpoint:
        region = env("AWS_REGION") or env("AWS_DEFAULT_REGION")
        spec |= {"endpoint": endpoint, "aws_region": region or "us-east-1"}
    if scheme == "s3" and "AWS_ACCESS_KEY_ID" in os.environ:
        # Otherwise AWS prints that there are no files with credentials.
        spec["aws_credentials"] = {"type": "environment"}
    if scheme == "file" and spec["path"] == "/":
        raise ExchangeError(f"{shown}: expected a directory, found the root")
    return shown, spec


def checksum_of(value: bytes) -> tuple[int, str]:
    """Returns the length of an object in bytes, and its CRC-32C as 8 digits."""
    return len(value), f"{crc32c(value):08x}"


def _format_object(value: bytes | None) -> str:
    if value is None:
        return "none"
    num_bytes, checksum = checksum_of(value)
    return f"{num_bytes} bytes ({format_bytes(num_bytes)}) of CRC-32C {checksum}"


MANIFEST = "export.json"
"""The last object; slots and checkpoints of a store have none, and are refused."""

_BEGUN = "export-begun.json"  # the first one: the record of the step

_COPIES = 5  # of an object: in the reader, as read, as bytes, in tensorstore, sent
_MAX_THREADS = 8
_EXPORT_AGAIN = "export to this URL again, which writes what is missing or differs"

_Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**62)]


class ExportManifest(Document, frozen=True):
    """The content of an export.

    Attributes:
      commit: CRC-32C of the step's ``commit.json``.
      objects: Bytes and CRC-32C of each object by name, but for this one.
    """

    format: Literal["jaxinf export"]
    format_version: Literal[1]
    store_id: Id
    step: _Count
    commit: Checksum
    objects: dict[Annotated[str, Meta(max_length=4096)], tuple[_Count, Checksum]]

    @classmethod
    def read(cls, place: ObjectStore) -> "ExportManifest | None":
        """Reads `MANIFEST`; None if it is not there."""
        if (raw := place.read(MANIFEST)) is None:
            return None
        return read_document(
            f"{place.where}: {MANIFEST}",
            cls,
            "the manifest of an export",
            "export to this URL again, use a newer jaxinf, or remove what is there",
            raw=raw,
        )


def export_url_at(place: str) -> str | None:
    """Returns the URL of an export, given as such or as its directory, else None."""
    if is_url(place):
        return place
    directory = Path(os.path.abspath(os.path.expanduser(place)))
    return f"file://{directory}" if (directory / MANIFEST).is_file() else None


class UrlReport(NamedTuple):
    """The size of an export; `num_kept` chunks were there, by an earlier call."""

    num_objects: int
    num_bytes: int
    num_kept: int


def export_url(
    step: CommittedStep,
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
      step: The step to export, with all chunks.
      url: A place with nothing else; see `ObjectStore`.
      beside: Further files by name, which a copy from there puts into the store.
      options: Memory and progress; by default 256 MiB.

    Raises:
      ExchangeError: The place cannot be used, or has another export or other objects.
      ValueError: Too little memory; says how much is needed.
      StoreError: There is no room, a chunk is damaged, or the step cannot be read.
    """
    manifest, options = step.manifest, options or ExportOptions()
    place, chunks = ObjectStore(url, options.stop), list(manifest.held_chunks())
    num_threads = _num_threads(manifest, options.memory_bytes)
    record, carry = seal(step.commit.to_json()), step.commit.carry
    contents = without_csds(manifest)
    documents = dict(step_documents(contents, carry))
    documents |= {"jaxinf.json": seal(contents.to_json()), "commit.json": record}
    carried = zip((leaf.chunk for leaf in carry), step.read_carry(), strict=True)
    documents |= {**(beside or {}), **dict(carried)}
    names = place.names()
    _check_vacant(place, names, step, record)
    if place.directory is not None:
        needed = sum(chunk.file_bytes for chunk in chunks if chunk.name not in names)
        remedy = "free some, or export to another place"
        check_free_space({place.directory: needed}, "the export takes", remedy)
    place.put(_BEGUN, record)
    objects = {n: checksum_of(v) for n, v in ((_BEGUN, record), *documents.items())}
    total_bytes, done_bytes, num_kept = sum(c.file_bytes for c in chunks), 0, 0
    with StepReader(step, memory_bytes=options.memory_bytes // _COPIES) as reader:

        def put_chunk(chunk: ChunkFile) -> tuple[tuple[int, str], bool]:
            """Writes a chunk with zeros after it, unless the object has these bytes."""
            pieces = reader.stored_pieces(chunk)
            content = b"".join(piece.values.tobytes() for piece in pieces)
            content = content.ljust(chunk.file_bytes, b"\0")
            is_kept = chunk.name in names and place.read(chunk.name) == content
            if not is_kept:
                place.put(chunk.name, content)
            return checksum_of(content), is_kept

        results = map_in_threads(chunks, put_chunk, num_threads)
        for chunk, (checksum, is_kept) in results:
            objects[chunk.name] = checksum
            num_kept += is_kept
            done_bytes += chunk.file_bytes
            options.progress(done_bytes, total_bytes)
    for name, value in documents.items():
        place.put(name, value)
    identity = manifest.store_id, step.commit.step, objects[_BEGUN][1]
    place.put(MANIFEST, seal(ExportManifest("jaxinf export", 1, *identity, objects)))
    return UrlReport(len(objects) + 1, sum(n for n, _ in objects.values()), num_kept)


def least_memory(manifest: Manifest) -> int:
    """Returns the memory that an export takes at least: copies of the largest chunk.

    An object is written whole.
    """
    sizes = (
        math.prod(leaf.chunk_shape) * state.itemsize
        for leaf in manifest.leaves
        for state in leaf.states
        if leaf.csds  # it has chunks
    )
    return max(1, _COPIES * max(sizes, default=0))


def _num_threads(manifest: Manifest, memory_bytes: int) -> int:
    """Returns the number of threads that may have an object each, at least one."""
    least = least_memory(manifest)
    if memory_bytes < least:
        raise ValueError(
            f"memory of {memory_bytes} bytes: expected at least {least}, {_COPIES} "
            f"copies of the largest chunk; give --memory {-(-least >> 20)}MiB"
        )
    return min(_MAX_THREADS, memory_bytes // least)


def _check_vacant(
    place: ObjectStore, names: set[str], step: CommittedStep, record: bytes
) -> None:
    """Refuses a place with another export, or with other objects."""
    export, store_id = ExportManifest.read(place), step.manifest.store_id
    if export is not None:
        found = f"step {export.step} of store {export.store_id}"
        is_same = (export.store_id, export.commit) == (store_id, checksum_of(record)[1])
    else:  # the first object may be torn
        found = f"other objects, such as {min(names, default='')}"
        begun = place.read(_BEGUN) if names else b""
        is_same = begun is not None and record.startswith(begun)
    if not is_same:
        raise ExchangeError(
            f"{place.where}: expected nothing, or the same export, interrupted, found "
            f"{found}, exporting step {step.commit.step} of store {store_id}; give "
            "another URL, or go on with that step (--checkpoint)"
        )


def url_of_step(url: str, step: int) -> str:
    """Returns the place of one of a run's exports, which have a URL together."""
    return f"{url.rstrip('/')}/{step}"


def check_exports(url: str, step: int) -> None:
    """Refuses a place to which a run's steps cannot be exported; blocks.

    It is written to: ``exports.json`` says what the place is. Of `step`, the next one
    to be exported, there must be no export.
    """
    place = ObjectStore(url_of_step(url, step))
    if any(place.read(name) is not None for name in (MANIFEST, _BEGUN)):
        raise ExchangeError(
            f"{place.where}: expected nothing, as step {step} of this run is to be "
            "exported there, found an export; give another URL, or remove it"
        )
    document = {"format": "jaxinf exports", "format_version": 1}
    ObjectStore(url).put("exports.json", seal(document))


def export_source(url: str, memory_bytes: int = TRANSIT_BYTES) -> CopySource:
    """Returns the step of an `export_url`, whose objects are all there; blocks.

    Raises:
      ExchangeError: There is no whole export; names objects that are gone or torn.
      StoreFormatError: Its manifest or record is of another format.
      ValueError: Too little memory; says how much is needed.
    """
    place = ObjectStore(url)
    export = _read_complete_manifest(place)
    listed = export.objects

    def read(name: str) -> bytes:
        return _read_listed(place, listed, name)

    where = f"{place.where}: commit.json"
    manifest = Manifest.read(f"{place.where}: jaxinf.json", read("jaxinf.json"))
    commit = CommitRecord.read(where, read("commit.json"))
    commit.check_fits(where, manifest)
    step = CommittedStep(Path(place.where), manifest, commit, (), fetch=read)
    chunks = {chunk.name for chunk in manifest.held_chunks()}
    carried = {leaf.chunk for leaf in commit.carry}
    for name in sorted((chunks | carried) - listed.keys()):
        read(name)  # raises
    names = sorted(listed.keys() - chunks)
    others = map_in_threads(names, read, _MAX_THREADS)  # all are checked
    beside = {name: content for name, content in others if FILES_BESIDE.fullmatch(name)}
    return CopySource(
        place.where,
        [manifest],
        {"a": step},
        beside,
        has_links=False,
        num_threads=_num_threads(manifest, memory_bytes),
    )


def _read_complete_manifest(place: ObjectStore) -> ExportManifest:
    export = ExportManifest.read(place)
    if export is None:
        raise ExchangeError(
            f"{place.where}: expected {MANIFEST}, which completes an export, found "
            f"none; check the URL, or, if an export was interrupted, {_EXPORT_AGAIN}"
        )
    if missing := sorted(export.objects.keys() - place.names()):
        raise ExchangeError(
            f"{place.where}: expected all objects of an export, found none of "
            f"{first_few(missing)}; they were removed: {_EXPORT_AGAIN}"
        )
    return export


def _read_listed(
    place: ObjectStore, listed: Mapping[str, tuple[int, str]], name: str
) -> bytes:
    if name not in listed:
        raise ExchangeError(
            f"{place.where}: expected {name} in {MANIFEST}, found it not; "
            f"{_EXPORT_AGAIN}"
        )
    value, (num_bytes, checksum) = place.read(name), listed[name]
    if value is None or checksum_of(value) != (num_bytes, checksum):
        raise ExchangeError(
            f"{place.where}: {name}: expected {num_bytes} bytes of CRC-32C "
            f"{checksum}, found {_format_object(value)}; the export is torn: "
            f"{_EXPORT_AGAIN}"
        )
    return value
