"""The arguments of `smart_update`, for `init` and `update`.

Invariant: nothing here changes; the store keeps the data that `init` gets from a run.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding

from jaxinf.compress import TopK
from jaxinf.engine import (
    Store,
    StoreDescription,
    check_compressed,
    check_processes,
    describe,
    gradient_forms,
    keeps_feedback,
    shard_counts,
    shard_holders,
)
from jaxinf.optimizer.host_init import OnExisting
from jaxinf.optimizer.host_side import HostSide
from jaxinf.program import (
    Average,
    InitProgram,
    UpdateProgram,
    missing_arguments,
    trace_init,
    trace_update,
)
from jaxinf.typing import PyTree

UpdateDtype: TypeAlias = Literal["gradient", "float32"]
"""The dtype of updates of 16-bit params; see `jaxinf.smart_update`."""


@dataclass(frozen=True, eq=False)
class Wrapped:
    """An optimizer and the store of its state.

    Attributes:
      compression: compression of its gradients; None for dense ones.
      given_shardings: shardings of the params' leaves from the caller; may be empty.
      example_args: examples of other arguments of the optimizer's update.
      on_existing: the action of `init` on a store that has steps.
      updates: the dtype of updates of 16-bit params.
    """

    tx: optax.GradientTransformationExtraArgs
    host: HostSide
    compression: TopK | None
    given_shardings: tuple[NamedSharding, ...]
    example_args: Mapping[str, Any]
    on_existing: OnExisting = "resume"
    updates: UpdateDtype = "gradient"
    average: Average | None = None

    @property
    def store(self) -> Store:
        return self.host.store

    @property
    def has_feedback(self) -> bool:
        return keeps_feedback(self.compression)

    @property
    def shardings(self) -> tuple[NamedSharding, ...]:
        """Shardings of the params' leaves, on one mesh; empty if they are not known.

        They are the caller's, or those of the params in the last `init` on the store.
        """
        return self.given_shardings or self.store._training.shardings

    def update_dtype(
        self, gradient: jax.Array | None, params: jax.Array | None
    ) -> np.dtype:
        """Returns the dtype of a leaf's update, if its params are of 16 bits."""
        if self.updates == "float32" or gradient is None or params is None:
            return np.dtype(np.float32)
        is_own = gradient.dtype == params.dtype
        return gradient.dtype if is_own else np.dtype(np.float32)

    def check(self) -> None:
        """Raises the exception that stopped the store, if any."""
        if self.store._training.failure is not None:
            self.store._training.tell()

    def trace(
        self, params: PyTree, extra_args: Mapping[str, Any]
    ) -> tuple[InitProgram, UpdateProgram]:
        """Traces the optimizer and divides it between JAX and the store.

        Raises:
          UnsupportedTransformError: it cannot be divided.
          TypeError: its update needs arguments that are not given.
        """
        try:
            update = trace_update(self.tx, params, extra_args, may_recall=True)
        except TypeError as error:
            names = missing_arguments(error)
            if not names:
                raise
            examples = ", ".join(f'"{name}": 0.0' for name in names)
            raise TypeError(
                f"smart_update: the optimizer's update needs {', '.join(names)} ("
                f"{error}). Give an example to smart_update(tx, store, "
                f"extra_args={{{examples}}}), and its value to each update: tx.update("
                f"grads, state, params, {', '.join(f'{name}=…' for name in names)})"
            ) from None
        check_compressed(self.compression, update)
        self.host.settle(update)
        return trace_init(self.tx, params), update

    def describe(
        self,
        init: InitProgram,
        update: UpdateProgram,
        shardings: tuple[NamedSharding, ...],
    ) -> StoreDescription:
        """Describes the store that the optimizer needs."""
        counts = [
            shard_counts(shardings[number] if shardings else None, leaf.info.shape)
            for number, leaf in enumerate(update.leaves)
        ]
        holders: list[tuple[tuple[int, ...], ...]] = []
        if not self.store._training.members.is_alone:
            mesh = shardings[0].mesh if shardings else None
            check_processes(self.store._training.members, mesh)
            holders = [
                shard_holders(shardings[number], leaf.info.shape)
                for number, leaf in enumerate(update.leaves)
            ]
        return describe(
            update,
            init,
            counts,
            holders=holders,
            average=self.average,
            has_feedback=self.has_feedback,
            forms=partial(gradient_forms, self.compression),
        )

    def structure_of_feedback(self, params: PyTree) -> Any:
        """The tree of the state's error feedback."""
        return jax.tree.structure(params if self.has_feedback else ())
