"""Imports params into a store made by `tx.init`, as one commit.

Invariant: everything is checked before the first byte is written; until the commit, the
store's own step stays the committed one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxinf.errors import ExchangeError, StoreMismatchError
from jaxinf.exchange.orbax_source import is_orbax, read_orbax
from jaxinf.exchange.params import DEFAULT_MEMORY_BYTES, stream
from jaxinf.exchange.safetensors_files import is_safetensors, read_safetensors
from jaxinf.exchange.sources import SourceArray, listed
from jaxinf.store import (
    MASTER_PARAMS,
    ChunkWriter,
    CommitRecord,
    LeafRecord,
    Manifest,
    Slot,
    StateRecord,
    StoreDirectory,
    WholeStep,
    dtype_of,
    hold_store,
    make_carry,
    other_slot,
    step_of,
)
from jaxinf.store.names import encode_key
from jaxinf.typing import ProgressCallback

# Copies of a block: as read, decoded, cast, and laid out for a chunk.
_COPIES = 4
_CHECKED_ELEMENTS = 1 << 20
_MAX_LINES = 40
# Dtypes of arrays that a master params dtype represents exactly.
_EXACT = {"float32": ("float32", "bfloat16", "float16")}


@dataclass(frozen=True)
class ImportReport:
    """The result of an import.

    Attributes:
      step: the committed step.
      num_arrays: number of imported arrays.
      fresh_states: states that keep their initial values.
      unused: arrays of the source that were not used.
    """

    step: int
    num_arrays: int
    fresh_states: tuple[str, ...]
    unused: tuple[str, ...]


def read_source(path: Path) -> dict[str, SourceArray]:
    """Returns by name the arrays of an Orbax checkpoint or of safetensors files."""
    if is_safetensors(path):
        return read_safetensors(path)
    if path.is_dir() or is_orbax(path):
        return read_orbax(path)
    found = "another file" if path.exists() else "nothing"
    raise ExchangeError(
        f"{path}: expected an Orbax checkpoint or safetensors, found {found}; check "
        "the path"
    )


def import_params(
    source: Path,
    store: Path,
    *,
    place: str = "",
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    progress: ProgressCallback | None = None,
) -> ImportReport:
    """Imports params into a new store, which stays at step 0; blocks.

    First make the store by ``tx.init(params)`` with params of the right shapes, and
    close it. A leaf's array has the leaf's path as its name, keys joined by ``.`` or
    ``/``. The optimizer's state keeps its initial values.

    Args:
      source: an Orbax checkpoint, a safetensors file or a directory of such files.
      store: a closed store at step 0.
      place: name of the tree in the source that is the params, such as ``params``; by
        default all of it.
      memory_bytes: memory for data in transit. In any case one chunk of the checkpoint
        is in memory, and Orbax may have saved a leaf as a single chunk.
      progress: called with the bytes of elements done and those in all.

    Returns:
      A report of the import.

    Raises:
      ExchangeError: the source cannot be read, or lacks a leaf, or has it in another
        shape or dtype; names every leaf.
      StoreMismatchError: the store has been trained already.
      StoreLockedError: a live process has the store open.
      StoreError: the store is missing or damaged, or a drive failed.
    """
    with hold_store(store) as directory:
        slot, commit = _untrained(directory)
        found = read_source(source)
        wanted = _wanted(directory.manifest, found, place, source)
        fresh = directory.manifest.decoded.state_names[1:]
        _check_fresh(directory, slot)
        spare = other_slot(slot)
        writer = _write(directory, spare, wanted, memory_bytes, progress)
        record = CommitRecord(
            step=0,
            scalar_state=commit.scalar_state,
            checksums=writer.checksums(kept=commit.checksums),
            documents=commit.documents,
        )
        make_carry(directory.step_path(spare), directory.manifest, ())
        directory.publish(spare, record)
    used = {array.name for array in wanted}
    unused = tuple(name for name in found if name not in used)
    return ImportReport(0, len(wanted), fresh, unused)


def _wanted(
    manifest: Manifest, found: Mapping[str, SourceArray], place: str, source: Path
) -> list[SourceArray]:
    """Returns the array of each leaf, of its shape and of a dtype that it holds."""
    within = place.strip("/.").replace("/", ".")
    wanted, problems = [], []
    for leaf in manifest.leaves:
        keys = [within, *map(encode_key, leaf.path)]
        name = ".".join(key for key in keys if key)
        array, dtype = found.get(name), leaf.slots[0].dtype
        if array is None:
            problems.append(f"{name or 'the params'}: missing")
        elif array.shape != leaf.shape:
            problems.append(f"{name}: {array.shape}, in the store {leaf.shape}")
        elif array.dtype.name not in _EXACT.get(dtype, (dtype,)):
            problems.append(f"{name}: {array.dtype}, in the store {dtype}")
        else:
            wanted.append(array)
    if problems:
        raise ExchangeError(
            f"{source}: expected every leaf of the store by its name, found:"
            f"{listed(problems, _MAX_LINES)}\nIt has {', '.join(list(found)[:8])}, …. "
            "Nothing was written. Give the name of the params' tree in it (--params "
            "NAME), or make the store with params of these names and shapes"
        )
    return wanted


def _untrained(directory: StoreDirectory) -> tuple[Slot, CommitRecord]:
    slot, commit = directory.committed_slot(), directory.read_commit()
    if slot is None or commit is None:
        raise StoreMismatchError(
            f"{directory.path}: expected a store at step 0, found one whose creation "
            "was interrupted; run tx.init(params) on it first"
        )
    if commit.step:
        raise StoreMismatchError(
            f"{directory.path}: expected a store at step 0 to import into, found one "
            f"at step {commit.step}; an import would replace its state. Make a new "
            "store with tx.init(params)"
        )
    return slot, commit


def _check_fresh(directory: StoreDirectory, slot: Slot) -> None:
    """Refuses to keep a state that `init` computed from params now replaced."""
    step = step_of(directory, directory.step_path(slot))
    for leaf in directory.manifest.leaves:
        for state in leaf.states:
            is_own = state.name != MASTER_PARAMS and not state.is_beside
            if is_own and not _is_constant(step, leaf, state):
                raise ExchangeError(
                    f"{directory.path}: {state.name} of {leaf.name} begins with other "
                    "values than zeros or a constant, so init computed it from the "
                    "params; restore the params yourself and give them to tx.init on "
                    "a new store"
                )


def _is_constant(step: WholeStep, leaf: LeafRecord, state: StateRecord) -> bool:
    first: bytes | None = None
    is_same = True
    # Read to the end: a chunk is verified before its last portion.
    for _, values in stream(step, leaf, state, _CHECKED_ELEMENTS):
        first = first or values.reshape(-1)[:1].tobytes()
        raw = values.reshape(-1).view(np.uint8).reshape(values.size, -1)
        is_same &= bool((raw == np.frombuffer(first, np.uint8)).all())
    return is_same


def _write(
    directory: StoreDirectory,
    slot: Slot,
    wanted: list[SourceArray],
    memory_bytes: int,
    progress: ProgressCallback | None,
) -> ChunkWriter:
    directory.unpublish(slot)
    writer = ChunkWriter(directory, slot)
    total_bytes = sum(array.num_bytes for array in wanted)
    done_bytes = 0
    for number, array in enumerate(wanted):
        dtype = dtype_of(directory.manifest.leaves[number].slots[0].dtype)
        for start, values in array.blocks(memory_bytes // _COPIES):
            values = values.astype(dtype, copy=False)
            writer.write(number, MASTER_PARAMS, start, values)
            done_bytes += values.nbytes
            if progress is not None:
                progress(done_bytes, total_bytes)
    for number, _, state, chunk in directory.held():
        if state.slot != MASTER_PARAMS:
            directory.link_chunk(other_slot(slot), slot, number, chunk, state.name)
    directory.sync()
    return writer
