"""What jaxinf exported, back into a store of its own, bit for bit.

Invariant: the new store has the exported manifest's leaves, states and kernels, and its
commit record; only its id and its CSDs are new.
"""

import contextlib
import dataclasses
import uuid
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxinf.errors import ExchangeError, StoreError
from jaxinf.exchange.chunk_writer import ChunkWriter, slot_checksums
from jaxinf.exchange.sources import SourceArray
from jaxinf.exchange.step_files import DEFAULT_MEMORY_BYTES
from jaxinf.exchange.store_import import ImportReport, read_source
from jaxinf.layout import assign_csds
from jaxinf.store import (
    CommitRecord,
    Manifest,
    StoreDirectory,
    StoreLock,
    dtype_of,
    stored_bytes,
)
from jaxinf.typing import ProgressCallback

__all__ = ["import_export", "is_own_export"]

_COPIES = 4
_HARMLESS = {"lock", "publish.lock"}


def is_own_export(path: Path) -> bool:
    """Whether a directory is an export that can become a store again."""
    return (path / "jaxinf.json").is_file() and (path / "commit.json").is_file()


def import_export(
    source: Path,
    store: Path,
    *,
    csds: Sequence[Path] = (),
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    progress: ProgressCallback | None = None,
) -> ImportReport:
    """Makes a new store of what `export_orbax` or `export_safetensors` wrote; blocks.

    Args:
      source: the export.
      store: where the store will be; missing or empty.
      csds: CSD roots to spread it over, absolute; by default the store itself.
      memory_bytes: for the data on its way.
      progress: called with the bytes of elements done and those in all.

    Returns:
      What was done.

    Raises:
      ExchangeError: the export is damaged, or something is in the store's place.
      StoreFormatError: its manifest or its commit record is damaged.
      StoreSpaceError: there is no room; nothing was written.
      StoreError: a drive failed.
    """
    exported = Manifest.read(source / "jaxinf.json")
    commit = CommitRecord.read(source / "commit.json")
    found = read_source(source)
    wanted = _wanted(exported, found, source)
    _check_free(store)
    directory = StoreDirectory(store, _with_csds(exported, csds))
    directory.check_space()
    store.mkdir(parents=True, exist_ok=True)
    lock = StoreLock(store)
    try:
        _check_free(store)
        directory.create()
        try:
            _fill(directory, wanted, memory_bytes, progress)
            _check_sums(directory, commit, source)
            directory.publish("a", commit)
        except BaseException:
            with contextlib.suppress(StoreError):
                directory.discard()
            raise
    finally:
        lock.release()
    return ImportReport(commit.step, len(wanted), (), ())


def _wanted(
    manifest: Manifest, found: dict[str, SourceArray], source: Path
) -> dict[tuple[int, str], SourceArray]:
    wanted, problems = {}, []
    for number, leaf in enumerate(manifest.leaves):
        for state in leaf.states:
            name = leaf.array_name(state.name)
            array = found.get(name)
            if array is None:
                problems.append(f"{name}: missing")
            elif array.shape != leaf.shape or array.dtype != dtype_of(state.dtype):
                problems.append(
                    f"{name}: {array.dtype}{list(array.shape)} in the export, its "
                    f"manifest says {state.dtype}{list(leaf.shape)}"
                )
            else:
                wanted[number, state.name] = array
    if problems:
        raise ExchangeError(
            f"{source}: expected the arrays of its jaxinf.json, found "
            f"{'; '.join(problems[:8])}; copy the export anew"
        )
    return wanted


def _check_free(store: Path) -> None:
    if not store.exists():
        return
    found = (
        [entry.name for entry in store.iterdir() if entry.name not in _HARMLESS]
        if store.is_dir()
        else ["a file"]
    )
    if found:
        raise ExchangeError(
            f"{store}: expected nothing there, or an empty directory, for a new store, "
            f"found {', '.join(sorted(found)[:3])}; give another path"
        )


def _with_csds(manifest: Manifest, csds: Sequence[Path]) -> Manifest:
    """The same leaves, under another id and on other CSDs."""
    leaves = []
    for leaf in manifest.leaves:
        sizes = [
            sum(stored_bytes(chunk, state) for state in leaf.states)
            for chunk in leaf.grid.chunks()
        ]
        leaves.append((leaf, sizes))
    dealt = iter(
        assign_csds([n for _, sizes in leaves for n in sizes], max(1, len(csds)))
    )
    return dataclasses.replace(
        manifest,
        store_id=uuid.uuid4().hex,
        csds=tuple(map(str, csds)),
        leaves=tuple(
            dataclasses.replace(leaf, csds=tuple(next(dealt) for _ in sizes))
            for leaf, sizes in leaves
        ),
    )


def _fill(
    directory: StoreDirectory,
    wanted: dict[tuple[int, str], SourceArray],
    memory_bytes: int,
    progress: ProgressCallback | None,
) -> None:
    """Writes slot a; durable on return."""
    writer = ChunkWriter(directory, "a")
    total_bytes = sum(array.num_bytes for array in wanted.values())
    done_bytes = 0
    for (number, state), array in wanted.items():
        for start, values in array.blocks(memory_bytes // _COPIES):
            writer.write(number, state, start, values)
            done_bytes += values.nbytes
            if progress is not None:
                progress(done_bytes, total_bytes)
    directory.sync()


def _check_sums(directory: StoreDirectory, commit: CommitRecord, source: Path) -> None:
    """Holds what was written against what was exported, chunk by chunk."""
    for name, found in slot_checksums(directory, "a").items():
        expected = commit.checksums.get(name, np.zeros(0, np.uint32))
        if not np.array_equal(expected, found):
            differing = (
                np.flatnonzero(expected != found).tolist()
                if len(expected) == len(found)
                else f"{len(expected)} checksums for {len(found)}"
            )
            raise ExchangeError(
                f"{source}: {name} is not what was exported: its chunks {differing} "
                "have other checksums than its commit.json; copy the export anew"
            )
