"""What this process knows of one path of a store, from `open_store` to `close`.

Invariant: all access to files goes through its `steps` and their `files`, which are
there as soon as there is a store.
"""

import contextlib
import logging
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from jax.sharding import NamedSharding

from jaxinf.documents import encode, parse_json
from jaxinf.engine.description import StoreDescription
from jaxinf.engine.exports import Exports
from jaxinf.engine.failure import StoreHealth
from jaxinf.engine.options import StoreOptions
from jaxinf.errors import StaleStateError, StoreClosedError, StoreFormatError
from jaxinf.processes import Group, exit_unless_known
from jaxinf.program import StateLayout
from jaxinf.store import StoreDirectory, StoreLock
from jaxinf.transfer import ByteMeters, file_progress
from jaxinf.typing import JsonValue

if TYPE_CHECKING:  # which are made with an engine
    from jaxinf.engine.step_runner import StepRunner
    from jaxinf.engine.store_files import StoreFiles

_LOG = logging.getLogger("jaxinf")

_MOST_PAYLOAD_BYTES = 16 << 20  # the record must stay within the limit of a document


class Engine:
    """A path that this process has opened, with a store or still without. Thread-safe.

    `opening.py` gives it its steps, `binding.py` makes its store.

    Attributes:
      health: whether it can be used, and the failure that stopped it.
      lock: the store's, while this process is its writer.
      path_lock: held while a store of its path opens or closes.
      guard: held while its files are made or replaced, or it is bound.
      bound: descriptions of the optimizers that it was bound to, the last one last.
      shardings: for each leaf, the sharding of the params in the last `init`, on one
        mesh; empty if they are not sharded.
      num_replaced: how often what it holds was replaced, other than by a step: made
        anew, or loaded.
      last_step: the last finished step; -1 before step 0.
      on_close: functions that `close` calls before the workers stop, in order.
    """

    def __init__(
        self, options: StoreOptions, group: Group, path_lock: threading.RLock
    ) -> None:
        self.options, self.group, self.path_lock = options, group, path_lock
        self.health = StoreHealth(options.path)
        self.meters = meters = ByteMeters()
        self.exports = Exports(options, group)
        self.lock: StoreLock | None = None
        self.guard = threading.RLock()
        self.bound: list[StoreDescription] = []
        self.shardings: tuple[NamedSharding, ...] = ()
        self.num_replaced, self.last_step = 0, -1
        self.on_close: list[Callable[[], None]] = []
        self._steps: StepRunner | None = None
        self._payloads: dict[int, JsonValue] = {}
        self._payloads_lock = threading.Lock()
        group.report_progress(lambda: hash((meters.snapshot(), file_progress())))
        self.health.failure.listen(self._tell_others)

    def _tell_others(self) -> None:
        health, error = self.health, self.health.error

        def is_known() -> bool:
            return health.is_closed or not health.is_unreported

        if error is not None and not isinstance(error, StoreClosedError):
            self.group.fail(error)
            exit_unless_known(self.group, is_known, error)

    # --- the store -------------------------------------------------------------------

    @property
    def has_files(self) -> bool:
        """Whether there is a store, perhaps a new one without its initial state."""
        return self._steps is not None

    @property
    def is_new(self) -> bool:
        """Whether no step is committed."""
        steps = self._steps
        return steps is None or steps.files.is_new

    @property
    def steps(self) -> "StepRunner":
        """The steps of the open store, which must have files."""
        steps = self._steps
        if steps is None:
            raise StoreFormatError(
                f"{self.options.path}: the store is empty until tx.init has run on it"
            )
        return steps

    @steps.setter
    def steps(self, steps: "StepRunner | None") -> None:
        self._steps = steps
        self.last_step = -1 if self.is_new else self.files.commit.step

    @property
    def files(self) -> "StoreFiles":
        """The files of its steps."""
        return self.steps.files

    @property
    def directory(self) -> StoreDirectory:
        """The directory of its files; raises what has stopped it."""
        self.health.check()
        return self.files.directory

    @property
    def layout(self) -> StateLayout:
        """The places of the optax state in the store, by the optimizer bound last."""
        if not self.bound:
            raise StaleStateError(
                f"{self.options.path}: expected an optimizer for the store's state, "
                "found none; call tx.init(params) of smart_update(tx, store) first"
            )
        return self.bound[-1].layout

    # --- payloads of steps -----------------------------------------------------------

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
        """Notes that a step ends now; returns its payload."""
        with self._payloads_lock:
            self.last_step = step
            return self._payloads.pop(step, None)

    def note_replaced(self) -> None:
        """Counts, after the commit, that what it holds was replaced."""
        self.num_replaced += 1

    # --- its end ---------------------------------------------------------------------

    def close(self) -> None:
        """Ends the step in flight, stops the workers; idempotent, raises no failure."""
        with self.guard:
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
            if self.has_files:
                stack.callback(self.files.close)
            for action in self.on_close[::-1]:
                stack.callback(action)
            if self.has_files:
                try:
                    self.steps.commit_at_close()
                except KeyboardInterrupt:
                    self.exports.stop.set()
                    self.steps.commit_at_close()
                    raise

    def release(self) -> None:
        """Releases the lock; idempotent. In a forked child the parent keeps it."""
        if self.lock is not None:
            self.lock.release()
            self.lock = None

    def disown(self) -> None:
        """Ends the use of the store in a forked child; the parent keeps it."""
        self.guard, self.path_lock = threading.RLock(), threading.RLock()
        self.health.disown()
        self.release()
