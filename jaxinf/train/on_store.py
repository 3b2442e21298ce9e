"""Training with the optimizer's state in a store; each step is a commit.

Invariant: a new run's params are compared with a store's before its first step.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import optax

from jaxinf.command_line import UsageError
from jaxinf.engine import Store
from jaxinf.errors import StoreMismatchError
from jaxinf.exchange import keep_tokenizer, tokenizer_files
from jaxinf.optimizer import SmartUpdateState, smart_update
from jaxinf.store import required_bytes
from jaxinf.train.config import TrainConfig
from jaxinf.train.data.loader import Batch
from jaxinf.train.metrics import NO_TRAFFIC, Costs
from jaxinf.train.optimizers import behind_clipping
from jaxinf.train.pretrained import describe_architecture, is_deferred
from jaxinf.train.processes import placed
from jaxinf.train.step import TrainStep, compile_train_step
from jaxinf.typing import JsonValue, PyTree


@contextlib.contextmanager
def refused_as_usage() -> Iterator[None]:
    """Makes an argument that the store refuses when it is made an error of usage."""
    try:
        yield
    except ValueError as error:
        raise UsageError(str(error)) from error


class KeptInStore:
    """A backend whose run is kept in a store."""

    def __init__(self, config: TrainConfig, store: Store) -> None:
        self._config = config
        self.store = store

    @contextlib.contextmanager
    def _beginning(self, first: Mapping[str, JsonValue]) -> Iterator[None]:
        """Annotates a new store, which the body makes, and keeps its tokenizer there.

        Raises:
          StoreMismatchError: another model than a store of step 0 was made with.
        """
        tokenizer, weights = self._config.tokenizer, self._config.source
        files = tokenizer_files(
            tokenizer=tokenizer and tokenizer.expanduser(),
            weights=weights and weights.expanduser(),
        )
        held = self.store.payload if self.store.exists else None
        theirs = held.get("architecture") if isinstance(held, Mapping) else None
        ours = first["architecture"]
        if not self.store.exists:
            self.store.annotate(0, first)
        elif theirs not in (None, ours):
            raise StoreMismatchError(
                f"{self.store.path}: the store was made with "
                f"{describe_architecture(theirs)}, this command has "
                f"{describe_architecture(ours)}; give the --from, the --model-config, "
                "or the --model, --preset, --task and --lora that made it, or another "
                "--store"
            )
        with refused_as_usage():
            yield
        keep_tokenizer(self.store.path, files)

    def _costs_of(self, step: int) -> dict[str, Any]:
        metrics = self.store.metrics_of(step)
        if metrics is None:
            return {}
        return {
            "update_s": metrics.update_s,
            "commit_s": metrics.commit_s if metrics.is_committed else None,
            **dataclasses.asdict(metrics.traffic),
            "memory": {
                "buffers": self.store.peak_memory_bytes,
                "drives": self._drive_bytes,
            },
        }

    @functools.cached_property
    def _drive_bytes(self) -> int:
        return sum(required_bytes(self.store._training.opened.directory).values())

    def close(self) -> None:
        """Finishes work in flight and releases all resources."""
        self.store.close()


class OnStore(KeptInStore):
    """Only the optimizer's state is in the store; params are in memory, too."""

    needs_all = False

    def __init__(
        self,
        config: TrainConfig,
        store: Store,
        optimizer: optax.GradientTransformation,
    ) -> None:
        super().__init__(config, store)
        tx = smart_update(
            optimizer,
            store,
            average=config.average,
            compress=config.compression,
            nonfinite=config.nonfinite,
            updates="float32",  # a resumed run has the params of the store
        )
        self._tx = tx if config.compress is None else behind_clipping(config, tx)

    def init(
        self,
        new_params: Callable[[], PyTree],
        like: PyTree,
        first: Mapping[str, JsonValue],
        batch: Batch,
    ) -> tuple[Any, Any]:
        if self.store.exists and self.store.step > 0:
            params = self.store.params(like=like)
            return params, self._tx.init(params)
        params = placed(new_params(), like)
        state = self.begin(params, first)
        return self.store.params(like=like) if is_deferred(params) else params, state

    def begin(self, params: PyTree, first: Mapping[str, JsonValue]) -> SmartUpdateState:
        """Makes the store of new params, or compares them with those of its step 0."""
        with self._beginning(first):
            state = self._tx.init(params)
        assert isinstance(state, SmartUpdateState)
        return state

    def compile_step(self, graphdef: Any, *example: Any) -> TrainStep:
        # With clipping, updates wait for all gradients in any case, so a separate jit
        # costs almost nothing. Compression needs finished gradients, too.
        needs_all = self._config.clip_norm or self._config.compress
        boundaries = "halves" if needs_all else "fused"
        return compile_train_step(
            self._config, graphdef, self._tx, boundaries, *example
        )

    def function(
        self, fn: Callable[[PyTree, Any], Any], *, average: bool = False
    ) -> Callable[[PyTree, Any], Any]:
        return jax.jit(fn)

    def average(self, params: PyTree, state: Any) -> PyTree:
        return self.store.params(params, state=state, average=True)

    def costs(self, state: SmartUpdateState, *, is_skipped: bool) -> Costs:
        if is_skipped:
            return lambda: NO_TRAFFIC
        step = self.committed_step(state)
        return lambda: self._costs_of(step)

    def num_skipped(self, state: SmartUpdateState) -> int:
        return int(state.skipped_steps)

    def committed_step(self, state: SmartUpdateState) -> int:
        return int(state.step)
