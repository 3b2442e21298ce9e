"""Functions of a store's params without a gradient: evaluation, generation.

    batch ─► programs, one after another ─► results
              ▲ params read ahead
              └──────── store

Invariant: a call reads one finished step of the store, and writes nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxinf.engine import Store, average_states, check_like, engine_of
from jaxinf.errors import StreamError
from jaxinf.streaming.home import Endpoints, without
from jaxinf.streaming.move.params import Hold, Params, StoreParams, StoreReader
from jaxinf.streaming.plan.calls import Plan
from jaxinf.streaming.plan.memory import MemoryNeed, StepNeeds
from jaxinf.streaming.program.graph import Piece
from jaxinf.streaming.program.lifetimes import OrderedProgram
from jaxinf.streaming.program.trace import abstract
from jaxinf.streaming.program.units import SHARED, shared_bytes, units_of
from jaxinf.streaming.update.apply_gradients import Agree
from jaxinf.typing import Array, PyTree


class ReadStore:
    """The `Home` of a function: a store whose params, until a step, may all stay.

    Args:
      closes: Whether the function's `close` closes the store.
      average: Whether its params are the store's average.
    """

    what, has_loss, num_skipped = "a function", False, 0

    def __init__(self, store: Store, *, closes: bool, average: bool) -> None:
        self.store, self.engine = store, engine_of(store)
        self._closes, self._average = closes, average
        self._avals: PyTree | None = None

    @property
    def avals(self) -> PyTree:
        """As told, or in nested dicts; raises StreamError if they are not."""
        if self._avals is None:
            self._avals = _nested(self.store)
        return self._avals

    def first(
        self, init_fn: Callable[..., PyTree], args: Any, shardings: PyTree
    ) -> tuple[PyTree, None]:
        raise StreamError("f.init: a function's params are the store's; leave it out")

    def given(
        self, params: PyTree, state: PyTree, shardings: PyTree
    ) -> tuple[PyTree, None]:
        without(state=state, shardings=shardings)
        check_like(self.engine.opened, params)
        return abstract(params), None

    def start(self, avals: PyTree, *others: Any) -> None:
        self._avals = avals

    def params(self, like: PyTree) -> PyTree:
        like = self.avals if like is None else like
        return self.store.params(like, average=self._average)

    def endpoints(self, ready: OrderedProgram, avals: PyTree = None) -> Endpoints:
        opened, params = self.engine.opened, ready.traced.params
        if self._average:
            average_states(opened, 0)  # or refuses
        unit_of = units_of(params, opened.divides)
        units = {*map(unit_of, ready.sizes)}
        undivided = [unit.whole_bytes for unit in units if not unit.is_divided]
        purpose = "reading shards of params that are not stored alone"
        others = (
            MemoryNeed(max(undivided, default=0), purpose),
            MemoryNeed(shared_bytes(units), SHARED),
        )

        def source(plan: Plan, hold: Hold) -> Params:
            reader = StoreReader(self.engine, average=self._average)
            return StoreParams(unit_of, reader, plan.reading, hold, are_frozen=False)

        needs = StepNeeds(
            unit_of=unit_of,
            frozen=frozenset(range(len(params))),
            export_bytes=opened.export_bytes,
            others=others,
        )
        return Endpoints(needs, source, sink=lambda *_: NoGradients())

    def take_turn(self, plan: Plan) -> None: ...
    def rest(self) -> None: ...

    def join(self) -> None:
        if self._average:
            self.engine.wait()  # a commit writes all of it to the drive
        else:
            self.engine.join()

    def close(self, *error: Any) -> None:
        if self._closes:
            self.store.close()


class NoGradients:
    """The sink of a function."""

    waited_s, spilled_bytes = 0.0, (0, 0)

    def begin(self, extra_args: Mapping[str, Any], params: Params) -> None:
        without(extra_args=extra_args or None)

    def put(self, piece: Piece, gradient: jax.Array | Array) -> None:
        raise AssertionError("a function has no gradients")

    def finish(self, extra_args: Any, results: Any, check: Any, agree: Agree) -> bool:
        agree(lambda: ())
        return False

    def abandon(self) -> None: ...
    def close(self) -> None: ...


def _nested(store: Store) -> PyTree:
    """Returns the shapes of a store's params in nested dicts.

    Raises:
      StreamError: They are in another tree.
    """
    tree: Any = {}
    leaves: Sequence[Any] = engine_of(store).directory.manifest.leaves
    for leaf in leaves:
        inner, keys = tree, ("", *leaf.path)
        for key in keys[:-1]:
            inner = inner.setdefault(key, {})
        inner[keys[-1]] = jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(leaf.dtype))
    tree = tree[""]
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    if [tuple(k.key for k in path) for path in paths] != [one.path for one in leaves]:
        raise StreamError(
            f"{store.path}: its params are no nested dicts; tell their tree "
            "first: f.load(params), of which only shapes and dtypes count"
        )
    return tree
