"""The host functions of `smart_update`: what runs when a callback fires.

Invariant: NumPy alone in here, no JAX computation: a callback that starts one can
deadlock. The first exception stops the store and is kept as it is.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from jaxinf.csd import ScalarInputs
from jaxinf.engine import (
    LeafPart,
    Store,
    StoreDescription,
    compare_params,
    finish_initialisation,
    initialise,
)
from jaxinf.errors import NonFiniteGradientError, StoreMismatchError
from jaxinf.store import ScalarState
from jaxinf.typing import Array

__all__ = [
    "COMMITTED",
    "FAILED",
    "FINITE",
    "NON_FINITE",
    "SKIPPED",
    "HostSide",
    "NonFinitePolicy",
]

FINITE, NON_FINITE, FAILED = 0, 1, 2
"""Status of a leaf's call."""

COMMITTED, SKIPPED = 0, 1
"""Verdict on a step; `FAILED` is one too."""

NonFinitePolicy = Literal["error", "skip", "allow"]


class HostSide:
    """Host functions over one store."""

    def __init__(self, store: Store, nonfinite: NonFinitePolicy) -> None:
        self.store = store
        self._nonfinite = nonfinite

    def guarded(
        self, host: Callable[..., Any], results_on_failure: Callable[..., Any] | None
    ) -> Callable[..., Any]:
        """Wraps a host function for a callback.

        Args:
          host: takes and returns NumPy arrays.
          results_on_failure: given the arguments, what to return after an exception;
            None to raise it into the computation, as only one JAX device allows.
        """

        def call(*arguments: Any) -> Any:
            arrays = [np.asarray(argument) for argument in arguments]
            try:
                return host(*arrays)
            except BaseException as error:
                self.store.session.fail(error)
                if results_on_failure is None:
                    raise
                return results_on_failure(*arrays)

        return call

    # --- init ----------------------------------------------------------------------

    def init_leaf(
        self,
        description: StoreDescription,
        number: int,
        num_scalars: int,
        coordinates: Array,
        *arguments: Array,
    ) -> tuple[Array, Array]:
        """Callback: a leaf or shard of the params; see `place`."""
        scalars, (leaf, *arrays) = arguments[:num_scalars], arguments[num_scalars:]
        is_new = self.store.session.bind(description, may_create=True)
        self.store.wait()
        inputs = ScalarInputs(scalars, tuple(arrays))
        origin = _origin(coordinates, leaf)
        self.place(description, number, leaf, origin, inputs, is_new=is_new)
        return np.zeros(leaf.shape, np.bool_), np.array(FINITE, np.int32)

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
        session = self.store.session
        if is_new:
            kernel = description.leaves[number].init_kernel
            initialise(session, number, kernel, shard, origin, inputs)
        else:
            compare_params(session, number, shard, origin)

    def finish_init(
        self, description: StoreDescription, statuses: Array, *scalars: Array
    ) -> tuple[Array, ...]:
        """Commits a new store's step 0; returns step, skipped steps, scalar state."""
        session = self.store.session
        if np.any(statuses == FAILED):
            session.check()
        if session.bind(description, may_create=True):
            finish_initialisation(session, _named(description, scalars))
        commit = session.commit
        assert commit is not None
        held = [scalar.value for scalar in commit.scalar_state]
        self._check_scalars(description, scalars, commit.scalar_state)
        counters = (commit.step, commit.skipped_steps)
        return (*(np.array(n, np.int32) for n in counters), *held)

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
        coordinates: Array,
        step: Array,
        *arguments: Array,
    ) -> tuple[Array, Array]:
        """Callback: the gradient of a leaf or shard, as it becomes ready."""
        scalars, probe = arguments[:num_scalars], arguments[num_scalars]
        gradient, *arrays = arguments[num_scalars + 1 :]
        leaf = description.leaves[number]
        self.store.session.bind(description)
        part = LeafPart(
            leaf=number,
            kernel=leaf.kernel,
            origin=_origin(coordinates, gradient),
            gradient=gradient,
            inputs=ScalarInputs(scalars, tuple(arrays)),
            out=np.empty(gradient.shape, leaf.device_dtype),
            probe=probe,
        )
        is_finite = self.store.steps.update(int(step), part)
        status = FINITE if is_finite else NON_FINITE
        return part.out, np.array(status, np.int32)

    def commit(
        self,
        description: StoreDescription,
        step: Array,
        skipped: Array,
        statuses: Array,
        *scalars: Array,
    ) -> tuple[Array]:
        """Callback: every leaf has been updated; ends the step."""
        self.store.check()
        steps = self.store.steps
        if np.any(statuses == NON_FINITE) and self._nonfinite != "allow":
            steps.abandon()
            if self._nonfinite == "skip":
                return (np.array(SKIPPED, np.int32),)
            raise self._non_finite(description, int(step), statuses)
        steps.finish(int(step), _named(description, scalars), int(skipped))
        return (np.array(COMMITTED, np.int32),)

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
    return [ScalarState(path, value) for path, value in pairs]
