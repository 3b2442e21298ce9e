"""Makes a new store from an old one, with its state in another format.

Invariant: the old store is only read, and the new one appears under its name with its
first commit or not at all; memory is a few pieces of 1 Mi elements.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from jaxinf.engine.description import Codecs, coded_leaf, store_codecs
from jaxinf.engine.options import AverageChoice, MasterFormat, StateFormat
from jaxinf.engine.subgroup_arrays import rounding_of_chunk
from jaxinf.io import crc32c, crc32c_combine, opened_to_write
from jaxinf.io.failures import translated
from jaxinf.layout import CodedSlot
from jaxinf.program import AVERAGE_SCALARS
from jaxinf.store import (
    ERROR_FEEDBACK,
    MASTER_PARAMS,
    CommitRecord,
    LeafRecord,
    Manifest,
    ScalarState,
    StateRecord,
    StepReader,
    StoreDirectory,
    dtype_of,
    encode_path,
    lay_out,
    look_at_store,
    making_store,
    pinned_step,
    stock_documents,
)
from jaxinf.typing import AVERAGE, Array, ProgressCallback


def convert_store(
    source: Path,
    target: Path,
    state: StateFormat | None = None,
    *,
    master: MasterFormat | None = None,
    average: AverageChoice | None = None,
    csds: Sequence[Path] = (),
    progress: ProgressCallback | None = None,
) -> int:
    """Makes a store from a committed step, with its state in another format; blocks.

    A conversion to fp32 changes no number; one to fewer bits rounds as a step would.
    The source may be in use, and keeps its checkpoints, which are not converted.

    Args:
      source: the old store.
      target: the directory of the new store; missing or empty.
      state: ``"fp32"``, ``"bf16"`` or ``"int8"``; None for no change.
      master: format of the master of params that are bfloat16 on the JAX device:
        ``"fp32"``; ``"split"``, the same bits in two halves; ``"none"``, the params
        alone, rounded stochastically; None for no change.
      average: form of the params' average: ``"fp32"`` or ``"bf16"``, which begins as
        the master params if the store has none; ``"none"`` drops it; None for no
        change.
      csds: CSD roots of the new store; by default its own directory.
      progress: called with the bytes of float32 state done and in all.

    Returns:
      The step.

    Raises:
      ValueError: a CSD root does not exist, no leaf is bfloat16, or there is no
        average to drop.
      StoreFormatError: there is no store, or the target is something else.
      StoreSpaceError: there is no room; nothing was written.
      StoreCorruptError: a chunk is damaged; there is no new store.
      StoreError: a drive failed.
    """
    for root in csds:
        if not root.is_dir():
            raise ValueError(
                f"CSD root {root}: expected a directory on a mounted drive, found "
                "nothing; create or mount it"
            )
    with pinned_step(look_at_store(source)) as step:
        held = step.directory
        codecs = _codecs(held, state, master, average)
        manifest = _laid_out(held, codecs, csds, has_average=_keeps(held, average))
        record = CommitRecord.read(step.path / "commit.json")
        record.check_fits(step.path / "commit.json", held.manifest)
        with making_store(target, manifest) as directory:
            with StepReader(step.path, record, directory=held) as reader:
                sums = _fill(directory, held.manifest, reader, record.step, progress)
            directory.sync()
            documents = stock_documents(directory.step_path("a"), manifest)
            complete = replace(
                record,
                scalar_state=_scalars(record, held.manifest, manifest),
                checksums=sums,
                documents=documents,
            )
            directory.publish("a", complete)
    return record.step


def _laid_out(
    held: StoreDirectory, codecs: Codecs, csds: Sequence[Path], *, has_average: bool
) -> Manifest:
    states = _with_average if has_average else _without_average
    leaves = [
        coded_leaf(replace(leaf, states=states(leaf.slots)), codecs)
        for leaf in held.manifest.leaves
    ]
    shapes = [leaf.chunk_shape for leaf in leaves]
    converted = replace(held.manifest, leaves=tuple(leaves))
    return lay_out(converted, shapes, [str(root) for root in csds])


def _codecs(
    held: StoreDirectory,
    state: StateFormat | None,
    master: MasterFormat | None,
    average: AverageChoice | None,
) -> Codecs:
    codecs = store_codecs(held.manifest)
    if state is not None:
        codecs = replace(codecs, state="" if state == "fp32" else state)
    if average is not None:
        codecs = replace(codecs, average="bf16" if average == "bf16" else "")
    if master is not None:
        if all(leaf.dtype != "bfloat16" for leaf in held.manifest.leaves):
            raise ValueError(
                f"{held.path}: master={master!r}: expected params that are bfloat16 on "
                "the JAX device, found none; their master has one form: leave it out"
            )
        master_codec = {"fp32": "", "split": "split", "none": "bf16"}[master]
        codecs = replace(codecs, master=master_codec)
    return codecs


def _keeps(held: StoreDirectory, average: AverageChoice | None) -> bool:
    has_one = AVERAGE in held.manifest.state_names
    if average == "none" and not has_one:
        raise ValueError(
            f"{held.path}: average='none': expected a store with an average of the "
            "params, found none; leave it out"
        )
    return has_one if average is None else average != "none"


def _without_average(states: Sequence[StateRecord]) -> tuple[StateRecord, ...]:
    return tuple(state for state in states if state.name != AVERAGE)


def _with_average(states: Sequence[StateRecord]) -> tuple[StateRecord, ...]:
    """Returns states with an average behind those of the optimizer."""
    others = _without_average(states)
    place = sum(state.name != ERROR_FEEDBACK for state in others)
    average = StateRecord(AVERAGE, "float32")
    return (*others[:place], average, *others[place:])


def _scalars(
    record: CommitRecord, held: Manifest, manifest: Manifest
) -> Sequence[ScalarState]:
    """Returns the scalar state of the new store: an average's comes last."""
    if (AVERAGE in held.state_names) == (AVERAGE in manifest.state_names):
        return record.scalar_state
    own = {encode_path((("field", name),)): kind(0) for name, kind in AVERAGE_SCALARS}
    kept = [scalar for scalar in record.scalar_state if scalar.path not in own]
    if AVERAGE not in manifest.state_names:
        return kept
    return [*kept, *(ScalarState(path, np.array(zero)) for path, zero in own.items())]


def _fill(
    directory: StoreDirectory,
    held: Manifest,
    reader: StepReader,
    step: int,
    progress: ProgressCallback | None,
) -> dict[str, Array]:
    """Writes slot a; returns the checksums of its chunks by array name."""
    total = 4 * held.num_params * len(directory.manifest.decoded.state_names)
    done = 0
    sums: dict[str, Array] = {}
    leaves = zip(held.leaves, directory.manifest.leaves, strict=True)
    for number, (old, new) in enumerate(leaves):
        stored = {state.slot: state for state in old.states if not state.is_beside}
        for position, slot in enumerate(new.slots):
            # An average begins as the master params.
            state = stored.get(slot.name, stored[MASTER_PARAMS])
            writer = _SlotWriter(directory, number, position, step)
            for piece in reader.pieces(old, state):
                writer.write(piece.number, piece.start, piece.values)
                done += piece.values.nbytes
                if progress is not None:
                    progress(min(done, total), total)
            sums |= writer.checksums(new)
    return sums


class _SlotWriter:
    """Writes one state of a leaf in the codec of the new store."""

    def __init__(
        self, directory: StoreDirectory, leaf: int, position: int, step: int
    ) -> None:
        self._directory, self._leaf, self._step = directory, leaf, step
        record = directory.manifest.leaves[leaf]
        slot = record.slots[position]
        self._states = [s for s in record.states if s.slot == slot.name]
        self._position = position
        self._parts: dict[tuple[str, int], list[tuple[int, int]]] = {}

    def write(self, chunk: int, start: int, values: Array) -> None:
        """Writes a piece of a chunk; pieces must come in order, in whole blocks."""
        for state, stored, offset in self._stored(chunk, start, values):
            file = self._directory.chunk_file("a", self._leaf, chunk, state.name)
            data = np.ascontiguousarray(stored)
            with translated("write", file), opened_to_write(file) as fd:
                _write_all(fd, data, offset * state.itemsize)
            part = (crc32c(data), data.nbytes)
            self._parts.setdefault((state.name, chunk), []).append(part)

    def _stored(
        self, chunk: int, start: int, values: Array
    ) -> Iterator[tuple[StateRecord, Array, int]]:
        first, *others = self._states
        if not first.codec:
            yield first, values, start
            return
        beside = None
        if others:
            size = others[0].num_elements(values.size)
            beside = np.empty(size, dtype_of(others[0].dtype))
        rounding = rounding_of_chunk(self._leaf, chunk, self._step)
        key = rounding + self._position & 0xFFFFFFFF
        codes = np.empty(values.size, dtype_of(first.dtype))
        CodedSlot.of(codes, beside, key, start).encode(values)
        yield first, codes, start
        if beside is not None:
            yield others[0], beside, others[0].num_elements(start)

    def checksums(self, record: LeafRecord) -> dict[str, Array]:
        return {
            record.array_name(state.name): np.array(
                [
                    crc32c_combine(self._parts[state.name, chunk])
                    for chunk in range(len(record.csds))
                ],
                np.uint32,
            )
            for state in self._states
        }


def _write_all(fd: int, data: Array, offset_bytes: int) -> None:
    memory = data.reshape(-1).view(np.uint8).data
    done = 0
    while done < len(memory):
        done += os.pwrite(fd, memory[done:], offset_bytes + done)
