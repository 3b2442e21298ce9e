"""Where the optimizer's state is: on drives (`OnStore`) or in memory (`InMemory`).

Invariant: both have the same few operations, so one training step and one loop serve
  both; `InMemory` is plain optax and nothing else.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax

from jaxinf.compress import sparsify
from jaxinf.engine import Store, open_store
from jaxinf.errors import NonFiniteGradientError, StoreMismatchError
from jaxinf.io import ByteCounts
from jaxinf.optimizer import SmartUpdateState, smart_update
from jaxinf.train.config import TrainConfig, UsageError
from jaxinf.train.optimizers import make_clipping
from jaxinf.train.pretrained import (
    describe_architecture,
    held_params,
    is_deferred,
)
from jaxinf.typing import JsonValue, PyTree

__all__ = ["Backend", "InMemory", "OnStore", "open_backend"]

Costs = Callable[[], dict[str, Any]]
"""Blocks until a step is durable, then returns the fields of its `StepLine` that only
the store knows."""

_NO_TRAFFIC: dict[str, Any] = {f.name: 0 for f in dataclasses.fields(ByteCounts)}


class Backend(Protocol):
    """The operations that the loop needs. Used from one thread."""

    tx: optax.GradientTransformation

    def committed(self) -> JsonValue:
        """The position in the data to resume at, or None for a new run."""
        ...

    def init(
        self,
        new_params: Callable[[], PyTree],
        like: PyTree,
        first: Mapping[str, JsonValue],
    ) -> tuple[Any, Any]:
        """Returns params and optimizer state, of the resumed run or new ones.

        Args:
          new_params: makes new params; their leaves may be deferred.
          like: shapes and dtypes of the params.
          first: the payload for the commit of a new store's step 0.
        """
        ...

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

    def checkpoint_steps(self) -> dict[str, int]:
        """The names of all checkpoints, with the commit that each keeps."""
        ...

    def committed_step(self, state: Any) -> int:
        """The number of a state's commit."""
        ...

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


def open_backend(
    config: TrainConfig, optimizer: optax.GradientTransformation
) -> "OnStore | InMemory":
    """Makes the backend of the config's mode; opens the store without writing to it.

    Raises:
      UsageError: an argument of the store is out of range.
      JaxinfError: as `jaxinf.open_store`.
    """
    if config.mode == "memory":
        return InMemory(config, optimizer)
    assert config.store is not None
    try:
        store = open_store(
            config.store,
            csds=config.csd_root,
            csd=config.csd,
            memory_bytes=config.memory_bytes,
            durability=config.durability,
            verify=config.verify,
            restore=config.restore,
            master=config.master,
            state=config.state,
        )
    except (ValueError, NotADirectoryError) as error:
        raise UsageError(str(error)) from error
    return OnStore(store, _smart(config, optimizer, store))


def _smart(
    config: TrainConfig, optimizer: optax.GradientTransformation, store: Store
) -> optax.GradientTransformationExtraArgs:
    """Makes `smart_update`, behind clipping if gradients are compressed.

    Raises:
      UsageError: the store does not support this compression.
    """
    compression = config.compression
    try:
        tx = smart_update(
            optimizer, store, compress=compression, nonfinite=config.nonfinite
        )
    except ValueError as error:
        store.close()
        raise UsageError(f"--compress {config.compress}: {error}") from error
    if compression is None:
        return tx
    clipping = make_clipping(config)

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, Any]:
        clipped, _ = clipping.update(updates, optax.EmptyState(), params)
        return tx.update(clipped, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(tx.init, update)


class OnStore:
    """Optimizer state in a store; each step is a commit."""

    def __init__(self, store: Store, tx: optax.GradientTransformationExtraArgs) -> None:
        self.store = store
        self.tx: optax.GradientTransformation = tx

    def committed(self) -> JsonValue:
        """See `Backend`."""
        if self.store.step == 0:
            return None
        return self.store.payload or {}

    def init(
        self,
        new_params: Callable[[], PyTree],
        like: PyTree,
        first: Mapping[str, JsonValue],
    ) -> tuple[Any, Any]:
        """See `Backend`."""
        if self.store.exists and self.store.step > 0:
            params = self.store.params(like=like)
            return params, self.tx.init(params)
        params = new_params()
        state = self.begin(params, first)
        return self.store.params(like=like) if is_deferred(params) else params, state

    def begin(self, params: PyTree, first: Mapping[str, JsonValue]) -> SmartUpdateState:
        """Makes the store of new params, or compares them with those of its step 0."""
        if not self.store.exists:
            self.store.annotate(0, first)
        else:
            self._check_model(first["architecture"])
        state = self.tx.init(params)
        assert isinstance(state, SmartUpdateState)
        return state

    def _check_model(self, ours: JsonValue) -> None:
        """Refuses another model than a store of step 0 was made with."""
        held = self.store.payload
        theirs = held.get("architecture") if isinstance(held, Mapping) else None
        if theirs in (None, ours):
            return
        raise StoreMismatchError(
            f"{self.store.path}: the store was made with "
            f"{describe_architecture(theirs)}, this command has "
            f"{describe_architecture(ours)}; give the --from, or the --model, "
            "--preset and --task, that made it, or another --store"
        )

    def announce(
        self, state: SmartUpdateState, position: Mapping[str, JsonValue]
    ) -> None:
        """See `Backend`."""
        self.store.annotate(int(state.step) + 1, position)

    def costs(self, state: SmartUpdateState, *, is_skipped: bool) -> Costs:
        """See `Backend`."""
        if is_skipped:
            return lambda: _NO_TRAFFIC
        step = int(state.step)
        return lambda: self._costs_of(step)

    def _costs_of(self, step: int) -> dict[str, Any]:
        metrics = self.store.metrics_of(step)
        if metrics is None:
            return {}
        return {"update_s": metrics.update_s, **dataclasses.asdict(metrics.traffic)}

    def num_skipped(self, state: SmartUpdateState) -> int:
        """See `Backend`."""
        return int(state.skipped_steps)

    def checkpoint(
        self, state: SmartUpdateState, *, keep_last: int, keep_every: int
    ) -> str | None:
        """See `Backend`."""
        name = str(int(state.step))
        self.store.wait(state)
        held = next((c for c in self.store.checkpoints() if c.name == name), None)
        if held is not None:
            if held.committed_at == self.store.committed_at:
                return None
            self.store.remove_checkpoint(name)  # of steps given up by a restore
        self.store.checkpoint(name, state=state)
        self.store.prune_checkpoints(keep_last=keep_last, keep_every=keep_every)
        return name

    def checkpoint_steps(self) -> dict[str, int]:
        """See `Backend`."""
        if not self.store.exists:
            return {}
        return {held.name: held.step for held in self.store.checkpoints()}

    def committed_step(self, state: SmartUpdateState) -> int:
        """See `Backend`."""
        return int(state.step)

    def replace_checkpoint(self, state: SmartUpdateState, name: str) -> bool:
        """See `Backend`."""
        self.store.wait(state)
        if name in self.checkpoint_steps():
            self.store.remove_checkpoint(name)
        self.store.checkpoint(name, state=state)
        return True

    def raise_failure(self) -> None:
        """See `Backend`."""
        self.store.check()

    def close(self) -> None:
        """See `Backend`."""
        self.store.close()


class _WatchState(NamedTuple):
    """State of `_watch`."""

    num_nonfinite: jax.Array
    inner: Any


class InMemory:
    """Plain optax, which treats non-finite gradients like `smart_update`."""

    def __init__(
        self, config: TrainConfig, optimizer: optax.GradientTransformation
    ) -> None:
        self._is_error = config.nonfinite == "error"
        if config.compression is not None:
            sparse = sparsify(config.compression)
            optimizer = optax.chain(make_clipping(config), sparse, optimizer)
        self.tx = _watch(optimizer) if self._is_error else _skip(optimizer)

    def committed(self) -> JsonValue:
        """See `Backend`: always None."""
        return None

    def init(
        self,
        new_params: Callable[[], PyTree],
        like: PyTree,
        first: Mapping[str, JsonValue],
    ) -> tuple[Any, Any]:
        """See `Backend`."""
        params = new_params()
        params = held_params(params) if is_deferred(params) else params
        return params, jax.jit(self.tx.init)(params)

    def announce(self, state: Any, position: Mapping[str, JsonValue]) -> None:
        """See `Backend`: does nothing."""

    def costs(self, state: Any, *, is_skipped: bool) -> Costs:
        """See `Backend`: no traffic."""
        return lambda: _NO_TRAFFIC

    def num_skipped(self, state: Any) -> int:
        """See `Backend`."""
        if not self._is_error:
            return int(state.total_notfinite)
        if int(state.num_nonfinite):
            raise NonFiniteGradientError(
                "NaN or Inf in a gradient: the run ends before it reaches the params. "
                "Lower the learning rate or clip the gradients, or give --nonfinite "
                "skip to go on without such batches"
            )
        return 0

    def checkpoint(self, state: Any, *, keep_last: int, keep_every: int) -> str | None:
        """See `Backend`: keeps none."""

    def checkpoint_steps(self) -> dict[str, int]:
        """See `Backend`: none."""
        return {}

    def committed_step(self, state: Any) -> int:
        """See `Backend`: there are no commits."""
        return 0

    def replace_checkpoint(self, state: Any, name: str) -> bool:
        """See `Backend`: keeps none."""
        return False

    def raise_failure(self) -> None:
        """See `Backend`: does nothing."""

    def close(self) -> None:
        """See `Backend`."""


def _watch(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """Wraps `tx` to count non-finite gradients; the update stays that of `tx`."""

    def init(params: PyTree) -> _WatchState:
        return _WatchState(jnp.int32(0), tx.init(params))

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None
    ) -> tuple[PyTree, _WatchState]:
        finite = [jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(updates)]
        num_nonfinite = state.num_nonfinite + ~jnp.all(jnp.stack(finite))
        updates, inner = tx.update(updates, state.inner, params)
        return updates, _WatchState(num_nonfinite, inner)

    return optax.GradientTransformation(init, update)


_skip = functools.partial(optax.apply_if_finite, max_consecutive_errors=2**31 - 1)
