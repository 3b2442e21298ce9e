"""The host functions of `init`: params into a new store, or the state of one.

Invariant: only NumPy is used, as in `jaxinf.optimizer.host_side`. A store is new until
every leaf is placed and step 0 is committed. On a store with steps the params of `init`
are compared with the store's; others are not refused, but noted in the state.
"""

import threading
from collections.abc import Sequence
from typing import Literal

import numpy as np

from jaxinf.csd import ScalarInputs
from jaxinf.engine import Store, StoreDescription, warn_of_unseen
from jaxinf.errors import StoreMismatchError
from jaxinf.optimizer.callback import FAILED
from jaxinf.optimizer.host_side import named_scalars
from jaxinf.optimizer.leaf_call import FINITE, HostCall, HostResult
from jaxinf.store import ScalarState
from jaxinf.typing import Array

OnExisting = Literal["resume", "restart", "error"]
"""The action of `init` on a store that has steps; see `jaxinf.smart_update`."""


class HostInit:
    """Host functions over one store.

    Args:
      store: the store that `init` makes or resumes.
      on_existing: the action on a store that has steps.
    """

    def __init__(
        self, store: Store, description: StoreDescription, on_existing: OnExisting
    ) -> None:
        self._store = store
        self._description = description
        self._on_existing = on_existing
        self._guard = threading.Lock()
        self._has_begun = False
        self._has_seen_others = False

    def begin(self) -> bool:
        """Begins `init`: treats a store that has steps according to `on_existing`.

        Returns:
          Whether the store is new, so that leaves must be placed.

        Raises:
          StoreMismatchError: the store has steps but must not, or has other leaves.
        """
        training = self._store._training
        with self._guard:
            if not self._has_begun and training.commit is not None:
                if self._on_existing == "error":
                    raise StoreMismatchError(
                        f"{self._store.path}: expected no store there yet, as "
                        'on_existing="error" says, found one at step '
                        f'{training.commit.step}; on_existing="resume" goes on with '
                        'it, "restart" keeps it as a checkpoint and begins anew'
                    )
                if self._on_existing == "restart":
                    training.restart(self._description)
            is_first = not self._has_begun
            if not self._has_begun:
                # An update of others must be given params in any case.
                dtypes = {leaf.dtype for leaf in self._description.leaves}
                self._has_seen_others = dtypes != {"float32"}
            self._has_begun = True
        is_new = training.bind(self._description, may_create=True)
        if is_first and not is_new and training.binding.has_advanced:
            raise StoreMismatchError(
                f"{self._store.path}: expected the first init on this open store, "
                "found one after steps of its own: it would keep moments and counts, "
                "which optax's init resets. To begin anew, use smart_update(…, "
                'on_existing="restart"), which keeps the run as a checkpoint; to go '
                "on, give update the state that the last call returned. Closed and "
                "opened, the store resumes"
            )
        self._store.wait()
        return is_new

    def leaves(self, outs: HostResult, call: HostCall) -> None:
        """Callback: leaves or shards of the params; see `place`.

        Results: the error feedback, if there is any, and statuses.
        """
        is_new = self.begin()
        for leaf, feedback in zip(call.leaves, outs.arrays, strict=True):
            origin = call.origin(leaf)
            if is_new:
                self.place(leaf.number, leaf.params, origin, call.inputs(leaf))
            else:
                self.check_box(leaf.number, origin, leaf.shape)
                self.see(leaf.number, leaf.params, origin)
            if feedback is not None and is_new:
                feedback[...] = 0
            elif feedback is not None:
                feedback[...] = 0  # where others hold it
                self._store._training.read_feedback(leaf.number, feedback, origin)
        outs.statuses[...] = FINITE

    def place(
        self,
        number: int,
        shard: Array,
        origin: Sequence[int],
        inputs: ScalarInputs,
    ) -> None:
        """Stores a shard's initial state."""
        training = self._store._training
        training.initialise(self._description, number, shard, origin, inputs)

    def check_box(
        self, number: int, origin: Sequence[int], extent: Sequence[int]
    ) -> None:
        """Refuses a shard that the store's chunks do not divide at."""
        self._store._training.opened.chunks_of(number, origin, extent)

    @property
    def is_comparing(self) -> bool:
        """Whether all params so far are those of the store's step."""
        return not self._has_seen_others

    def see(self, number: int, shard: Array | None, origin: Sequence[int] = ()) -> None:
        """Compares a shard with the store's step, until the first difference.

        Args:
          shard: its params; None if they are not known.
          origin: index in the leaf of the shard's first element.
        """
        if self.is_comparing:
            training = self._store._training
            is_same = shard is not None and training.has_params(number, shard, origin)
            self._has_seen_others = not is_same

    def finish(
        self, outs: Sequence[Array], arguments: tuple[Array, Sequence[Array]]
    ) -> None:
        """Callback: ends `init`, when all leaves are placed according to the statuses.

        Results: see `held_state`.
        """
        statuses, scalars = arguments
        if np.any(statuses == FAILED):
            self._store._training.check()
            raise self._store._training.members.failure_of_others(0)
        for out, value in zip(outs, self.held_state(scalars), strict=True):
            out[...] = value

    def held_state(self, scalars: Sequence[Array]) -> list[Array]:
        """Commits step 0 of a new store; returns the beginning of the run's state.

        Returns:
          Step, skipped steps, origin (see `SmartUpdateState`) and scalar state.
        """
        training = self._store._training
        is_new = self.begin()
        self._has_begun = False  # the computation may run again
        if is_new:
            training.finish_initialisation(named_scalars(self._description, scalars))
        else:
            training.binding.release()
            unseen = training.opened.finished.steps_without_params
            warn_of_unseen(self._store.path, unseen)
        commit = training.opened.finished
        self._check_scalars(scalars, commit.scalar_state)
        origin = int(not is_new and self._has_seen_others)
        counters = (commit.step, commit.skipped_steps, origin)
        held = [scalar.value for scalar in commit.scalar_state]
        return [*(np.array(n, np.int32) for n in counters), *held]

    def agreed_origin(self, origin: Array) -> Array:
        """Returns the state's origin for all processes: one has seen other params."""
        found = self._store._training.members.agree("init", lambda: int(origin))
        return np.array(max(found), np.int32)

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
