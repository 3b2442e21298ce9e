"""Ties a run's params and state to the store's last step.

      at it? ─ no ─► begin(step) ──► compare(leaf) … ──► finish ──► step ──► expect
         └──── yes ───────────────────────────────────────────────┘

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

RESTART = (
    'or begin anew with smart_update(…, on_existing="restart"), which keeps the old '
    "run as a checkpoint"
)
"""A remedy in several messages."""

COMPARING_BYTES = 32 << 20
"""Memory in which chunks are read to compare them with given params."""


class ResumeCheck:
    """Ties a run to the last step of an open store.

    Attributes:
      at: the step of the state that the next update is given; None until a run's params
        were compared.
    """

    def __init__(self, files: StoreFiles) -> None:
        self.at: int | None = None
        self._files = files
        self._reading = threading.Lock()  # so that one comparison has memory
        self._differing = ""  # a leaf whose params differ from the run's

    def expect(self, step: int | None) -> None:
        """Binds the run to a step; to none, so that its params are compared first."""
        self.at = step

    def begin(self, step: int) -> None:
        """Begins a comparison with a run's state; no step may be under way."""
        self._differing = ""
        if step != self._files.commit.step:
            raise stale_state(self._files, step)

    def compare(self, leaf: int, params: Array, origin: Sequence[int]) -> None:
        """Compares a leaf, or a shard of it, with the step; blocks. Thread-safe.

        A leaf that the record calls inexact may differ by as much as it says.

        Args:
          params: params on the JAX device, in their own dtype; only read.
          origin: index in the leaf of the array's first element.
        """
        if self._differing:
            return
        files = self._files
        commit, record = files.commit, files.leaves[leaf]
        numbers = files.subgroups.chunks_of(leaf, origin, params.shape)
        if dtype_of(record.states[0].dtype) == params.dtype:
            sums = commit.checksums[record.array_name(record.states[0].name)]

            def checksum(number: int) -> int:  # of a chunk's params: most need no read
                chunk = record.grid.chunks()[number]
                run = gather(params, chunk, tuple(origin), 0, chunk.num_elements)
                return crc32c(np.ascontiguousarray(run))

            numbers = [n for n in numbers if checksum(n) != sums[record.places[n]]]
        bound = commit.inexact.get(record.name, 0.0)
        with self._reading:
            differs = difference_of(files, leaf, params, origin, numbers, bound)
        if differs:
            self._differing = record.name

    def finish(self) -> None:
        """Binds the run, whose leaves were all compared, or refuses their params."""
        files, leaf = self._files, self._differing
        path, step = files.options.path, files.commit.step
        if leaf and not step:
            raise diverged_error(f"{path}: leaf {leaf}")
        if leaf:
            raise StoreMismatchError(
                f"{path}: the state given to update is of step {step}, the params are "
                f"not those that the store holds of that step (leaf {leaf}). A store "
                "has one model (one store per init). Take the store's own, params = "
                "store.params(like=params), or restore params and state from one "
                f"checkpoint, {RESTART}"
            )
        self.at = step


def difference_of(
    files: StoreFiles,
    leaf: int,
    params: Array,
    origin: Sequence[int],
    chunks: Sequence[int],
    bound: float | np.floating = 0.0,
) -> str:
    """Compares a leaf's params, or a shard's, with chunks; as `difference`; blocks."""
    found = [""]

    def visit(piece: ChunkRun) -> None:
        own = piece.chunk, tuple(origin), piece.start, piece.values.size
        found.append(difference(piece.values, gather(params, *own), bound))

    if chunks:
        with StateReader(files, COMPARING_BYTES) as reader:
            reader.visit_pieces(leaf, 0, chunks, params.dtype, visit)
    return max(found)


def difference(stored: Array, given: Array, bound: float | np.floating = 0.0) -> str:
    """Says where params differ from stored ones, for `diverged_error`, or nothing.

    NaNs are equal, and so are zeros and denormals. Differences up to `bound` do not
    count.
    """
    stored = stored.astype(given.dtype, copy=False)
    bits = np.dtype(f"u{given.itemsize}")  # twice as fast as numbers
    places = np.flatnonzero(stored.view(bits) != given.view(bits))
    if not places.size:
        return ""
    stored, given = stored[places], given[places]
    a, b = stored.astype(np.float32), given.astype(np.float32)
    tiny = np.finfo(np.float32).tiny
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    same |= (np.abs(a) < tiny) & (np.abs(b) < tiny)
    if bound:
        same |= np.abs(a - b) <= bound
    if same.all():
        return ""
    return f" (at one place they are {given[:3]}, the store's {stored[:3]})"


def diverged_error(leaf: str, difference: str = "") -> DivergedParamsError:
    """Makes the error for params that differ from the store's master."""
    return DivergedParamsError(
        f"{leaf}: the params given to update are not those that the store's master is "
        f"of{difference}; apply the returned updates unchanged (smart_update last in "
        "the chain, then optax.apply_updates), or take store.params(like=params). In "
        "the first update, call tx.init with the params that you train, after other "
        "weights have been put in their place: on a new store, or on this one with "
        'smart_update(…, on_existing="restart")'
    )


def stale_state(files: StoreFiles, step: int) -> StaleStateError:
    """Makes the error for a state that is not of the store's last step."""
    names = [x.name for x in list_checkpoints(files.directory) if x.step == step]
    at = files.finished.step
    if names:
        remedy = (
            f"That step is kept: open the store with open_store(…, restore={names[0]!r}"
            "), which gives up the steps after it."
        )
    elif step > at:
        remedy = "It has not come so far: restore your checkpoint of an earlier step."
    else:
        remedy = (
            "Each call of update is a step of the store, also one whose result is "
            "discarded (jitted.lower(…).compile() compiles without one). Give each "
            "call the state that the last one returned, and each model a store of its "
            "own (one store per init). To come back to a step, call store.checkpoint("
            "state=state) before your program's own save, and open the store with "
            f"restore=; {RESTART}."
        )
    return StaleStateError(
        f"{files.options.path}: the optimizer state given to update is of step {step}"
        f", the store is at step {at}. {remedy} To go on from the store, open it "
        "again: params = store.params(like=params), state = tx.init(params)"
    )
