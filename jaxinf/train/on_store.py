"""Training with the optimizer's state in a store; each step is a commit.

Invariant: a new run's params are compared with a store's before its first step.
"""

import abc
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
from jaxinf.optimizer import SmartUpdateState
from jaxinf.store import required_bytes
from jaxinf.train.backend import NO_TRAFFIC, Costs
from jaxinf.train.config import TrainConfig
from jaxinf.train.data.loader import Batch
from jaxinf.train.pretrained import describe_architecture, is_deferred
from jaxinf.train.processes import placed
from jaxinf.train.step import Boundaries, TrainStep, compile_train_step
from jaxinf.typing import JsonValue, PyTree


@contextlib.contextmanager
def refused_as_usage() -> Iterator[None]:
    """Makes an argument that the store refuses when it is made an error of usage."""
    try:
        yield
    except ValueError as error:
        raise UsageError(str(error)) from error


class KeptInStore(abc.ABC):
    """A backend whose run is kept in a store."""

    needs_all = False

    def __init__(self, config: TrainConfig, store: Store) -> None:
        self._config = config
        self.store = store

    def committed(self) -> JsonValue:
        if self.store.step == 0:
            return None
        return self.store.payload or {}

    @abc.abstractmethod
    def committed_step(self, state: Any) -> int:
        """See `Backend`."""

    def _note_new(self, first: Mapping[str, JsonValue]) -> None:
        """Annotates a new store; compares the model with that of an existing one."""
        if not self.store.exists:
            self.store.annotate(0, first)
        else:
            self._check_model(first["architecture"])

    def _check_model(self, ours: JsonValue) -> None:
        """Refuses another model than a store of step 0 was made with."""
        held = self.store.payload
        theirs = held.get("architecture") if isinstance(held, Mapping) else None
        if theirs in (None, ours):
            return
        raise StoreMismatchError(
            f"{self.store.path}: the store was made with "
            f"{describe_architecture(theirs)}, this command has "
            f"{describe_architecture(ours)}; give the --from, the "
            "--model-config, or the --model, --preset, --task and --lora that made it, "
            "or another --store"
        )

    def _tokenizer_files(self) -> dict[str, bytes]:
        tokenizer, weights = self._config.tokenizer, self._config.source
        return tokenizer_files(
            tokenizer=tokenizer and tokenizer.expanduser(),
            weights=weights and weights.expanduser(),
        )

    def announce(self, state: Any, position: Mapping[str, JsonValue]) -> None:
        self.store.annotate(self.committed_step(state) + 1, position)

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

    def checkpoint(self, state: Any, *, keep_last: int, keep_every: int) -> str | None:
        name = str(self.committed_step(state))
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
        if not self.store.exists:
            return {}
        return {held.name: held.step for held in self.store.checkpoints()}

    def replace_checkpoint(self, state: Any, name: str) -> bool:
        self.store.wait(state)
        if name in self.checkpoint_steps():
            self.store.remove_checkpoint(name)
        self.store.checkpoint(name, state=state)
        return True

    def raise_failure(self) -> None:
        self.store.check()

    def close(self) -> None:
        """See `Backend`."""
        self.store.close()


class OnStore(KeptInStore):
    """Only the optimizer's state is in the store; params are in memory, too."""

    def __init__(
        self,
        config: TrainConfig,
        store: Store,
        tx: optax.GradientTransformationExtraArgs,
    ) -> None:
        super().__init__(config, store)
        self._tx = tx

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
        files = self._tokenizer_files()
        self._note_new(first)
        with refused_as_usage():
            state = self._tx.init(params)
        keep_tokenizer(self.store.path, files)
        assert isinstance(state, SmartUpdateState)
        return state

    def compile_step(
        self, graphdef: Any, params: PyTree, state: Any, batch: Batch
    ) -> TrainStep:
        return compile_train_step(
            graphdef,
            self._tx,
            self._boundaries,
            *(params, state, batch),
            task=self._config.task_name,
            is_clipped=self._config.clip_norm > 0,
            frozen=self._config.frozen,
        )

    def function(
        self, fn: Callable[[PyTree, Any], Any], *, average: bool = False
    ) -> Callable[[PyTree, Any], Any]:
        return jax.jit(fn)

    def average(self, params: PyTree, state: Any) -> PyTree:
        return self.store.params(params, state=state, average=True)

    @property
    def _boundaries(self) -> Boundaries:
        """The fewest jits that have the reference's bits near storage.

        With clipping, updates wait for all gradients in any case, so a separate jit for
        the gradients costs almost nothing. Compression needs finished gradients, too.
        """
        needs_all = self._config.clip_norm or self._config.compress
        return "halves" if needs_all else "fused"

    def costs(self, state: SmartUpdateState, *, is_skipped: bool) -> Costs:
        if is_skipped:
            return lambda: NO_TRAFFIC
        step = self.committed_step(state)
        return lambda: self._costs_of(step)

    def num_skipped(self, state: SmartUpdateState) -> int:
        return int(state.skipped_steps)

    def committed_step(self, state: SmartUpdateState) -> int:
        return int(state.step)
