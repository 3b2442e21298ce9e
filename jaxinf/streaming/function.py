"""Functions of a store's params without a gradient: evaluation, generation.

    batch ─► programs, one after another ─► results
              ▲ params read ahead
              └──────── store

Invariant: a call reads one finished step of the store, and writes nothing.
"""

from collections.abc import Callable, Collection, Mapping, Set
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxinf.engine import Store
from jaxinf.errors import StreamError
from jaxinf.streaming.base import Bound, Streamed
from jaxinf.streaming.budgets import planned_within
from jaxinf.streaming.fit import Fitted, fit
from jaxinf.streaming.move.fetch import make_fetcher
from jaxinf.streaming.move.params import StoreParams
from jaxinf.streaming.move.resident import Resident
from jaxinf.streaming.move.source import StoreSource, version_of
from jaxinf.streaming.options import Limits
from jaxinf.streaming.plan.device import check_pinned, device_limit
from jaxinf.streaming.plan.memory import READER_BYTES, Division, divide_reading
from jaxinf.streaming.plan.plan import Plan, Prepared, prepare_function
from jaxinf.streaming.plan.reads import Reading, planned_fetches
from jaxinf.streaming.plan.resident import ResidentChooser
from jaxinf.streaming.program.graph import Piece, aval_bytes
from jaxinf.streaming.program.meshes import default_device, outside_mesh
from jaxinf.streaming.program.trace import abstract, check_params
from jaxinf.streaming.program.units import Places, Unit
from jaxinf.streaming.run import Runner, compiled_bytes
from jaxinf.streaming.turns import Check, Turns, check_not_traced
from jaxinf.typing import PyTree

__all__ = ["StreamedFunction"]

# A function of a step reads so much less ahead, for what its compilation takes.
_OWN_SHARE = 6


class StreamedFunction(Streamed[Bound]):
    """Made by `jaxinf.stream_function`; also a context manager. Not thread-safe.

    ``f(batch)`` returns the outputs of ``fn(params, batch)`` for the params of the
    store's last finished step. No step may run meanwhile.

    Args:
      fn: The function.
      store: The store.
      limits: Memory.
      closes: Whether `close` closes the store.
      share: Returns the part of the budgets, by argument, that the function has.
      shared: Params of the store that a step keeps in memory; what of them stays.
      before: Called before each call.
      turns: Those of the step; by default its own.
      average: Whether its params are the store's average.

    Attributes:
      store: The store.
      limits: Memory.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        store: Store,
        limits: Limits,
        *,
        closes: bool = False,
        share: Callable[[Mapping[str, int]], Mapping[str, int]] = lambda given: given,
        shared: tuple[Resident, Collection[Unit]] | None = None,
        before: Callable[[], None] = lambda: None,
        turns: Turns | None = None,
        average: bool = False,
    ) -> None:
        super().__init__(turns)
        self.store = store
        self._fn = fn
        self.limits = limits
        self._closes = closes
        self._share = share
        self._device = default_device()
        self._limit = device_limit(self._device, limits.device_memory_bytes)
        self._is_shared = shared is not None
        # What stays are params, not their average.
        self._resident, self._shared = (None if average else shared) or (
            Resident(self._device, is_host=self._limit.is_host),
            (),
        )
        self._before = before
        self._average = average
        self._params: PyTree | None = None

    def load(self, params: PyTree) -> None:
        """Tells the tree of the params, if it is not made of nested dicts alone.

        Args:
          params: Tree of arrays, or of shapes and dtypes; values are not used. Those
            with a sharding over several devices are read shard by shard.

        Raises:
          StoreMismatchError: The store holds another tree.
          StreamError: A leaf is not an array of floating-point numbers.
        """
        check_params(params)
        self.store._check_like(params)
        self._params = abstract(params)

    def __call__(self, batch: PyTree) -> PyTree:
        """Returns the function's outputs; blocks until its last program is under way.

        Raises:
          BaseException: The exception that stopped the store.
        """
        check_not_traced(batch)
        self._turns.settle()
        key = self._key(batch)

        def body(check: Check) -> PyTree:
            self._before()
            if self._average:
                self.store._training.wait()  # a commit writes all of it to the drive
            else:
                self.store._training.join()
            bound = self._take_turn(key)
            bound.begin()
            with outside_mesh():
                return self._run(bound, batch, _no_gradient, check)[1]

        return self._turns.run(body)

    def params(self, like: PyTree = None) -> PyTree:
        """Returns the params that the next call reads; blocks until they are read.

        Args:
          like: Tree of arrays, or of shapes and dtypes, that gives each leaf its dtype
            and sharding; by default that of `load`, or nested dicts.

        Raises:
          StoreMismatchError: `like` is another tree than the store's.
          BaseException: The exception that stopped the store.
        """
        self._turns.settle()
        if like is None:
            like = self._params = self._params or _tree_of(self.store)
        return self.store.params(like, average=self._average)

    @property
    def fetched_bytes(self) -> int:
        """Bytes of params that the last call read from drives."""
        return 0 if self._last is None else self._last.params.counts.num_read_bytes

    def _rest(self) -> None:
        """Frees the memory for reading until the next call."""
        for bound in self._bound.values():
            bound.params.rest()

    def close(self) -> None:
        """Frees the memory; closes the store if it was given as a path. Idempotent."""
        try:
            self._turns.settle()
            for bound in self._bound.values():
                bound.close()
            if not self._is_shared:
                self._resident.drop()
        finally:
            if self._closes:
                self.store.close()

    # --- inside --------------------------------------------------------------------

    def _prepare(self, batch: PyTree) -> Prepared:
        if self._params is None:
            self._params = _tree_of(self.store)
        ready = prepare_function(self._fn, self._params, batch)
        return ready.with_bits(is_deterministic=self.limits.deterministic)

    def _bind(self, ready: Prepared) -> Bound:
        training = self.store._training
        training.opened.state_number(0, average=self._average)  # or refuses
        places = Places(ready.traced.params, training.can_move)
        fitted = planned_within(
            self.limits.budgets, partial(self._fitted, ready, places)
        )
        plan, division = fitted.plan, fitted.division
        if self._is_shared and self._limit.is_host:
            # A step's own programs stay in memory beside those of its functions.
            less = division.programs - self.limits.memory_bytes // _OWN_SHARE
            division = replace(division, programs=max(plan.peak_bytes, less))
        stays = fitted.units.units | frozenset(self._shared)
        reading = fitted.reads(plan, division, stays)
        source = StoreSource(
            training, READER_BYTES, reading.num_first, average=self._average
        )
        fetcher, _ = make_fetcher(source, reading, division, self._device)
        params = StoreParams(
            places,
            fetcher,
            source,
            self._resident,
            stays=stays,
            version=lambda: version_of(training),
            is_shared=self._is_shared,
        )
        record = partial(training.opened.timeline.add, "program")
        runner = Runner(plan, self._executables, record)
        return Bound(runner, params, fitted.without_graph())

    def _fitted(
        self, ready: Prepared, places: Places, budgets: Mapping[str, int]
    ) -> Fitted:
        units = {places.unit(piece) for piece in ready.lifetimes.sizes}
        division = self._division(ready, units, budgets)

        def reads(plan: Plan, part: Division, stays: Set[Unit]) -> Reading:
            return planned_fetches(plan, places, part, _never, stays)

        chooser = ResidentChooser(
            self.limits.resident,
            places,
            units,
            division,
            lambda plan, part: reads(plan, part, frozenset()).fetches,
            _never,
            partial(compiled_bytes, executables=self._executables),
        )
        return fit(ready, "keep", division, chooser, reads, self._executables)

    def _division(
        self, ready: Prepared, units: Collection[Unit], budgets: Mapping[str, int]
    ) -> Division:
        shared, device = self._share(budgets), self._limit
        if "device_memory_bytes" in shared:
            device = replace(device, num_bytes=shared["device_memory_bytes"])
        division = divide_reading(shared["memory_bytes"], device)
        check_pinned(self._device, division.staged)
        division = division.without(
            max((u.num_bytes for u in units if not u.is_divided), default=0),
            "reading shards of params that are not stored alone",
        )
        return division.without(
            sum(map(aval_bytes, ready.traced.batch)), "its batch", is_on_device=True
        )


def _never(unit: Unit) -> bool:
    return False


def _no_gradient(piece: Piece, gradient: jax.Array) -> None:
    raise AssertionError("a function without a gradient")


def _tree_of(store: Store) -> PyTree:
    """The store's params as nested dicts of shapes and dtypes.

    Raises:
      StreamError: They are in another tree.
    """
    tree: Any = {}
    for leaf in store._manifest.leaves:
        held = jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(leaf.dtype))
        if not leaf.path:
            return held
        inner = tree
        for key in leaf.path[:-1]:
            inner = inner.setdefault(key, {})
        inner[leaf.path[-1]] = held
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    if [tuple(key.key for key in path) for path in paths] != [
        leaf.path for leaf in store._manifest.leaves
    ]:
        raise StreamError(
            f"{store.path}: its params are no nested dicts; tell their tree first: "
            "f.load(params), of which only shapes and dtypes count"
        )
    return tree
