"""`Store`: what a user calls of an open store.

Invariant: a `Store` shows only the last committed step.
"""

import contextlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from jaxinf.engine.carry import read_carried
from jaxinf.engine.dispatched import (
    check_thread,
    wait_for_callbacks,
    wait_for_dispatched,
)
from jaxinf.engine.engine import Engine
from jaxinf.engine.exports import ExportInfo
from jaxinf.engine.reading import average_states, check_like, read_array, read_leaf
from jaxinf.engine.state_trees import load_step, read_state
from jaxinf.engine.step_runner import LAST_STEP, StepMetrics
from jaxinf.engine.store_files import StoreFiles
from jaxinf.errors import ProcessError, StoreError
from jaxinf.processes import raise_kept_interrupt
from jaxinf.program import is_trained, keep_trained
from jaxinf.store import (
    CheckpointInfo,
    CommitRecord,
    Manifest,
    checkpoint_names,
    dtype_of,
    find_leaf,
    list_checkpoints,
    pinned_step,
    remove_checkpoint,
    save_checkpoint,
)
from jaxinf.typing import Array, JsonValue, PyTree

_LOG = logging.getLogger("jaxinf")


class Store:
    """An open store: made by `open_store`, used by `jaxinf.smart_update`.

    It is a context manager. A program that ends without `close` loses nothing, because
    the interpreter's exit drains and commits. All methods may be called from any
    thread. Methods that show committed state wait for a commit in flight. After a
    failure each method raises the original exception.

    A path is open once in a process: a second `open_store` returns the same object.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __repr__(self) -> str:
        engine = self._engine
        step = "new" if engine.is_new else f"step {engine.files.commit.step}"
        return f"Store({str(self.path)!r}, {step})"

    # --- the last committed step --------------------------------------------------

    @property
    def path(self) -> Path:
        """The store's directory."""
        return self._engine.path

    @property
    def exists(self) -> bool:
        """Whether a step is committed: True when opened to resume."""
        return not self._engine.is_new

    @property
    def step(self) -> int:
        """The last committed step; 0 for a new store.

        With a durability other than ``"step"`` the transform may be some steps ahead.
        """
        return self._last_commit().step

    @property
    def skipped_steps(self) -> int:
        """Steps skipped for a non-finite gradient, up to the last commit."""
        return self._last_commit().skipped_steps

    @property
    def payload(self) -> JsonValue:
        """The payload of the last committed step; see `annotate`."""
        return self._last_commit().payload

    @property
    def _manifest(self) -> Manifest:
        return self._engine.directory.manifest

    @contextlib.contextmanager
    def _between_steps(self, state: Any = None) -> Iterator[StoreFiles]:
        """Waits for a transform state, and gives the files while no step begins."""
        self.wait(state)
        engine = self._engine
        with engine.steps.paused():
            try:
                yield engine.files
            except StoreError:
                engine.health.check()  # raises it, so that `close` need not
                raise

    def _last_commit(self) -> CommitRecord:
        engine = self._engine
        engine.health.check()
        if not engine.has_files:
            return CommitRecord(step=0, scalar_state=())
        engine.steps.join()
        return engine.files.commit

    @property
    def metrics(self) -> StepMetrics | None:
        """Time and traffic of the last step committed by this process."""
        history = self._engine.steps.metrics if self._engine.has_files else ()
        return history[-1] if history else None

    def metrics_of(self, step: int) -> StepMetrics | None:
        """Time and traffic of a step; None if not one of this process's last eight.

        Waits for the step's commit, and for no later one.
        """
        engine = self._engine
        return engine.steps.metrics_of(step) if engine.has_files else None

    @property
    def peak_memory_bytes(self) -> int:
        """The peak use of the memory budget so far."""
        engine = self._engine
        return engine.files.fleet.peak_bytes if engine.has_files else 0

    # --- its arrays ----------------------------------------------------------------

    def params(
        self, like: PyTree, *, state: Any = None, average: bool = False
    ) -> PyTree:
        """Returns the committed master params in the form of the run's params.

        Args:
          like: A tree of arrays or ``jax.ShapeDtypeStruct`` of the store's leaves; it
            gives dtypes and, if it has them, shardings. Integers and objects are
            returned as they are; a Python float is refused.
          state: The transform state to wait for, as JAX's dispatch is asynchronous.
          average: Whether to return the params' average, or of a schedule-free
            optimizer optax's `schedule_free_eval_params`, rounded to nearest even.

        Returns:
          A tree like `like`, with a ``jax.Array`` for each leaf of the store.

        Raises:
          StoreMismatchError: `like` has other leaves or shapes than the store, or the
            store has no average.
          TypeError: `like` has a Python float.
        """
        leaves, treedef = jax.tree.flatten(like)
        positions = [n for n, leaf in enumerate(leaves) if is_trained(leaf)]
        with self._between_steps(state) as files:
            check_like(files, keep_trained(like))
            for number, position in enumerate(positions):
                states = average_states(files, number) if average else (0,)
                leaves[position] = read_leaf(files, number, leaves[position], *states)
        return jax.tree.unflatten(treedef, leaves)

    def state(self, like: PyTree) -> PyTree:
        """Returns the whole optax state of the last step; the inverse of `Store.load`.

        Waits for the steps in flight that this thread has dispatched. An optimizer must
        be bound to the store in this process, by ``tx.init`` or `jaxinf.stream`.

        Args:
          like: A state of the optax transformation that `jaxinf.smart_update` was
            given, ``plain.init(params)``, or its shapes by ``jax.eval_shape``, which
            gives dtypes and, if it has them, shardings.

        Returns:
          A tree like `like` with a ``jax.Array`` for each leaf, decoded.

        Raises:
          StoreMismatchError: `like` has other leaves or shapes than the store.
          StaleStateError: No optimizer is bound to the store.
        """
        with self._between_steps() as files:
            return read_state(files, self._engine.layout, like)

    def carried(self, like: PyTree) -> PyTree:
        """Returns the arrays that the last step carries, such as batch statistics.

        Waits for the steps in flight that this thread has dispatched.

        Args:
          like: A tree like the `carry` that ``tx.update`` was given, or that the
            `carry` of `jaxinf.stream` has returned: arrays, or shapes and dtypes. It
            gives the shardings if it has them.

        Returns:
          A tree like `like` with a ``jax.Array`` for each leaf.

        Raises:
          StoreMismatchError: The step carries nothing, or other arrays; names them.
          StoreCorruptError: An array is damaged.
        """
        with self._between_steps() as files:
            slot = files.chunks.committed
            return read_carried(files.directory, slot, files.commit, like)

    def read(self, state: str, leaf: str) -> Array:
        """Reads a leaf's state, decoded, after the steps in flight; blocks.

        Args:
          state: ``"params"`` (the master), ``"mu"``, ``"nu"``, …
          leaf: Keys of the leaf, joined by ``/``, as `jaxinf inspect` prints them.

        Returns:
          An array of the leaf's shape: float32 if the store has it in fewer bits.

        Raises:
          ValueError: No such leaf or state; lists what there is.
        """
        record = find_leaf(self._manifest, state, leaf)
        stored = record.state(state)
        if stored.is_companion:
            raise ValueError(
                f"leaf {leaf}: {state} is a part of {stored.base_name}; read that"
            )
        with self._between_steps() as files:
            number = self._manifest.leaves.index(record)
            dtype = dtype_of(stored.decoded().dtype)
            return read_array(files, number, dtype, record.states.index(stored))

    def load(self, params: PyTree, opt_state: PyTree, *, step: int) -> None:
        """Commits params and an optax state as a step of the store; blocks.

        For a run that has begun elsewhere, such as with plain optax and Orbax. The
        store must be at step 0, after ``tx.init(params)``, where it stays if the call
        fails; ``tx.init(params)`` then gives the state to go on with. Updates have the
        bits of an uninterrupted run; a store in fewer bits rounds state that does not
        come from such a store. In a program of several processes all call it.

        Args:
          params: A tree like the params, or their float32 master.
          opt_state: A tree like the ``init`` of the optax transformation that
            `jaxinf.smart_update` was given; dicts and lists may take the place of named
            tuples. Of leaves of type `jaxinf.typing.DeferredArray`, in both trees, only
            one at a time is in memory.
          step: Number of the step, at least 1.

        Raises:
          StoreMismatchError: The store is not at step 0, or a leaf is missing, or of
            another shape or dtype; names it. Nothing was written.
          StaleStateError: ``tx.init`` was not called.
          ProcessError: Another process failed.
        """
        if not 1 <= step < LAST_STEP:
            raise ValueError(
                f"load: step={step}: expected a number from 1 to {LAST_STEP - 1}"
            )
        self.wait()
        tree = keep_trained(params)
        check_like(self._engine.files, tree, "params")
        load_step(self._engine, jax.tree.leaves(tree), opt_state, step=step)

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[Path]:
        """Pins the last committed step for reading while steps go on.

        In a program of several processes all call it, after the same step; each has its
        member's part of that.

        Yields:
          A directory of hard links, which is removed after the context: a zarr group,
          an Orbax checkpoint, ``commit.json``.

        Raises:
          ProcessError: Another process did not call it after the same step.
        """
        self.wait()
        with contextlib.ExitStack() as stack:
            yield self._engine.group.in_all(
                f"a snapshot of step {self.step}",
                lambda: stack.enter_context(pinned_step(self._engine.directory)).path,
            )

    # --- checkpoints ---------------------------------------------------------------

    def checkpoint(
        self, name: str | None = None, *, state: Any = None, overwrite: bool = False
    ) -> str:
        """Keeps the last finished step under a name; blocks until it is durable.

        No data is copied: the step's files are hard-linked, and the run goes on in
        other files. From then on the drives need room for that step in addition to the
        run's own two. In a program of several processes all call it, after the same
        step; if one does not, or fails, none keeps it.

        Args:
          name: By default the step's number, since Orbax's CheckpointManager lists
            numbers; it replaces a checkpoint of that number, of a run that has gone
            back. Of the numbered ones the latest n stay (`keep_steps` of `open_store`);
            others stay until they are removed.
          state: The transform state to wait for; by default all that this thread has
            dispatched, as JAX's dispatch is asynchronous.
          overwrite: Whether to replace a checkpoint of that name, such as ``"best"``.
            It stays until the new one is complete.

        Returns:
          The name. The checkpoint is ``STORE/checkpoints/NAME``, an Orbax checkpoint
          and a zarr group; ``open_store(path, restore=name)`` goes on from it.

        Raises:
          ValueError: The name is invalid, or another step's number.
          StoreMismatchError: A checkpoint of that name exists.
          StoreSpaceError: The drives have too little room; nothing was made.
          ProcessError: Another process failed, or did not call it after the same step.
        """
        with self._between_steps(state) as files:
            directory, new_name = files.directory, name or str(self.step)
            old_names = checkpoint_names(directory)
            replaces = overwrite or name is None
            try:
                files.group.in_all(
                    f"checkpoint {new_name} of step {self.step}",
                    lambda: save_checkpoint(directory, name, overwrite=replaces),
                )
            except ProcessError:
                names = checkpoint_names(directory)
                if new_name in names and new_name not in old_names:
                    remove_checkpoint(directory, new_name)
                raise
            files.options.remove_surplus_checkpoints(directory, new_name)
            return new_name

    def checkpoints(self) -> list[CheckpointInfo]:
        """Returns all checkpoints, by step; waits for one that is being made."""
        directory = self._engine.directory
        self._engine.steps.join()
        return list_checkpoints(directory)

    def remove_checkpoint(self, name: str) -> None:
        """Removes a checkpoint and frees its space.

        Raises:
          ValueError: There is no checkpoint of that name.
        """
        remove_checkpoint(self._engine.directory, name)

    def exports(self) -> list[ExportInfo]:
        """Returns the steps that were exported, or failed to be; does not block."""
        return list(self._engine.exports.infos)

    # --- control -------------------------------------------------------------------

    def wait(self, state: Any = None) -> None:
        """Blocks until all dispatched steps are finished and durable.

        Args:
          state: The transform state to wait for first.
        """
        raise_kept_interrupt()
        if state is None:
            wait_for_callbacks()
        try:
            jax.block_until_ready(state)
        except Exception:
            self._engine.health.check()  # raises the cause of JAX's exception
            raise
        self._engine.health.check()
        if self._engine.has_files:
            self._engine.steps.wait()

    def annotate(self, step: int, payload: JsonValue) -> None:
        """Sets the caller's payload for the commit of a future step.

        Args:
          payload: JSON: position in the data, random seeds, ….

        Raises:
          ValueError, TypeError: It is not JSON, or the step is committed already.
        """
        self._engine.annotate(step, payload)

    def check(self) -> None:
        """Raises the exception that stopped the store, if any, with its type."""
        self._engine.health.raise_to_program()

    def close(self) -> None:
        """Closes the store. Idempotent.

        It waits until all steps that JAX has dispatched have arrived, commits, and
        releases the lock. Ctrl-C ends the wait; steps that have not arrived are lost.
        A step whose update is not finished is abandoned. An export under way is waited
        for, unless an exception is being handled, and given up by Ctrl-C.

        Raises:
          StoreError: It was called in a JAX callback; the store stays open.
          BaseException: The exception that stopped the store, once, after everything is
            released, unless another method has raised it before, or an error of JAX is
            being handled.
        """
        engine, health = self._engine, self._engine.health
        if not health.is_closed:
            check_thread(f"{self.path}: close")
        with engine.path_lock:
            if health.is_closed:
                return
            try:
                wait_for_dispatched()
            except KeyboardInterrupt:
                engine.close()
                step = engine.files.finished.step if engine.has_files else 0
                message = "%s: interrupted: steps under way after step %d are lost"
                _LOG.warning(message, self.path, step)
                raise
            finally:
                engine.close()
        if sys.exception() is None:
            raise_kept_interrupt()
        is_handling_jax = isinstance(sys.exception(), jax.errors.JaxRuntimeError)
        if health.is_unraised and not is_handling_jax:
            health.check()

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            self.close()
        except Exception:
            if error is None:
                raise  # else the body's own error, of which this is often the cause


def engine_of(store: Store) -> Engine:
    """Returns the engine of a store, for code that works inside of steps."""
    return store._engine
