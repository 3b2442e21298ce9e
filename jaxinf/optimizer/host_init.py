"""The host functions of `init`: they store params, or compare them with a store.

Invariant: as in `jaxinf.optimizer.host_side`; a store is new until all its leaves are
placed and step 0 is committed.
"""

from collections.abc import Sequence

import numpy as np

from jaxinf.csd import ScalarInputs
from jaxinf.engine import Store, StoreDescription
from jaxinf.errors import StoreMismatchError
from jaxinf.optimizer.callback import FAILED
from jaxinf.optimizer.host_side import named_scalars
from jaxinf.optimizer.leaf_call import FINITE, HostCall, HostResult
from jaxinf.store import ScalarState
from jaxinf.typing import Array

__all__ = ["HostInit"]


class HostInit:
    """Host functions over one store.

    Args:
      store: the store that `init` makes or resumes.
      description: its description.
    """

    def __init__(self, store: Store, description: StoreDescription) -> None:
        self._store = store
        self._description = description

    def leaves(self, outs: HostResult, call: HostCall) -> None:
        """Callback: leaves or shards of the params; see `place`.

        Results: the error feedback, if there is any, and statuses.
        """
        is_new = self._store.training.bind(self._description, may_create=True)
        self._store.wait()
        for leaf, feedback in zip(call.leaves, outs.arrays, strict=True):
            origin = call.origin(leaf)
            self.place(
                leaf.number, leaf.params, origin, call.inputs(leaf), is_new=is_new
            )
            if feedback is not None and is_new:
                feedback[...] = 0
            elif feedback is not None:
                self._store.training.read_feedback(leaf.number, feedback, origin)
        outs.statuses[...] = FINITE

    def place(
        self,
        number: int,
        shard: Array,
        origin: Sequence[int],
        inputs: ScalarInputs,
        *,
        is_new: bool,
    ) -> None:
        """Stores a shard's initial state, or compares it with the stored one."""
        training = self._store.training
        if is_new:
            training.initialise(self._description, number, shard, origin, inputs)
        else:
            training.compare_params(number, shard, origin)

    def finish(
        self, outs: Sequence[Array], arguments: tuple[Array, Sequence[Array]]
    ) -> None:
        """Callback: ends `init`, when all leaves are placed according to the statuses.

        Results: see `held_state`.
        """
        statuses, scalars = arguments
        if np.any(statuses == FAILED):
            self._store.training.check()
        for out, value in zip(outs, self.held_state(scalars), strict=True):
            out[...] = value

    def held_state(self, scalars: Sequence[Array]) -> list[Array]:
        """Commits step 0 of a new store; returns step, skipped steps, scalar state.

        Args:
          scalars: the initial scalar state.
        """
        training = self._store.training
        if training.bind(self._description, may_create=True):
            training.finish_initialisation(named_scalars(self._description, scalars))
        commit = training.finished
        self._check_scalars(scalars, commit.scalar_state)
        counters = (commit.step, commit.skipped_steps)
        held = [scalar.value for scalar in commit.scalar_state]
        return [*(np.array(n, np.int32) for n in counters), *held]

    def _check_scalars(
        self, given: Sequence[Array], held: Sequence[ScalarState]
    ) -> None:
        wanted = [
            (path, value.dtype.name, value.shape)
            for path, value in zip(self._description.scalar_paths, given, strict=True)
        ]
        stored = [(s.path, s.value.dtype.name, s.value.shape) for s in held]
        if wanted != stored:
            raise StoreMismatchError(
                f"{self._store.path}: the store's scalar state is {stored}, this "
                f"optimizer's {wanted}; open it with the optimizer it was made with"
            )
