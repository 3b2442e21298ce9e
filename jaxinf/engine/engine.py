"""The engine of a store in this process: it opens, binds, makes, loads and closes it.

Invariant: all access to files goes through an `OpenStore`, which exists as soon as
there is a store and has no optional part.
"""

import contextlib
import itertools
import logging
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from jax.sharding import NamedSharding

from jaxinf.documents import encode, parse_json
from jaxinf.engine.binding import RESTART, ResumeCheck
from jaxinf.engine.description import (
    StoreDescription,
    check_same,
    kernel_needs,
    planned,
)
from jaxinf.engine.dispatched import wait_for_dispatched
from jaxinf.engine.exports import Exports
from jaxinf.engine.failure import StoreHealth
from jaxinf.engine.opened import OpenStore
from jaxinf.engine.opening import begin_anew, create, open_place
from jaxinf.engine.options import StoreOptions
from jaxinf.engine.shape import StoreShape
from jaxinf.engine.state_trees import load_step
from jaxinf.engine.updates import FirstParams, first_tasks
from jaxinf.errors import (
    StaleStateError,
    StoreClosedError,
    StoreFormatError,
    StoreMismatchError,
)
from jaxinf.processes import Group, end_unless
from jaxinf.program import StateLayout
from jaxinf.store import (
    CommitRecord,
    StoreDirectory,
    StoreLock,
    checkpoint_names,
    save_checkpoint,
)
from jaxinf.transfer import ByteMeters, file_progress
from jaxinf.typing import JsonValue, PyTree

_LOG = logging.getLogger("jaxinf")

_ONE_EACH = (
    ". If these are two models that train in one process, give each its own: one store "
    "per init, smart_update(tx, other_path)"
)

_MOST_PAYLOAD_BYTES = 16 << 20  # the record must stay within the limit of a document


class Engine:
    """A store in this process, with files or still without. Thread-safe.

    Attributes:
      files: its open files; None if there is no store yet, not even a new one.
      health: whether it can be used, and the failure that stopped it.
      lock: the store's, while this process is its writer.
      path_lock: held while a store of its path opens or closes.
      binding: the run's binding to the store's step, made by its first update.
      shardings: for each leaf, the sharding of the params in the last `init`, on one
        mesh; empty if they are not sharded.
      num_replaced: how often what it holds was replaced, other than by a step: made
        anew, or loaded.
      last_step: the last finished step; -1 before step 0.
      on_close: functions that `close` calls before the workers stop, in order.

    Raises:
      StoreError: as `jaxinf.open_store` documents.
    """

    def __init__(
        self, options: StoreOptions, group: Group, path_lock: threading.RLock
    ) -> None:
        self.options, self.group, self.path_lock = options, group, path_lock
        self.health = StoreHealth(options.path)
        self.meters = meters = ByteMeters()
        self.exports = Exports(options, group)
        self.lock: StoreLock | None = None
        self.shardings: tuple[NamedSharding, ...] = ()
        self.num_replaced, self.last_step = 0, -1
        self._payloads: dict[int, JsonValue] = {}
        self._payloads_lock = threading.Lock()
        self._bound: list[StoreDescription] = []
        self._guard = threading.RLock()
        self.on_close: list[Callable[[], None]] = []
        self.binding = ResumeCheck(lambda: self.opened)
        group.report(lambda: hash((meters.snapshot(), file_progress())))
        self.health.listen(self._tell_others)
        self.files: OpenStore | None = open_place(self)

    def _tell_others(self) -> None:
        health, error = self.health, self.health.error

        def is_known() -> bool:
            return health.is_closed or not health.is_unreported

        if error is not None and not isinstance(error, StoreClosedError):
            self.group.fail(error)
            end_unless(self.group, is_known, error)

    # --- the store -------------------------------------------------------------------

    @property
    def opened(self) -> OpenStore:
        """Its `files`, which may still lack the initial state, but must be there."""
        if self.files is None:
            raise StoreFormatError(
                f"{self.options.path}: the store is empty until tx.init has run on it"
            )
        return self.files

    @property
    def directory(self) -> StoreDirectory:
        """The files of the open store; raises what has stopped it."""
        self.health.check()
        return self.opened.directory

    @property
    def commit(self) -> CommitRecord | None:
        """The last committed step's record; None for a new store."""
        files = self.files
        return None if files is None or files.is_new else files.commit

    @property
    def layout(self) -> StateLayout:
        """The places of the optax state in the store, by the optimizer bound last."""
        if not self._bound:
            raise StaleStateError(
                f"{self.options.path}: expected an optimizer for the store's state, "
                "found none; call tx.init(params) of smart_update(tx, store) first"
            )
        return self._bound[-1].layout

    def shape(self, description: StoreDescription) -> StoreShape:
        """The shape of the existing or future store; writes nothing."""
        if (files := self.files) is not None:  # another thread may make it meanwhile
            return files
        directory = planned(self.options, self.group, description)
        return StoreShape(self.options, directory)

    # --- its contents ----------------------------------------------------------------

    def bind(
        self,
        description: StoreDescription,
        *,
        may_create: bool = False,
        uses_budget: bool = True,
    ) -> bool:
        """Binds the store to an optimizer and a tree; may make the store.

        Args:
          may_create: whether to make the store if there is none.
          uses_budget: whether its own memory budget is used, and not another.

        Returns:
          Whether the store is new, so that every leaf must be initialised.

        Raises:
          StoreMismatchError: the store has another content; shows the difference.
          StoreSpaceError: there is no room; nothing was written.
          ValueError: the budget is too small for this optimizer's state.
          StaleStateError: there is no store, and none may be made here.
        """
        with self._guard:
            self.health.check()
            commit = self.commit
            if commit is None and not may_create:
                raise StaleStateError(
                    f"{self.options.path}: update found no step in the store; call "
                    "tx.init(params) on it first"
                )
            self.exports.check(0 if commit is None else commit.step)
            if any(bound is description for bound in self._bound):
                return self.opened.is_new
            if commit is None:
                self._create(description, uses_budget=uses_budget)
            opened = self.opened
            if not opened.is_new:
                if uses_budget:
                    opened.check_memory()
                remedy = _ONE_EACH if self._bound else ""
                check_same(opened.directory, description, remedy)
                needs = kernel_needs(description, opened.directory.manifest)
                opened.fleet.check(needs)
            self._bound.append(description)
            return opened.is_new

    def _create(self, description: StoreDescription, *, uses_budget: bool) -> None:
        self._bound.clear()  # an earlier init on this store did not finish
        unfinished = self.files
        if unfinished is not None and unfinished.directory.committed_slot():
            check_same(unfinished.directory, description)
            self.files = begin_anew(self, unfinished)
            return
        self.files = None
        if unfinished is not None:
            unfinished.close()
        self.files = create(self, description, uses_budget=uses_budget)

    def restart(self, description: StoreDescription) -> None:
        """Keeps the existing run as a checkpoint, and waits for a new one.

        The committed step does not change until the first states are committed.
        """
        wait_for_dispatched()
        with self._guard:
            self.wait()
            opened, path = self.opened, self.options.path
            remedy = (
                '. on_existing="restart" begins anew with the same leaves and the same '
                f"optimizer; for others move the store aside (mv {path} {path}-old)"
            )
            check_same(opened.directory, description, remedy)
            if step := opened.commit.step:
                names, number = checkpoint_names(opened.directory), 1
                name = kept = f"step-{step}-before-restart"
                while name in names:
                    number += 1
                    name = f"{kept}-{number}"
                save_checkpoint(opened.directory, name)
                said = "%s: restarted; the run of before is kept at step %d, as %r"
                _LOG.warning(said, path, step, name)
            self.files = begin_anew(self, opened)
            self._bound = [description]

    def initialise(
        self, description: StoreDescription, given: Sequence[FirstParams]
    ) -> None:
        """Makes master params and initial states of a new store's leaves; blocks."""
        opened = self.opened
        tasks = [first_tasks(opened, description, one) for one in given]
        opened.mover.run([*itertools.chain.from_iterable(tasks)])

    def load(self, params: Sequence[Any], state: PyTree, step: int) -> None:
        """Makes params and an optax state the store's first step after step 0."""
        layout, opened = self.layout, self.opened
        with self._guard, opened.paused():
            if opened.is_new or opened.finished.step:
                raise StoreMismatchError(
                    f"{self.options.path}: load: expected a store at step 0, found "
                    f"step {opened.finished.step}; load into a new store after tx.init("
                    f"params), {RESTART}"
                )
            opened.abandon()
            load_step(opened, layout, params, state, step)

    # --- steps under way -------------------------------------------------------------

    def wait(self) -> None:
        """Commits every finished step; blocks until all are durable."""
        self.health.check()
        if self.files is not None:
            self.files.wait()

    def join(self) -> None:
        """Blocks until the last step has ended, and its commit if it has one."""
        self.health.check()
        if self.files is not None:
            self.files.join()

    def annotate(self, step: int, payload: JsonValue) -> None:
        """Keeps a caller's payload for the commit of a step that has not finished."""
        self.health.check()
        raw = encode({"payload": payload})  # nested as it will be in the record
        payload = parse_json(raw, most_bytes=_MOST_PAYLOAD_BYTES)["payload"]
        with self._payloads_lock:
            if step <= self.last_step:
                raise ValueError(
                    f"{self.options.path}: annotate(step={step}): expected a step still"
                    f" to be committed, the store is at step {self.last_step}; "
                    "annotate before the update"
                )
            self._payloads[step] = payload

    def take_payload(self, step: int) -> JsonValue:
        """Returns the payload of the step that ends now."""
        with self._payloads_lock:
            self.last_step = step
            return self._payloads.pop(step, None)

    # --- its end ---------------------------------------------------------------------

    def close(self) -> None:
        """Ends the step in flight, stops the workers; idempotent, raises no failure."""
        with self._guard:
            if self.health.is_closed:
                return
            self.health.is_closed = True
        if sys.exception() is not None:
            self.exports.stop.set()
        elif self.exports.under_way:
            said = "%s: closing waits for the export to %s; Ctrl-C gives it up"
            _LOG.warning(said, self.options.path, self.exports.under_way)
        self.group.leave()
        with contextlib.ExitStack() as stack:
            stack.callback(self.release)
            if self.files is not None:
                stack.callback(self.files.close)
            for action in self.on_close[::-1]:
                stack.callback(action)
            if self.files is not None:
                try:
                    self.files.end()
                except KeyboardInterrupt:
                    self.exports.stop.set()
                    self.files.end()
                    raise

    def release(self) -> None:
        """Releases the lock; idempotent. In a forked child the parent keeps it."""
        if self.lock is not None:
            self.lock.release()
            self.lock = None

    def disown(self) -> None:
        """Ends the use of the store in a forked child; the parent keeps it."""
        self._guard, self.path_lock = threading.RLock(), threading.RLock()
        self.health.disown()
        self.release()
