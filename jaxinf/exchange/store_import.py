"""Imports another tool's checkpoint into a store made by `tx.init`, as one commit.

Invariant: everything is checked before the first byte is written; until the commit, the
store's own step stays the committed one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxinf.errors import ExchangeError, StoreMismatchError
from jaxinf.exchange.matching import Match, MatchOptions, match
from jaxinf.exchange.orbax_source import is_orbax, read_orbax
from jaxinf.exchange.safetensors_source import is_safetensors, read_safetensors
from jaxinf.exchange.sources import SourceArray
from jaxinf.exchange.step_files import (
    DEFAULT_MEMORY_BYTES,
    StepFiles,
    StoredArray,
)
from jaxinf.store import (
    ChunkWriter,
    CommitRecord,
    Manifest,
    Slot,
    StoreDirectory,
    dtype_of,
    finish_rebalance,
    hold_store,
    other_slot,
)
from jaxinf.typing import ProgressCallback

__all__ = ["ImportReport", "import_checkpoint", "read_source"]

# Copies of a block: as read, decoded, cast, and laid out for a chunk.
_COPIES = 4
_CHECKED_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class ImportReport:
    """The result of an import.

    Attributes:
      step: the committed step.
      num_arrays: number of imported arrays.
      fresh_states: states that the checkpoint lacks; they keep their initial values.
      unused: arrays of the checkpoint that were not used.
    """

    step: int
    num_arrays: int
    fresh_states: tuple[str, ...]
    unused: tuple[str, ...]


def read_source(path: Path) -> dict[str, SourceArray]:
    """Returns by name the arrays of an Orbax checkpoint or of safetensors files.

    Raises:
      ExchangeError: the path is neither, or damaged.
    """
    if is_safetensors(path):
        return read_safetensors(path)
    if path.is_dir() or is_orbax(path):
        return read_orbax(path)
    found = "another file" if path.exists() else "nothing"
    raise ExchangeError(
        f"{path}: expected an Orbax checkpoint or safetensors, found {found}; check "
        "the path"
    )


def import_checkpoint(
    source: Path,
    store: Path,
    *,
    names: Mapping[str, str] | None = None,
    ignored: Sequence[str] = (),
    step: int | None = None,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    progress: ProgressCallback | None = None,
) -> ImportReport:
    """Imports a checkpoint of params and optax state into a new store; blocks.

    First make the store by ``tx.init(params)`` with the optimizer and with params of
    the right shapes, and close it. Arrays are found by name. If the checkpoint has no
    optimizer state at all, the store's keeps its initial values.

    Args:
      source: an Orbax checkpoint, a safetensors file or a directory of such files.
      store: a closed store at step 0.
      names: state → place of its arrays in the checkpoint, keys joined by ``/``, if
        names are ambiguous.
      ignored: names, or beginnings of names, of arrays to ignore.
      step: the step to commit; by default the checkpoint's own step or count.
      memory_bytes: memory for data in transit. In any case one chunk of the checkpoint
        is in memory, and Orbax may have saved a leaf as a single chunk.
      progress: called with the bytes of elements done and those in all.

    Returns:
      A report of the import.

    Raises:
      ExchangeError: the checkpoint cannot be read, or does not fit; lists every doubt.
      ValueError: an option has an unknown name, or the step is negative.
      StoreMismatchError: the store has been trained already.
      StoreLockedError: a live process has the store open.
      StoreError: the store is missing or damaged, or a drive failed.
    """
    if step is not None and step < 0:
        raise ValueError(f"step={step}: expected a step of at least 0")
    with hold_store(store) as directory:
        finish_rebalance(directory)
        _check_codecs(store, directory.manifest)
        slot, commit = _untrained(directory)
        found = read_source(source)
        options = MatchOptions(names or {}, ignored, step)
        wanted = directory.manifest.decoded
        plan = match(wanted, commit, found, options, where=str(source))
        _check_fresh(directory, slot, plan)
        spare = other_slot(slot)
        writer = _write(directory, spare, plan, memory_bytes, progress)
        record = CommitRecord(
            step=plan.step,
            scalar_state=plan.scalars,
            checksums=writer.checksums(kept=commit.checksums),
            documents=commit.documents,
        )
        directory.publish(spare, record)
    return ImportReport(plan.step, len(plan.arrays), plan.fresh_states, plan.unused)


def _check_codecs(store: Path, manifest: Manifest) -> None:
    """Refuses codecs with blocks, since a box of an array may cut them."""
    codecs = {state.codec for leaf in manifest.leaves for state in leaf.states[1:]}
    if codecs - {"", "remainder"}:
        raise ExchangeError(
            f"{store}: expected a store of fp32 state to import into, found it in "
            'fewer bits; make the store with state="fp32", import, and make one of '
            'fewer bits from it ("jaxinf store convert STORE NEW --state int8")'
        )


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


def _check_fresh(directory: StoreDirectory, slot: Slot, plan: Match) -> None:
    """Refuses to keep a state that `init` computed from params now replaced."""
    files = StepFiles(directory.step_path(slot), directory.manifest)
    for array in files.arrays():
        if array.state.name not in plan.fresh_states:
            continue
        if not _is_constant(files, array):
            raise ExchangeError(
                f"{directory.path}: {array.state.name} of {array.leaf.name} begins "
                "with other values than zeros or a constant, so init computed it from "
                "the params, and the checkpoint has none; restore the params yourself "
                "and give them to tx.init on a new store"
            )


def _is_constant(files: StepFiles, array: StoredArray) -> bool:
    first: bytes | None = None
    is_same = True
    # Read to the end: a chunk is verified before its last portion.
    for _, values in files.stream(array, _CHECKED_ELEMENTS):
        first = first or values.reshape(-1)[:1].tobytes()
        raw = values.reshape(-1).view(np.uint8).reshape(values.size, -1)
        is_same &= bool((raw == np.frombuffer(first, np.uint8)).all())
    return is_same


def _write(
    directory: StoreDirectory,
    slot: Slot,
    plan: Match,
    memory_bytes: int,
    progress: ProgressCallback | None,
) -> ChunkWriter:
    """Fills a slot, durably."""
    directory.unpublish(slot)
    committed = other_slot(slot)
    writer = ChunkWriter(directory, slot)
    total_bytes = sum(array.num_bytes for array in plan.arrays.values())
    done_bytes = 0
    for (number, name), array in plan.arrays.items():
        state = directory.manifest.leaves[number].state(name)
        dtype = dtype_of(state.decoded().dtype)
        for start, values in array.blocks(memory_bytes // _COPIES):
            writer.write(number, name, start, values.astype(dtype, copy=False))
            done_bytes += values.nbytes
            if progress is not None:
                progress(done_bytes, total_bytes)
    for number, leaf in enumerate(directory.manifest.leaves):
        for state in leaf.states:
            if state.name in plan.fresh_states:
                for chunk in range(len(directory.chunks[number])):
                    directory.link_chunk(committed, slot, number, chunk, state.name)
    directory.sync()
    return writer
