"""The host functions of an update, which callbacks run.

Invariant: only NumPy computes here, because a callback that starts a computation of JAX
can deadlock. The first exception stops the store and is kept as it is. The gradients of
started updates take no more memory than the store's budget, except for a single longer
one; every started update ends, fetched or not.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from jaxinf.documents import first_few
from jaxinf.engine import (
    Engine,
    StateRequest,
    Store,
    StoreDescription,
    bind_optimizer,
    engine_of,
)
from jaxinf.errors import StoreMismatchError
from jaxinf.optimizer.callback import FAILED, HostCallback, HostFunction
from jaxinf.optimizer.leaf_call import (
    FINITE,
    GO,
    HOLD_NON_FINITE,
    NON_FINITE,
    HostCall,
    HostResult,
)
from jaxinf.program import NonFinitePolicy, nonfinite_error
from jaxinf.store import ScalarState
from jaxinf.typing import Array

_Key: TypeAlias = tuple[int, ...]


class StartedUpdates:
    """The updates of one store that are under way, for which its `close` waits.

    The store's workers and memory are the limits. Thread-safe.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._changed = threading.Condition()
        self._used_bytes = 0
        self._pool: ThreadPoolExecutor | None = None
        self._under_way: dict[_Key, Future[HostResult]] = {}

    def start(
        self, key: _Key, update: Callable[[], HostResult], num_bytes: int
    ) -> None:
        """Begins an update; blocks while those under way hold too much memory.

        It holds `num_bytes` until its end. An unfetched update of the key is forgotten.
        """
        engine = engine_of(self._store)
        engine.health.check()

        def run() -> HostResult:
            try:
                return update()
            finally:
                with self._changed:
                    self._used_bytes -= num_bytes
                    self._changed.notify_all()

        def fits() -> bool:
            used_bytes = self._used_bytes
            return (
                not used_bytes or used_bytes + num_bytes <= engine.options.memory_bytes
            )

        with self._changed:
            self._changed.wait_for(fits)
            self._used_bytes += num_bytes
            if self._pool is None:
                num_csds = len(engine.files.csds) if engine.has_files else 1
                num_workers = engine.options.num_workers_for(num_csds)
                self._pool = ThreadPoolExecutor(num_workers, "jaxinf-leaf")
                engine.on_close.append(self._pool.shutdown)
            self._under_way[key] = self._pool.submit(run)

    def finish(self, key: _Key) -> HostResult:
        """Waits for an update and returns its results, or raises its exception."""
        with self._changed:
            future = self._under_way.pop(key)
        return future.result()


ACCEPTED, NOT_COMPARED = 0, 1
"""Whether the run's params were compared with the store's; or `callback.FAILED`."""

COMMITTED, SKIPPED = 0, 1
"""Verdict on a step; or `callback.FAILED`."""


class Comparison(NamedTuple):
    """Whether params are the store's, and, in `differing`, which replicas differ."""

    step: Any
    statuses: Any
    differing: Any


class StepEnd(NamedTuple):
    """The arrays with which a step ends.

    Attributes:
      step, skipped_steps: The state's before the step.
      differences: For each leaf with 16-bit params the greatest difference of the
        updated ones from the store's.
    """

    step: Any
    skipped_steps: Any
    statuses: Any
    differences: Any
    scalars: Sequence[Any]
    carried: Sequence[Any]


class HostFunctions:
    """Host functions over one store."""

    def __init__(self, store: Store, nonfinite: NonFinitePolicy) -> None:
        self.store = store
        self._nonfinite: NonFinitePolicy = nonfinite
        self._started = StartedUpdates(store)

    @property
    def engine(self) -> Engine:
        return engine_of(self.store)

    @property
    def checks_finite(self) -> bool:
        """Whether a non-finite gradient refuses or skips the step."""
        return self._nonfinite != "allow"

    @property
    def waits_for_all(self) -> bool:
        """Whether updates wait until all gradients are known to be finite.

        They do if a step may overwrite an uncommitted one, since it could not be
        refused half way.
        """
        return self.engine.options.rewrites_steps and self.checks_finite

    def guarded(
        self, function: Any, *arguments: Any, is_last: bool = False, **options: Any
    ) -> HostCallback:
        """Makes a callback of a host function: its exception stops the store.

        No later call of the step tells other processes of the last one's exception.
        """
        engine, health = self.engine, self.engine.health
        report = health.fail_announced
        if is_last and not engine.group.is_alone:
            report = health.fail_unannounced
        bound: HostFunction = partial(function, *arguments, **options)
        return HostCallback(bound, health.fail, report)

    # --- callbacks -----------------------------------------------------------------

    def must_compare(
        self, description: StoreDescription, out: Array, step: Array, *, waits: bool
    ) -> None:
        """Callback before a step: tells whether params must be compared with the store.

        Args:
          waits: Whether to wait for an export here. An update would wait while other
            JAX devices wait in a collective, and XLA ends the process after 40 s.
        """
        engine = self.engine
        bind_optimizer(engine, description)
        is_accepted = engine.resume_check.expected_step == int(step)
        if waits and engine.options.exports(int(step)):
            engine.steps.join()
        if not is_accepted:
            engine.steps.abandon()  # a step whose computation ended before its commit
            engine.steps.wait()
            engine.resume_check.begin(int(step))
        out[...] = ACCEPTED if is_accepted else NOT_COMPARED

    def compare(self, outs: HostResult, call: HostCall) -> None:
        """Callback before the first step: compares params with the store's."""
        self.engine.health.check()
        for leaf in call.leaves:
            origin = call.origin(leaf)
            self.engine.resume_check.compare(leaf.number, leaf.params, origin)
        outs.statuses[...] = FINITE

    def accept_params(
        self, description: StoreDescription, out: Array, comparison: Comparison
    ) -> None:
        """Callback when every leaf was compared: accepts the params or refuses them."""
        self._raise_failure(int(comparison.step), comparison.statuses)
        if np.any(comparison.differing):
            leaves = description.leaves
            numbers = np.flatnonzero(comparison.differing)
            names = [leaves[number].record.name for number in numbers]
            raise StoreMismatchError(
                f"{self.store.path}: expected replicas with the same bits in all "
                f"processes, found others of {first_few(names)}, as if a process had "
                "read an old copy. Take the params from the store, params = "
                "store.params(like=params), in every process"
            )
        self.engine.resume_check.finish()
        out[...] = ACCEPTED

    def _clear_parts(self, outs: HostResult, call: HostCall) -> None:
        """Writes zeros into results of which other processes fill a part."""
        if not self.engine.group.is_alone:
            records = self.engine.files.leaves
            for leaf, out in zip(call.leaves, outs.arrays, strict=True):
                if out is not None and not records[leaf.number].is_whole:
                    out[...] = 0

    def _raise_failure(self, step: int, statuses: Array) -> None:
        """Raises the failure of this process, or of another one, if there is any."""
        engine = self.engine
        if not np.any(statuses == FAILED):
            engine.health.check()
        else:
            error = engine.health.error or engine.group.failure_of_others(step)
            raise self._raise_in_next_call(error)

    def _raise_in_next_call(self, error: BaseException) -> BaseException:
        """Returns an error that all processes know; the next call raises it, too."""
        if not self.engine.group.is_alone:
            self.engine.health.fail_announced(error)
        return error

    def read_slots(
        self, slots: Sequence[str], outs: HostResult, call: HostCall
    ) -> None:
        """Callback: reads a slot of each leaf before the updates of a step."""
        self._clear_parts(outs, call)
        requests = [
            StateRequest(leaf.number, slots[leaf.number], call.origin(leaf), out)
            for leaf, out in zip(call.leaves, outs.arrays, strict=True)
        ]
        self.engine.steps.read_states(int(call.step), *requests)
        outs.statuses[...] = FINITE

    def update(
        self, description: StoreDescription, outs: HostResult, call: HostCall
    ) -> None:
        """Callback: takes gradients when ready, and updates leaves or shards."""
        bind_optimizer(self.engine, description)
        self._clear_parts(outs, call)
        places, requests = [], []
        for place, (leaf, out) in enumerate(zip(call.leaves, outs.arrays, strict=True)):
            if leaf.is_kept:
                outs.statuses[place] = FINITE
            elif leaf.gate_value == GO:
                described = description.leaves[leaf.number]
                requests.append(leaf.request(call, described, out))
                places.append(place)
            else:
                if out is not None:
                    out[...] = 0
                is_bad = leaf.gate_value == HOLD_NON_FINITE
                outs.statuses[place] = NON_FINITE if is_bad else FINITE
        if requests:
            is_finite = self.engine.steps.update(int(call.step), *requests)
            outs.statuses[places] = np.where(is_finite, FINITE, NON_FINITE)

    def start(
        self, description: StoreDescription, outs: HostResult, call: HostCall
    ) -> None:
        """Callback: begins an update, and returns when the gradients are taken.

        Statuses are `FINITE`.
        """
        described = description.leaves

        def update() -> HostResult:
            arrays = tuple(
                None
                if leaf.is_kept
                else np.empty(leaf.shard_shape, described[leaf.number].device_dtype)
                for leaf in call.leaves
            )
            result = HostResult(arrays, np.empty(len(arrays), np.int32))
            self.update(description, result, call)
            return result

        num_bytes = sum(array.nbytes for array in jax.tree.leaves(call))
        self._started.start(call.key, update, num_bytes)
        outs.statuses[...] = FINITE

    def finish(self, outs: HostResult, call: HostCall) -> None:
        """Callback: fetches a started update, after the last `start`; see `update`."""
        self.engine.health.check()
        result = self._started.finish(call.key)
        for out, array in zip(outs.arrays, result.arrays, strict=True):
            if out is not None:
                out[...] = array
        outs.statuses[...] = result.statuses

    def commit(
        self,
        description: StoreDescription,
        verdict: Array,
        end: StepEnd,
        *,
        order: Sequence[int],
        measured: Sequence[int],
        kept: Sequence[int],
        paths: Sequence[tuple[str, ...]],
    ) -> None:
        """Callback: ends the step when every leaf has been updated.

        Args:
          order: Leaves in the order of the statuses.
          measured: Leaves in the order of the differences.
          kept: Leaves that have no gradient.
          paths: Names of the carried arrays.
        """
        engine, step = self.engine, int(end.step)
        statuses = np.empty_like(end.statuses)
        statuses[list(order)] = end.statuses
        self._raise_failure(step + 1, statuses)
        if np.any(statuses == NON_FINITE) and self.checks_finite:
            engine.steps.abandon()
            if self._nonfinite != "skip":
                engine.steps.wait()  # commits the earlier steps
                pairs = zip(description.leaves, statuses, strict=True)
                names = [leaf.record.name for leaf, s in pairs if s == NON_FINITE]
                error = nonfinite_error(names, step, self.store.path)
                raise self._raise_in_next_call(error)
            verdict[...] = SKIPPED
        else:
            pairs = zip(measured, end.differences.tolist(), strict=True)
            engine.steps.finish(
                step,
                named_scalars(description, end.scalars),
                int(end.skipped_steps),
                {number: difference for number, difference in pairs if difference},
                kept=kept,
                carry=dict(zip(paths, end.carried, strict=True)),
            )
            engine.resume_check.expected_step = step + 1
            verdict[...] = COMMITTED


def named_scalars(
    description: StoreDescription, scalars: Sequence[Array]
) -> list[ScalarState]:
    """Returns the optimizer's scalar state in the form of a commit."""
    pairs = zip(description.scalar_paths, scalars, strict=True)
    return [ScalarState.of(path, value.copy()) for path, value in pairs]
