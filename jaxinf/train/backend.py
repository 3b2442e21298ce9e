"""The operations that the training loop needs of a mode.

    OnStore   the optimizer's state is in a store
    Streamed  params, too: they never exist as a whole
    InMemory  plain optax, and nothing else

Invariant: all have the same few operations, so one loop serves them.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from jaxinf.io import ByteCounts
from jaxinf.train.data.loader import Batch
from jaxinf.train.step import TrainStep
from jaxinf.typing import JsonValue, PyTree

Costs = Callable[[], dict[str, Any]]
"""Blocks until a step is durable, then returns the fields of its `StepLine` that only
the store knows."""

NO_TRAFFIC: dict[str, Any] = {f.name: 0 for f in dataclasses.fields(ByteCounts)}


class Backend(Protocol):
    """The operations that the loop needs. Used from one thread.

    Attributes:
      needs_all: whether a function of the params runs in all processes together.
    """

    needs_all: bool

    def committed(self) -> JsonValue:
        """The position in the data to resume at, or None for a new run."""
        ...

    def init(
        self,
        new_params: Callable[[], PyTree],
        like: PyTree,
        first: Mapping[str, JsonValue],
        batch: Batch,
    ) -> tuple[Any, Any]:
        """Returns params and optimizer state, of the resumed run or new ones.

        Args:
          new_params: makes new params, on one device; their leaves may be deferred.
          like: shapes and dtypes of the params, and their shardings if on a mesh.
          first: the payload for the commit of a new store's step 0.
          batch: any batch; only its shapes count.

        Returns:
          Both None if neither is ever in memory as a whole.
        """
        ...

    def compile_step(
        self, graphdef: Any, params: PyTree, state: Any, batch: Batch
    ) -> TrainStep:
        """Compiles the training step; only the arguments' shapes count."""
        ...

    def function(
        self, fn: Callable[[PyTree, Any], Any], *, average: bool = False
    ) -> Callable[[PyTree, Any], Any]:
        """Returns ``fn(params, batch)`` to be called with the params of the loop.

        Args:
          fn: returns any pytree; it is traced, and has no side effects.
          average: whether it is called with `average` of them instead.
        """
        ...

    def average(self, params: PyTree, state: Any) -> PyTree: ...

    def announce(self, state: Any, position: Mapping[str, JsonValue]) -> None:
        """Sets the payload of the next commit: its position in the data."""
        ...

    def costs(self, state: Any, *, is_skipped: bool) -> Costs:
        """Called after each step (and after `announce` of the next one)."""
        ...

    def num_skipped(self, state: Any) -> int:
        """Number of batches skipped for a non-finite gradient; may raise instead."""
        ...

    def checkpoint(self, state: Any, *, keep_last: int, keep_every: int) -> str | None:
        """Keeps the step of a state, and removes checkpoints according to the policy.

        Returns:
          The checkpoint's name; None if that step is kept already.
        """
        ...

    def checkpoint_steps(self) -> dict[str, int]: ...

    def committed_step(self, state: Any) -> int: ...

    def replace_checkpoint(self, state: Any, name: str) -> bool:
        """Keeps the step of a state under a name, in place of the old checkpoint.

        Returns:
          Whether the step was kept; a backend in memory keeps none.
        """
        ...

    def raise_failure(self) -> None:
        """Raises the exception that stopped the store, without JAX's wrapping."""
        ...

    def close(self) -> None:
        """Finishes work in flight and releases all resources."""
        ...
