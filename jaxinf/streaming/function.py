"""Functions of a store's params without a gradient: evaluation, generation.

    batch ─► programs, one after another ─► results
              ▲ params read ahead
              └──────── store

Invariant: a call reads one finished step of the store, and writes nothing.
"""

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from jaxinf.engine import Engine, Store, average_states, check_like, engine_of
from jaxinf.errors import StreamError
from jaxinf.streaming.backend import StepBackend, without
from jaxinf.streaming.move.params import read_units
from jaxinf.streaming.plan.memory import MemoryNeed, StepNeeds
from jaxinf.streaming.program.lifetimes import OrderedProgram
from jaxinf.streaming.program.trace import abstract
from jaxinf.streaming.program.units import ASSEMBLING, assembly_bytes, units_of
from jaxinf.streaming.update.apply_gradients import Agree
from jaxinf.typing import PyTree


@dataclass(frozen=True)
class FunctionHome:
    """The home of a function: a store whose params may all stay until its next step.

    Attributes:
      closes: Whether the function's `close` closes the store.
      average: Whether its params are the store's average.
    """

    store: Store
    closes: bool
    average: bool

    has_loss = takes_extra_args = False

    @cached_property
    def engine(self) -> Engine:
        return engine_of(self.store)

    def from_init(self, init_fn: Any, args: Any, shardings: PyTree) -> NoReturn:
        raise StreamError("f.init: a function's params are the store's; leave it out")

    def from_params(
        self, params: PyTree, state: PyTree, shardings: PyTree
    ) -> tuple[PyTree, None]:
        without(state=state, shardings=shardings)
        check_like(self.engine.files, params)
        return abstract(params), None

    def start(self, avals: PyTree, *_: Any) -> PyTree:
        return avals

    def params(self, like: PyTree) -> PyTree:
        return self.store.params(like, average=self.average)

    def make_backend(
        self, ordered: OrderedProgram, *, is_new: bool = False
    ) -> StepBackend:
        engine, params = self.engine, ordered.traced.params
        files = engine.files
        if self.average:
            average_states(files, 0)  # or refuses
        unit_of = units_of(params, files.subgroups.has_whole_chunks)
        units = {*map(unit_of, ordered.sizes)}
        undivided = [unit.whole_bytes for unit in units if not unit.moves_by_shard]
        purpose = "reading shards of params that are not stored alone"
        needs = StepNeeds(
            unit_of=unit_of,
            frozen=frozenset(range(len(params))),
            export_bytes=files.subgroups.export_bytes,
            others=(
                MemoryNeed(max(undivided, default=0), purpose),
                MemoryNeed(assembly_bytes(units), ASSEMBLING),
            ),
        )

        return StepBackend(
            ordered=ordered,
            needs=needs,
            make_sink=lambda *_: NoGradients(),
            kind="a function",
            engine=engine,
            begin_reads=partial(read_units, engine, average=self.average),
            version=lambda: (engine.contents_version, engine.files.finished.step),
            reads_commit=self.average,  # which no step writes whole
        )


class NoGradients:
    """The sink of a function's calls, which hand nothing out."""

    waited_s, spilled_bytes = 0.0, (0, 0)

    def begin(self, *_: Any) -> None:
        pass

    put = abandon = close = begin

    def finish(self, extra_args: Any, results: Any, check: Any, agree: Agree) -> bool:
        agree(list)
        return False


def nested_avals(store: Store) -> PyTree:
    """Returns the shapes of a store's params, in nested dicts."""
    tree: Any = {}
    leaves = engine_of(store).directory.manifest.leaves
    for leaf in leaves:
        inner, keys = tree, ("", *leaf.path)
        for key in keys[:-1]:
            inner = inner.setdefault(key, {})
        inner[keys[-1]] = jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(leaf.dtype))
    tree = tree[""]
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    if [tuple(k.key for k in path) for path in paths] != [x.path for x in leaves]:
        raise StreamError(
            f"{store.path}: its params are no nested dicts; tell their tree "
            "first: f.load(params), of which only shapes and dtypes count"
        )
    return tree
