"""A streamed step without a store: params and optax's state are in memory.

    batch ─► programs, one after another ─► gradients ─► optax's update
              values that backward needs may wait on a drive

Invariant: updates have the bits of jitted optax on the same gradients. A step that ends
  early leaves params and state as they were.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxinf.errors import StreamError
from jaxinf.streaming.plan.fit import Prepared
from jaxinf.streaming.plan.options import StepOptions
from jaxinf.streaming.planning import plan_step
from jaxinf.streaming.program.initial import check_init_fn
from jaxinf.streaming.program.meshes import mesh_text
from jaxinf.streaming.program.trace import abstract, check_params
from jaxinf.streaming.step import Step
from jaxinf.streaming.update.optax_sink import OptaxSink
from jaxinf.typing import PathLikeStr, PyTree


class InMemoryStep(Step):
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
        options: StepOptions,
        scratch: PathLikeStr,
    ) -> None:
        super().__init__(options)
        self._loss_fn = loss_fn
        self._trained = OptaxSink(tx, options, scratch)

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
        self._trained.load(jax.jit(init_fn)(*args), None)
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
        self._trained.load(own(params), None if state is None else own(state))
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
        self._thread.settle()
        params = self._trained.lend()[0]
        return params if like is None else _formed(params, like)

    def state(self) -> PyTree:
        """Returns optax's state, which later steps leave alone."""
        self._thread.settle()
        return self._trained.lend()[1]

    @property
    def num_skipped(self) -> int:
        """Number of steps skipped for a non-finite gradient, with ``"skip"``."""
        return self._num_skipped

    def __call__(self, batch: PyTree) -> tuple[jax.Array, PyTree]:
        """Runs one step.

        Returns:
          The loss, and aux; None without `has_aux`.

        Raises:
          NonFiniteGradientError: The step was refused.
        """
        return self._call(batch)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._bound.clear()  # params stay, and another step makes room anew

    # --- what configures it --------------------------------------------------------

    def _check(self, params: PyTree, batch: PyTree) -> None:
        check_params(params)
        if batch is not None:
            plan_step(self._trained, self._trace(batch, abstract(params)))

    def _trace(self, batch: PyTree, params: PyTree = None) -> Prepared:
        if params is None:
            params = abstract(self._trained.params)
        ready = self._prepared(self._loss_fn, params, batch)
        if ready.traced.mesh is not None:
            raise StreamError(
                "jaxinf.stream: expected arrays on one device, found "
                f"{mesh_text(ready.traced.mesh)}, which streaming does not use without "
                "a store; give a store, or put all arrays on one device "
                "(jax.device_put(x, jax.devices()[0]))"
            )
        return ready

    def _sink(self, ready: Prepared, options: StepOptions) -> OptaxSink:
        is_own = options is self._options
        return self._trained if is_own else self._trained.like(options)


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
