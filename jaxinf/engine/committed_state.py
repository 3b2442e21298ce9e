"""The part of `Store` that shows the last committed step and its cost.

Invariant: nothing here changes a store, except that `wait` commits finished steps.
"""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxinf.csd import CsdInfo
from jaxinf.engine.carry import read_carried
from jaxinf.engine.dispatched import wait_for_callbacks
from jaxinf.engine.divergence import warn_of_unseen
from jaxinf.engine.opened import OpenStore
from jaxinf.engine.optax_state import placed_leaves, scalar_array
from jaxinf.engine.replicas import gathered_replicas, gathered_whole, own_parts
from jaxinf.engine.sharding import boxes_with_holders
from jaxinf.engine.state import committed_step, read_state
from jaxinf.engine.steps import StepMetrics
from jaxinf.engine.training import Training
from jaxinf.errors import StoreMismatchError
from jaxinf.interrupts import raise_kept
from jaxinf.layout import covers
from jaxinf.program import is_trained, leaf_infos, trained
from jaxinf.store import (
    CommitRecord,
    Manifest,
    StepReader,
    StoreDirectory,
    find_leaf,
    leaf_name,
    open_array,
)
from jaxinf.typing import Array, JsonValue, PyTree


class CommittedState:
    """The part of `Store` that shows committed state. Thread-safe."""

    def __init__(self, training: Training) -> None:
        self._run = training

    @property
    def _training(self) -> Training:
        """The store's run."""
        return self._run

    @property
    def path(self) -> Path:
        """The store's directory."""
        return self._run.options.path

    @property
    def exists(self) -> bool:
        """Whether a step is committed: True when opened to resume."""
        return self._training.commit is not None

    @property
    def step(self) -> int:
        """The last committed step; 0 for a new store.

        With a durability other than ``"step"`` the transform may be some steps ahead.
        """
        commit = self._last_commit()
        return commit.step if commit else 0

    @property
    def skipped_steps(self) -> int:
        """Steps skipped for a non-finite gradient, up to the last commit."""
        commit = self._last_commit()
        return commit.skipped_steps if commit else 0

    @property
    def committed_at(self) -> str | None:
        """The time of the last commit, UTC; None for a new store."""
        commit = self._last_commit()
        return commit.committed_at if commit else None

    @property
    def payload(self) -> JsonValue:
        """The payload of the last committed step; see `annotate`."""
        commit = self._last_commit()
        return commit.payload if commit else None

    @property
    def _manifest(self) -> Manifest:
        """The store's manifest: leaves, states, grids.

        Raises:
          StoreFormatError: the store is still empty.
        """
        return self._directory.manifest

    @property
    def _directory(self) -> StoreDirectory:
        self._training.check()
        return self._training.opened.directory

    def _last_commit(self) -> CommitRecord | None:
        self._training.join()
        return self._training.commit

    @property
    def metrics(self) -> StepMetrics | None:
        """Time and traffic of the last step committed by this process."""
        return self._training.metrics

    def metrics_of(self, step: int) -> StepMetrics | None:
        """Time and traffic of a step; None if not one of this process's last eight.

        Waits for the step's commit, and for no later one.
        """
        return self._training.metrics_of(step)

    @property
    def peak_memory_bytes(self) -> int:
        """The peak use of the memory budget so far."""
        return self._training.peak_memory_bytes

    def csds(self) -> list[CsdInfo]:
        """Kind, place and free space of each CSD; empty until there is a store."""
        self._training.check()
        if not self._training.has_files:
            return []
        return [csd.info() for csd in self._training.opened.csds]

    def params(
        self, like: PyTree, *, state: Any = None, average: bool = False
    ) -> PyTree:
        """Returns the committed master params in the form of the run's params.

        Args:
          like: a tree of arrays or ``jax.ShapeDtypeStruct`` of the store's leaves; it
            gives the dtype, and the sharding if it has one. Other leaves than
            floating-point arrays are returned as they are.
          state: the transform state to wait for, as JAX's dispatch is asynchronous.
          average: whether to return the params' average instead, or of a schedule-free
            optimizer optax's `schedule_free_eval_params`; rounded to nearest even if
            `like` has fewer bits.

        Returns:
          A tree like `like`, with a ``jax.Array`` for each leaf of the store.

        Raises:
          StoreMismatchError: `like` has other leaves or shapes than the store, or the
            store has no average.
        """
        self._wait_for(state)
        leaves, treedef = jax.tree.flatten(like)
        self._check_like(trained(like))
        places = [place for place, leaf in enumerate(leaves) if is_trained(leaf)]
        with self._training.paused():
            unseen = self._training.opened.finished.steps_without_params
            warn_of_unseen(self.path, unseen)
            averaged = self._training.opened.averaged
            for number, place in enumerate(places):
                states = averaged(number) if average else (0,)
                leaves[place] = self._read_leaf(number, leaves[place], *states)
        return jax.tree.unflatten(treedef, leaves)

    def state(self, like: PyTree) -> PyTree:
        """Returns the whole optax state of the last step; the inverse of `Store.load`.

        Waits for the steps in flight that this thread has dispatched. The optimizer
        must have been bound to the store in this process, by ``tx.init`` or by
        `jaxinf.stream`.

        Args:
          like: a state of the optax transformation that `jaxinf.smart_update` was
            given, ``plain.init(params)``, or its shapes by ``jax.eval_shape``. It gives
            the dtypes, and the shardings if it has them.

        Returns:
          A tree like `like` with a ``jax.Array`` for each leaf. State in fewer bits is
          decoded.

        Raises:
          StoreMismatchError: `like` has other leaves or shapes than the store.
          StaleStateError: no optimizer is bound to the store.
        """
        self._wait_for(None)
        training = self._training
        with training.paused():
            opened = training.opened
            placed = placed_leaves(opened, training.layout, like, "like")
            scalars = opened.finished.scalar_state
            leaves = [
                scalar_array(scalars[place.number].value, leaf)
                if place.leaf is None
                else self._read_leaf(place.leaf, leaf, place.number)
                for place, leaf in placed.items()
            ]
        return jax.tree.unflatten(jax.tree.structure(like), leaves)

    def carried(self, like: PyTree) -> PyTree:
        """Returns the arrays that the last step carries, such as batch statistics.

        Waits for the steps in flight that this thread has dispatched.

        Args:
          like: a tree like the `carry` that ``tx.update`` was given, or what the
            `carry` of `jaxinf.stream` has returned: arrays, or shapes and dtypes. It
            gives the shardings if it has them.

        Returns:
          A tree like `like` with a ``jax.Array`` for each leaf.

        Raises:
          StoreMismatchError: the step carries nothing, or other arrays; names them.
          StoreCorruptError: an array is damaged.
        """
        self._wait_for(None)
        with self._training.paused():
            return read_carried(self._training, like)

    def _check_like(self, like: PyTree, what: str = "`like`") -> None:
        """Compares a tree of arrays, or of shapes and dtypes, with the store's leaves.

        Args:
          what: name of the argument, for messages.

        Raises:
          StoreMismatchError: `like` has other leaves or shapes than the store.
        """
        held = [(leaf.name, leaf.shape) for leaf in self._manifest.leaves]
        asked = [(leaf_name(i.path), i.shape) for i in leaf_infos(like)]
        if held != asked:
            difference = [pair for pair in asked if pair not in held][:3]
            raise StoreMismatchError(
                f"{self.path}: {what} has other leaves than the store; not in the "
                f"store: {difference or 'none'}, the store has {len(held)} leaves, "
                f"{what} {len(asked)}"
            )

    def _read_leaf(self, number: int, like: Any, *states: int) -> jax.Array:
        """Reads a leaf's committed state, or its average, onto JAX devices; blocks.

        Args:
          like: the leaf's shape, the wanted dtype and, optionally, a sharding.
        """
        shape, dtype = tuple(like.shape), np.dtype(like.dtype)
        opened = self._training.opened

        def read_box(origin: Sequence[int], extent: Sequence[int]) -> np.ndarray:
            is_whole = opened.directory.manifest.leaves[number].is_whole
            out = (np.empty if is_whole else np.zeros)(extent, dtype)
            read_state(opened, number, out, origin, *states)
            return out

        @cache
        def whole() -> np.ndarray:
            return read_box([0] * len(shape), shape)

        def read(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            bounds = [s.indices(n) for s, n in zip(index, shape, strict=True)]
            origin = [start for start, _, _ in bounds]
            extent = [stop - start for start, stop, _ in bounds]
            if not opened.divides(number, origin, extent):
                return whole()[index]
            return read_box(origin, extent)

        sharding = getattr(like, "sharding", None)
        if not self._training.group.is_alone:
            return self._read_parts(number, shape, dtype, sharding, read_box)
        # As uncommitted as `like`; otherwise a jitted step would be compiled again.
        if sharding is None or not getattr(like, "committed", True):
            return jax.device_put(read(tuple(slice(None) for _ in shape)))
        return jax.make_array_from_callback(shape, sharding, read)

    def _read_parts(
        self,
        number: int,
        shape: tuple[int, ...],
        dtype: np.dtype,
        sharding: Any,
        read_box: Callable[[Sequence[int], Sequence[int]], np.ndarray],
    ) -> jax.Array:
        """Reads a leaf whose chunks several processes hold; all call it.

        Where the shards' holders own their chunks, each shard is put together by
        itself; otherwise the leaf is in the memory of every host for a while.
        """
        opened, in_all = self._training.opened, self._training.group.in_all
        what = f"params of {opened.directory.manifest.leaves[number].name}"
        is_global = isinstance(sharding, NamedSharding)
        is_global = is_global and isinstance(sharding.mesh, Mesh)
        if is_global and _fits(opened, number, sharding, shape):
            own = in_all(what, lambda: own_parts(sharding, shape, dtype, read_box))
            return gathered_replicas(sharding, shape, own)
        part = in_all(what, lambda: read_box([0] * len(shape), shape))
        whole = gathered_whole(part)
        if sharding is None or not is_global:
            return jax.device_put(whole, sharding)
        return jax.make_array_from_callback(shape, sharding, whole.__getitem__)

    def tensorstore(self, state: str, leaf: str) -> Any:
        """Opens a leaf's state as a read-only ``tensorstore.TensorStore``.

        Args:
          state: ``"params"`` (the master), ``"mu"``, ``"nu"``, …; it is shown as
            stored, whereas `read` decodes it.
          leaf: its keys joined by ``/``, as `jaxinf inspect` prints them.

        During a run the chunks read may be of two neighbouring steps; use `snapshot`
        for one consistent step.

        Raises:
          ValueError: no such leaf or state; lists what there is.
        """
        record = find_leaf(self._manifest, state, leaf)
        if not record.is_whole:
            raise ValueError(
                f"{self.path}: leaf {leaf}: this process holds {len(record.held)} of "
                f"its {len(record.csds)} chunks, and zarr would show zeros for the "
                "others; read it in all processes (store.read), or make a whole "
                "checkpoint (jaxinf checkpoint save PATH NAME)"
            )
        self._training.wait()
        slot = self._directory.committed_slot()
        assert slot is not None
        self._directory.check_array(slot, record, state)
        return open_array(self._directory.step_path(slot), record, state)

    def read(self, state: str, leaf: str) -> Array:
        """Reads a leaf's state, decoded, after the steps in flight; blocks.

        Args:
          state: ``"params"``, ``"mu"``, …: as for `tensorstore`, except arrays that
            belong to another state, such as a codec's scales.
          leaf: its keys joined by ``/``.

        Returns:
          An array of the leaf's shape: float32 if the store has it in fewer bits.

        Raises:
          ValueError: no such leaf or state; lists what there is.
        """
        self._wait_for(None)
        record = find_leaf(self._manifest, state, leaf)
        chosen = record.state(state)
        if chosen.is_beside:
            raise ValueError(
                f"leaf {leaf}: {state} is a part of {chosen.slot}; read that"
            )
        with self._training.paused():
            path, commit = committed_step(self._training.opened)
            with StepReader(path, commit, directory=self._directory) as reader:
                if self._training.group.is_alone:
                    return reader.read(record, chosen)
                part = self._training.group.in_all(
                    f"read {leaf}", lambda: reader.read_held(record, chosen)
                )
                return gathered_whole(part)

    def wait(self, state: Any = None) -> None:
        """Blocks until all dispatched steps are finished and durable.

        Args:
          state: the transform state to wait for first.
        """
        self._wait_for(state)

    def _wait_for(self, state: Any) -> None:
        raise_kept()
        if state is None:
            wait_for_callbacks()
        else:
            try:
                jax.block_until_ready(state)
            except Exception:
                self._training.check()  # raises the cause of JAX's exception
                raise
        self._training.wait()


def _fits(
    opened: OpenStore, number: int, sharding: NamedSharding, shape: tuple[int, ...]
) -> bool:
    """Whether each chunk's owner has a device with the chunk's shard."""
    record = opened.directory.manifest.leaves[number]
    for start, extent, holders in boxes_with_holders(sharding, shape):
        try:
            chunks = covers(record.grid, start, extent)
        except ValueError:
            return False
        if not {record.owners[n] for n in chunks} <= holders:
            return False
    return True
