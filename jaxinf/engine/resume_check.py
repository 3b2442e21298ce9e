"""Ties a run's params and state to the store's last step.

      is it expected? ─ no ─► begin(step) ──► compare(leaf) … ──► finish ──► update
         └─────────── yes ───────────────────────────────────────────────────┘

Invariant: a step begins from the state of the step before it; the first one of a run,
after every leaf was compared with the store's last step. Zeros and denormals count as
equal, since JAX on a CPU flushes denormals, and NumPy does not.
"""

import threading
from collections.abc import Sequence

import numpy as np

from jaxinf.engine.reading import StateReader
from jaxinf.engine.store_files import StoreFiles
from jaxinf.errors import DivergedParamsError, StaleStateError, StoreMismatchError
from jaxinf.layout import gather
from jaxinf.store import ChunkRun, dtype_of, list_checkpoints
from jaxinf.transfer import crc32c
from jaxinf.typing import Array

RESTART_REMEDY = (
    'or begin anew with smart_update(…, on_existing="restart"), which keeps the old '
    "run as a checkpoint"
)

COMPARE_BUFFER_BYTES = 32 << 20
"""Memory in which chunks are read to compare them with a caller's params."""


class ResumeCheck:
    """Compares a run's params with the last step, before the run's first update.

    Attributes:
      expected_step: The step of the state that the next update must be given; None
        until the run's params are compared.
    """

    def __init__(self, files: StoreFiles) -> None:
        self.expected_step: int | None = None
        self._files = files
        self._reading = threading.Lock()  # so that one comparison has memory
        self._differing_leaf = ""

    def begin(self, step: int) -> None:
        """Begins a comparison for a state of this step; no step may be under way."""
        self._differing_leaf = ""
        if step != self._files.commit.step:
            raise stale_state_error(self._files, step)

    def compare(self, leaf: int, params: Array, origin: Sequence[int]) -> None:
        """Compares a leaf, or a shard at an origin, with the step; blocks. Thread-safe.

        A leaf that the record calls inexact may differ by as much as it says.
        """
        if self._differing_leaf:
            return
        files = self._files
        commit, record = files.commit, files.leaves[leaf]
        chunks = files.subgroups.chunks_of(leaf, origin, params.shape)
        if dtype_of(record.states[0].dtype) == params.dtype:
            checksums = commit.checksums[record.array_name(record.states[0].name)]

            def differs(number: int) -> bool:  # so that equal chunks need no read
                chunk = record.grid.chunks()[number]
                values = gather(params, chunk, tuple(origin), 0, chunk.num_elements)
                checksum = crc32c(np.ascontiguousarray(values))
                return checksum != checksums[record.positions[number]]

            chunks = [*filter(differs, chunks)]
        tolerance = commit.inexact.get(record.name, 0.0)
        with self._reading:
            difference = compare_chunks(
                files, leaf, params, origin=origin, chunks=chunks, tolerance=tolerance
            )
        if difference:
            self._differing_leaf = record.name

    def finish(self) -> None:
        """Accepts the run's params, or refuses them; all must have been compared."""
        files, leaf = self._files, self._differing_leaf
        path, step = files.options.path, files.commit.step
        if leaf and not step:
            raise diverged_error(f"{path}: leaf {leaf}")
        if leaf:
            raise StoreMismatchError(
                f"{path}: the state given to update is of step {step}, the params are "
                f"not those that the store holds of that step (leaf {leaf}). A store "
                "has one model (one store per init). Take the store's own, params = "
                "store.params(like=params), or restore params and state from one "
                f"checkpoint, {RESTART_REMEDY}"
            )
        self.expected_step = step


def compare_chunks(
    files: StoreFiles,
    leaf: int,
    params: Array,
    *,
    origin: Sequence[int],
    chunks: Sequence[int],
    tolerance: float | np.floating = 0.0,
) -> str:
    """Compares params of a leaf or shard with chunks; as `show_difference`; blocks."""
    differences = [""]

    def compare(run: ChunkRun) -> None:
        values = gather(params, run.chunk, tuple(origin), run.start, run.values.size)
        differences.append(show_difference(run.values, values, tolerance))

    if chunks:
        with StateReader(files, COMPARE_BUFFER_BYTES) as reader:
            reader.visit_pieces(leaf, 0, chunks, params.dtype, compare)
    return max(differences)


def show_difference(
    stored: Array, params: Array, tolerance: float | np.floating = 0.0
) -> str:
    """Returns the first differing elements as text for `diverged_error`, or "".

    NaNs are equal, and so are zeros and denormals. Differences up to `tolerance` do not
    count.
    """
    stored = stored.astype(params.dtype, copy=False)
    bits = np.dtype(f"u{params.itemsize}")  # twice as fast as numbers
    indices = np.flatnonzero(stored.view(bits) != params.view(bits))
    if not indices.size:
        return ""
    stored, params = stored[indices], params[indices]
    a, b = stored.astype(np.float32), params.astype(np.float32)
    tiny = np.finfo(np.float32).tiny
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    same |= (np.abs(a) < tiny) & (np.abs(b) < tiny)
    if tolerance:
        same |= np.abs(a - b) <= tolerance
    if same.all():
        return ""
    return f" (at one place they are {params[:3]}, the store's {stored[:3]})"


def diverged_error(leaf: str, difference: str = "") -> DivergedParamsError:
    return DivergedParamsError(
        f"{leaf}: the params given to update are not those that the store's master is "
        f"of{difference}; apply the returned updates unchanged (smart_update last in "
        "the chain, then optax.apply_updates), or take store.params(like=params). In "
        "the first update, call tx.init with the params that you train, after other "
        "weights have been put in their place: on a new store, or on this one with "
        'smart_update(…, on_existing="restart")'
    )


def stale_state_error(files: StoreFiles, step: int) -> StaleStateError:
    names = [x.name for x in list_checkpoints(files.directory) if x.step == step]
    last_step = files.finished.step
    if names:
        remedy = (
            f"That step is kept: open the store with open_store(…, restore={names[0]!r}"
            "), which gives up the steps after it."
        )
    elif step > last_step:
        remedy = "It has not come so far: restore your checkpoint of an earlier step."
    else:
        remedy = (
            "Each call of update is a step of the store, also one whose result is "
            "discarded (jitted.lower(…).compile() compiles without one). Give each "
            "call the state that the last one returned, and each model a store of its "
            "own (one store per init). To come back to a step, call store.checkpoint("
            "state=state) before your program's own save, and open the store with "
            f"restore=; {RESTART_REMEDY}."
        )
    return StaleStateError(
        f"{files.options.path}: the optimizer state given to update is of step {step}"
        f", the store is at step {last_step}. {remedy} To go on from the store, open "
        "it again: params = store.params(like=params), state = tx.init(params)"
    )
