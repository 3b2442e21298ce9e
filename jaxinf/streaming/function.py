"""Functions of a store's params without a gradient: evaluation, generation.

    batch ─► programs, one after another ─► results
              ▲ params read ahead
              └──────── store

Invariant: a call reads one finished step of the store, and writes nothing.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxinf.engine import Store, check_like, engine_of
from jaxinf.errors import StreamError
from jaxinf.streaming.plan.fit import Prepared, prepare_function
from jaxinf.streaming.plan.options import StepOptions
from jaxinf.streaming.program.trace import abstract, check_params
from jaxinf.streaming.step import Step
from jaxinf.streaming.update.sink import NoGradients
from jaxinf.typing import PyTree


class StreamedFunction(Step):
    """Made by `jaxinf.stream_function`; also a context manager. Not thread-safe.

    ``f(batch)`` returns the outputs of ``fn(params, batch)`` for the params of the
    store's last finished step. No step may run meanwhile.

    Args:
      fn: The function.
      store: The store.
      options: Memory.
      closes: Whether `close` closes the store.
      average: Whether its params are the store's average.

    Attributes:
      store: The store.
    """

    _named = "a function"

    def __init__(
        self,
        fn: Callable[..., Any],
        store: Store,
        options: StepOptions,
        *,
        closes: bool = False,
        average: bool = False,
    ) -> None:
        super().__init__(options)
        self.store = store
        self._fn, self._closes, self._average = fn, closes, average
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
        check_like(engine_of(self.store).opened, params)
        self._params = abstract(params)

    def __call__(self, batch: PyTree) -> PyTree:
        """Returns the function's outputs; blocks until its last program is under way.

        Raises:
          BaseException: The exception that stopped the store.
        """
        return self._call(batch)[1]

    def params(self, like: PyTree = None) -> PyTree:
        """Returns the params that the next call reads; blocks until they are read.

        Args:
          like: Tree of arrays, or of shapes and dtypes, that gives each leaf its dtype
            and sharding; by default that of `load`, or nested dicts.

        Raises:
          StoreMismatchError: `like` is another tree than the store's.
          BaseException: The exception that stopped the store.
        """
        self._thread.settle()
        like = self._tree() if like is None else like
        return self.store.params(like, average=self._average)

    def __exit__(self, *error: Any) -> None:
        try:
            super().__exit__(*error)
        finally:
            if self._closes:
                self.store.close()

    # --- what configures it --------------------------------------------------------

    def _trace(self, batch: PyTree, params: PyTree = None) -> Prepared:
        bits = {"is_deterministic": self._options.deterministic}
        return prepare_function(self._fn, self._tree(), batch, **bits)

    def _sink(self, ready: Prepared, options: StepOptions) -> NoGradients:
        return NoGradients(self.store, ready, options, average=self._average)

    def _join(self) -> None:
        if self._average:
            engine_of(self.store).wait()  # a commit writes all of it to the drive
        else:
            engine_of(self.store).join()

    def _tree(self) -> PyTree:
        """Returns the params' shapes and dtypes, by default in nested dicts.

        Raises:
          StreamError: They are in another tree.
        """
        if self._params is not None:
            return self._params
        tree: Any = {}
        leaves = engine_of(self.store).directory.manifest.leaves
        for leaf in leaves:
            inner, keys = tree, ("", *leaf.path)
            for key in keys[:-1]:
                inner = inner.setdefault(key, {})
            inner[keys[-1]] = jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(leaf.dtype))
        tree = tree[""]
        paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
        if [tuple(key.key for key in path) for path in paths] != [
            leaf.path for leaf in leaves
        ]:
            raise StreamError(
                f"{self.store.path}: its params are no nested dicts; tell their tree "
                "first: f.load(params), of which only shapes and dtypes count"
            )
        self._params = tree
        return tree
