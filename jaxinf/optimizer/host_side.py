"""The host functions of `smart_update`: what runs when a callback fires.

Invariant: NumPy alone in here, no JAX computation: a callback that starts one can
deadlock. The first exception stops the store and is kept as it is.
"""

from collections.abc import Sequence
from functools import partial
from typing import Literal, NamedTuple

import numpy as np

from jaxinf.compress import SparseLeaf, TopK
from jaxinf.csd import ScalarInputs
from jaxinf.engine import (
    Store,
    StoreDescription,
    UpdateRequest,
)
from jaxinf.errors import NonFiniteGradientError, StoreMismatchError
from jaxinf.layout import LeafGrid
from jaxinf.optimizer.callback import Host
from jaxinf.optimizer.started import StartedUpdates
from jaxinf.store import ScalarState
from jaxinf.typing import Array

__all__ = [
    "COMMITTED",
    "FAILED",
    "FINITE",
    "GO",
    "HOLD",
    "HOLD_NON_FINITE",
    "NON_FINITE",
    "SKIPPED",
    "HostSide",
    "NonFinitePolicy",
    "Sent",
]

FINITE, NON_FINITE, FAILED = 0, 1, 2
"""Status of a leaf's call."""

GO, HOLD, HOLD_NON_FINITE = 0, 1, 2
"""Gate of a leaf's call: whether it may update, and whether the leaf is why not."""

COMMITTED, SKIPPED = 0, 1
"""Verdict on a step; `FAILED` is one too."""

NonFinitePolicy = Literal["error", "skip", "allow"]


class Sent(NamedTuple):
    """What a callback is told of a compressed leaf or shard.

    Attributes:
      counts: of each chunk, how many elements are sent.
      lengths: of each chunk, how many it has.
      has_feedback: whether what is left out comes too.
    """

    counts: tuple[int, ...]
    lengths: tuple[int, ...]
    has_feedback: bool

    @classmethod
    def of(cls, grid: LeafGrid, compression: TopK, dtype: np.dtype) -> "Sent":
        """What `compress_leaf` will send."""
        lengths = tuple(chunk.num_elements for chunk in grid.chunks())
        counts = tuple(compression.num_kept(length, dtype) for length in lengths)
        return cls(counts, lengths, compression.error_feedback)


class HostSide:
    """Host functions over one store."""

    def __init__(self, store: Store, nonfinite: NonFinitePolicy) -> None:
        self.store = store
        self._nonfinite = nonfinite
        self._started = StartedUpdates(store)

    @property
    def takes_params(self) -> bool:
        """Whether params on the JAX device may be taken instead of the master."""
        return self.store.training.takes_params

    @property
    def checks_finite(self) -> bool:
        """Whether a gradient that is not finite refuses or skips the step."""
        return self._nonfinite != "allow"

    @property
    def looks_ahead(self) -> bool:
        """Whether no leaf may be updated before all gradients are known to be finite.

        So it is where a step may overwrite one that is not committed: it could not be
        refused half way.
        """
        return self.store.training.rewrites_steps and self.checks_finite

    def grid(self, description: StoreDescription, number: int) -> LeafGrid:
        """A leaf's chunks: the store's, or those that it will be made with."""
        return self.store.training.grid(description, number)

    def guarded(self, host: Host, *, may_raise: bool) -> Host:
        """Wraps a host function for a callback.

        Args:
          host: fills its first argument, NumPy arrays, from the others.
          may_raise: whether an exception may go into the computation, as one JAX device
            allows; else the results say it: zeros, and `FAILED` for int32 scalars.
        """

        def call(outs: Sequence[Array], *arguments: Array) -> None:
            try:
                host(outs, *arguments)
            except BaseException as error:
                self.store.training.fail(error)
                if may_raise:
                    raise
                for out in outs:
                    is_status = out.shape == () and out.dtype == np.int32
                    out[...] = FAILED if is_status else 0

        return call

    # --- init ----------------------------------------------------------------------

    def init_leaf(
        self,
        description: StoreDescription,
        number: int,
        num_scalars: int,
        outs: Sequence[Array],
        coordinates: Array,
        *arguments: Array,
    ) -> None:
        """Callback: a leaf or shard of the params; see `place`.

        Results: the error feedback, if there is any, and a status.
        """
        scalars, (leaf, *arrays) = arguments[:num_scalars], arguments[num_scalars:]
        is_new = self.store.training.bind(description, may_create=True)
        self.store.wait()
        inputs = ScalarInputs(scalars, tuple(arrays))
        origin = _origin(coordinates, leaf)
        self.place(description, number, leaf, origin, inputs, is_new=is_new)
        *feedback, status = outs
        if feedback and is_new:
            feedback[0][...] = 0
        elif feedback:
            self.store.training.read_feedback(number, feedback[0], origin)
        status[...] = FINITE

    def place(
        self,
        description: StoreDescription,
        number: int,
        shard: Array,
        origin: Sequence[int],
        inputs: ScalarInputs,
        *,
        is_new: bool,
    ) -> None:
        """Stores a shard's initial state, or holds it against what is stored."""
        training = self.store.training
        if is_new:
            training.initialise(description, number, shard, origin, inputs)
        else:
            training.compare_params(number, shard, origin)

    def finish_init(
        self,
        description: StoreDescription,
        outs: Sequence[Array],
        statuses: Array,
        *scalars: Array,
    ) -> None:
        """Callback: every leaf is placed. Results: see `held_state`."""
        if np.any(statuses == FAILED):
            self.store.training.check()
        held = self.held_state(description, scalars)
        for out, value in zip(outs, held, strict=True):
            out[...] = value

    def held_state(
        self, description: StoreDescription, scalars: Sequence[Array]
    ) -> list[Array]:
        """Commits step 0 if the store is new; step, skipped steps, scalar state.

        Args:
          description: what the store is bound to.
          scalars: the initial scalar state.
        """
        training = self.store.training
        if training.bind(description, may_create=True):
            training.finish_initialisation(_named(description, scalars))
        commit = training.finished
        self._check_scalars(description, scalars, commit.scalar_state)
        counters = (commit.step, commit.skipped_steps)
        held = [scalar.value for scalar in commit.scalar_state]
        return [*(np.array(n, np.int32) for n in counters), *held]

    def _check_scalars(
        self,
        description: StoreDescription,
        given: Sequence[Array],
        held: Sequence[ScalarState],
    ) -> None:
        wanted = [
            (path, value.dtype.name, value.shape)
            for path, value in zip(description.scalar_paths, given, strict=True)
        ]
        stored = [(s.path, s.value.dtype.name, s.value.shape) for s in held]
        if wanted != stored:
            raise StoreMismatchError(
                f"{self.store.path}: the store's scalar state is {stored}, this "
                f"optimizer's {wanted}; open it with the optimizer it was made with"
            )

    # --- update --------------------------------------------------------------------

    def update_leaf(
        self,
        description: StoreDescription,
        number: int,
        num_scalars: int,
        has_params: bool,
        sent: Sent | None,
        outs: Sequence[Array],
        coordinates: Array,
        step: Array,
        gate: Array,
        *arguments: Array,
    ) -> None:
        """Callback: the gradient of a leaf or shard, as it becomes ready.

        Of a compressed one, as `sent` says, come indices, values and, with error
        feedback, what is left out.

        Results: the update or the new 16-bit params, and a status.
        """
        if gate != GO:
            outs[0][...] = 0
            outs[1][...] = NON_FINITE if gate == HOLD_NON_FINITE else FINITE
            return
        scalars, probe = arguments[:num_scalars], arguments[num_scalars]
        gradient, *arrays = arguments[num_scalars + 1 :]
        params = arrays.pop() if has_params else None
        feedback = None
        if sent is not None:
            values, *arrays = arrays
            feedback = arrays.pop(0) if sent.has_feedback else None
            gradient = SparseLeaf(
                outs[0].shape, gradient, values, sent.counts, sent.lengths
            )
        leaf = description.leaves[number]
        self.store.training.bind(description)
        part = UpdateRequest(
            leaf=number,
            kernel=leaf.kernel,
            origin=_origin(coordinates, outs[0]),
            gradient=gradient,
            inputs=ScalarInputs(scalars, tuple(arrays)),
            out=outs[0],
            probe=probe,
            params=params,
            feedback=feedback,
        )
        is_finite = self.store.training.update(int(step), part)
        outs[1][...] = FINITE if is_finite else NON_FINITE

    def start_leaf(
        self,
        number: int,
        shape: tuple[int, ...],
        dtype: np.dtype,
        update: Host,
        outs: Sequence[Array],
        coordinates: Array,
        *arguments: Array,
    ) -> None:
        """Callback: begins an update, and returns when its gradient is taken.

        `update` is `update_leaf` with what it needs beside the callback's arguments;
        its result will have this shape and dtype. Results: a status, always `FINITE`.
        """
        own = (np.empty(shape, dtype), np.empty((), np.int32))
        self._started.start(
            (number, *coordinates.tolist()),
            own,
            partial(update, own, coordinates, *arguments),
            sum(argument.nbytes for argument in arguments),
        )
        outs[0][...] = FINITE

    def finish_leaf(
        self, number: int, outs: Sequence[Array], coordinates: Array, tokens: Array
    ) -> None:
        """Callback: what `start_leaf` has started. Results: as of `update_leaf`."""
        del tokens  # that it comes after all of them is all they are for
        self.store.check()
        results = self._started.finish((number, *coordinates.tolist()))
        for out, found in zip(outs, results, strict=True):
            out[...] = found

    def commit(
        self,
        description: StoreDescription,
        outs: Sequence[Array],
        step: Array,
        skipped: Array,
        statuses: Array,
        inexact: Array,
        *scalars: Array,
    ) -> None:
        """Callback: every leaf has been updated; ends the step. Results: verdict.

        `inexact` says of each leaf whether what the update makes of its 16-bit params
        differs in some bit from what the store has.
        """
        self.store.check()
        training = self.store.training
        if np.any(statuses == NON_FINITE) and self._nonfinite != "allow":
            training.abandon()
            if self._nonfinite != "skip":
                training.wait()  # commits what came before
                raise self._non_finite(description, int(step), statuses)
            outs[0][...] = SKIPPED
        else:
            named = _named(description, scalars)
            leaves = np.flatnonzero(inexact).tolist()
            training.finish(int(step), named, int(skipped), leaves)
            outs[0][...] = COMMITTED

    def _non_finite(
        self, description: StoreDescription, step: int, statuses: Array
    ) -> NonFiniteGradientError:
        bad = [
            leaf.name
            for leaf, status in zip(description.leaves, statuses, strict=True)
            if status == NON_FINITE
        ]
        more = f" and {len(bad) - 5} more leaves" if len(bad) > 5 else ""
        return NonFiniteGradientError(
            f"step {step + 1}: NaN or Inf in the gradient of {', '.join(bad[:5])}"
            f"{more}; the step was refused, {self.store.path} stays at step {step}. "
            'Lower the learning rate or clip the gradients, or pass nonfinite="skip" '
            "to go on without such steps"
        )


def _origin(coordinates: Array, shard: Array) -> tuple[int, ...]:
    return tuple(int(c) * n for c, n in zip(coordinates, shard.shape, strict=True))


def _named(
    description: StoreDescription, scalars: Sequence[Array]
) -> list[ScalarState]:
    pairs = zip(description.scalar_paths, scalars, strict=True)
    return [ScalarState(path, value.copy()) for path, value in pairs]
