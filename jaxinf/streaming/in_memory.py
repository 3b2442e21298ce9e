"""A streamed step without a store: params and optax's state are in memory.

    batch ─► programs, one after another ─► gradients ─► optax's update
              values that backward needs may wait on a drive

Invariant: updates have the bits of jitted optax on the same gradients. A step that ends
  early leaves params and state as they were.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxinf.errors import BudgetError, StreamError
from jaxinf.streaming.bound import Ends, Fitted, within
from jaxinf.streaming.count import Count, count
from jaxinf.streaming.move.params import MemoryParams
from jaxinf.streaming.move.scratch import Scratch
from jaxinf.streaming.options import Options
from jaxinf.streaming.plan.calls import Plan
from jaxinf.streaming.plan.fit import Prepared, prepare
from jaxinf.streaming.plan.memory import Division, divide_rest
from jaxinf.streaming.program.graph import aval_bytes
from jaxinf.streaming.program.initial import check_init_fn
from jaxinf.streaming.program.meshes import mesh_text
from jaxinf.streaming.program.trace import Traced, abstract, check_params
from jaxinf.streaming.step import TrainingStep
from jaxinf.streaming.update.micro_batches import first_part
from jaxinf.streaming.update.optax_sink import OptaxSink
from jaxinf.typing import PathLikeStr, PyTree


class MemoryEnds(Ends):
    """Memory as params source and gradient sink.

    Args:
      folder: On a drive, for values.
    """

    def __init__(
        self, sink: OptaxSink, tx: Any, traced: Traced, options: Options, folder: Any
    ) -> None:
        super().__init__(options)
        self._sink, self._folder = sink, folder
        self._params_bytes = sum(map(aval_bytes, traced.params))
        params = traced.params_tree.unflatten(traced.params)
        state = jax.tree.leaves(jax.eval_shape(tx.init, params))
        # Params, gradients and the state.
        self.held_bytes = 2 * self._params_bytes + sum(map(aval_bytes, state))

    def scratch(self, content: str) -> Scratch:
        return Scratch([self._folder], content=content)

    def divided(self, ready: Prepared, budgets: Mapping[str, int]) -> Division:
        limit = self.options.limit_within(budgets)
        return divide_rest(budgets["memory_bytes"], limit)

    def check_held(self, division: Division) -> None:
        if self.held_bytes > division.programs:
            raise BudgetError(
                division.limit,
                "expected room for params, gradients and optax's state, "
                f"{self.held_bytes} bytes, found {division.programs}",
                self.held_bytes - division.programs + 1,
                ", or give a store, which keeps the state on drives",
            )

    def staying(self, plan: Plan) -> Plan:
        pieces = {piece for call in plan.calls for piece in call.reads}
        # A part of a leaf is copied for its calls.
        whole = frozenset(p for p in pieces if not p.index and not p.rows)
        return plan.varied(resident=whole, resident_bytes=self._params_bytes)

    def sink(self, fitted: Fitted) -> OptaxSink:
        return self._sink

    def source(self, fitted: Fitted) -> MemoryParams:
        return MemoryParams(lambda: jax.tree.leaves(self._sink.params))


class InMemoryStep(TrainingStep):
    """Made by `jaxinf.stream_in_memory`; also a context manager. Not thread-safe.

    ``loss, aux = step(batch)`` runs one step; aux is None without `has_aux`. Params
    come by `load` or `init`, and leave by `params`.

    Args:
      loss_fn: The loss function.
      tx: Any optax optimizer.
      options: Memory, policy and so on.
      scratch: A folder on a drive for values of ``"offload"``.
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        tx: optax.GradientTransformation,
        options: Options,
        scratch: PathLikeStr,
    ) -> None:
        super().__init__(options)
        self._loss_fn = loss_fn
        self._scratch = scratch
        self._tx = tx
        self._sink = OptaxSink(
            tx, options.nonfinite, is_deterministic=options.deterministic
        )

    def init(
        self, init_fn: Callable[..., PyTree], *args: Any, batch: PyTree = None
    ) -> None:
        """Makes params with jitted `init_fn`, and the optimizer's first state.

        Args:
          init_fn: ``init_fn(*args)`` returns the params.
          args: Its arguments, such as a random key.
          batch: Not needed; as with a store, a loss function that no plan can fit in
            memory is refused before params are made.

        Raises:
          StreamError: `init_fn` is not a function, or the loss function cannot be
            streamed.
        """
        check_init_fn(init_fn)
        self._check(jax.eval_shape(init_fn, *args), batch)
        self._sink.load(jax.jit(init_fn)(*args), None)
        if batch is not None:
            self.compile(batch)

    def load(
        self, params: PyTree, *, state: PyTree = None, batch: PyTree = None
    ) -> None:
        """Copies params, and the optimizer's state if there is one.

        Args:
          params: Tree of arrays.
          state: From `state`, or from ``tx.init``; by default the first one.
          batch: As for `init`.

        Raises:
          StreamError: A leaf is not an array of floating-point numbers, or the loss
            function cannot be streamed.
        """
        self._check(params, batch)
        own = partial(jax.tree.map, lambda leaf: jnp.array(leaf, copy=True))
        self._sink.load(own(params), None if state is None else own(state))
        if batch is not None:
            self.compile(batch)

    def params(self, like: PyTree = None) -> PyTree:
        """Returns the params, which later steps leave alone.

        Args:
          like: Tree of arrays, or of shapes and dtypes, that gives each leaf its dtype
            and sharding; by default they are those of the params.

        Raises:
          ValueError: `like` has other leaves or shapes than the params.
        """
        self._turns.settle()
        params = self._sink.lend()[0]
        return params if like is None else _formed(params, like)

    def state(self) -> PyTree:
        """Returns optax's state, which later steps leave alone."""
        self._turns.settle()
        return self._sink.lend()[1]

    def __call__(self, batch: PyTree) -> tuple[jax.Array, PyTree]:
        """Runs one step.

        Returns:
          The loss, and aux; None without `has_aux`.

        Raises:
          NonFiniteGradientError: The step was refused.
        """
        return self._call(batch, None)

    def close(self) -> None:
        """Frees memory and files; idempotent. The params stay available."""
        self._close_bound()
        self._bound.clear()

    # --- inside --------------------------------------------------------------------

    def _check(self, params: PyTree, batch: PyTree) -> None:
        check_params(params)
        if batch is not None:
            ready = self._traced(abstract(params), batch)
            within(self._options, partial(self._ends(ready).fitted, ready))

    def _prepare(self, batch: PyTree) -> Prepared:
        return self._traced(abstract(self._sink.params), batch)

    def _traced(self, params: PyTree, batch: PyTree) -> Prepared:
        part = first_part(batch, self._options.micro_batches)
        ready = prepare(
            self._loss_fn,
            params,
            part,
            has_aux=self._options.has_aux,
            num_parts=self._options.micro_batches,
            is_deterministic=self._options.deterministic,
        )
        if ready.traced.mesh is not None:
            raise StreamError(
                "jaxinf.stream: expected arrays on one device, found "
                f"{mesh_text(ready.traced.mesh)}, which streaming does not use without "
                "a store yet; give a store, or put all arrays on one device "
                "(jax.device_put(x, jax.devices()[0]))"
            )
        return ready

    def _dry(
        self, batch: PyTree, params: PyTree, options: Options, like: Count | None
    ) -> Count:
        params = abstract(self._sink.params) if params is None else params
        ready = self._traced(params, batch)
        return count(self._ends(ready, options), ready)

    def _ends(self, ready: Prepared, options: Options | None = None) -> MemoryEnds:
        options = options or self._options
        what = self._sink, self._tx, ready.traced
        return MemoryEnds(*what, options, self._scratch)


def _formed(params: PyTree, like: PyTree) -> PyTree:
    """Returns params with the dtypes and shardings of a tree of the same shapes."""
    held, asked = (jax.tree.map(jnp.shape, tree) for tree in (params, like))
    if held != asked:
        raise ValueError(f"like: expected the shapes {held}, found {asked}")
    return jax.tree.map(
        lambda x, to: jax.device_put(x.astype(to.dtype), getattr(to, "sharding", None)),
        params,
        like,
    )
