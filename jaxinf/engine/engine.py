"""`Engine`: the inside of an open store, as optimizers and streaming use it.

Invariant: all access to files goes through `Engine.steps` and `Engine.files`, which
exist as soon as the store does.
"""

import contextlib
import logging
import sys
import threading
from collections import deque
from collections.abc import Callable

from jax.sharding import NamedSharding

from jaxinf.csd import CsdFleet
from jaxinf.documents import encode, parse_json
from jaxinf.engine.description import StoreDescription
from jaxinf.engine.exports import Exports
from jaxinf.engine.health import StoreHealth
from jaxinf.engine.options import StoreOptions
from jaxinf.engine.resume_check import ResumeCheck
from jaxinf.engine.step_runner import StepRunner
from jaxinf.engine.store_files import StoreFiles
from jaxinf.engine.subgroup_table import SubgroupTable
from jaxinf.errors import StaleStateError, StoreClosedError, StoreFormatError
from jaxinf.processes import Group, exit_unless_known
from jaxinf.program import StateLayout
from jaxinf.store import CommitRecord, StoreDirectory, StoreLock
from jaxinf.transfer import ByteMeters, file_progress
from jaxinf.typing import JsonValue

_LOG = logging.getLogger("jaxinf")

_MAX_PAYLOAD_BYTES = 16 << 20  # the record must stay within the limit of a document


class Engine:
    """The inside of an open store: its options, health, locks, steps and files.

    It lives from `open_store` to `close`, and may begin before there is a store:
    `opening.py` gives it the steps of an existing store, `binding.py` those of a new
    one. Thread-safe.

    Attributes:
      health: Whether the store can be used, and the failure that stopped it.
      meters: Counters of the bytes on drives and host link.
      store_lock: The lock on disk, while this process is the store's writer.
      path_lock: Held while a store at this path opens or closes.
      binding_lock: Held while files are made or replaced, or an optimizer is bound.
      descriptions: The latest descriptions bound to the store, the last one last.
      shardings: For each leaf, the sharding of the params in the last `init`, on one
        mesh; empty if they are not sharded.
      contents_version: A number that changes when the contents are replaced other than
        by a step: initialised again, or loaded.
      on_close: Functions that `close` calls before the workers stop, in order.
    """

    def __init__(
        self, options: StoreOptions, group: Group, path_lock: threading.RLock
    ) -> None:
        self.path, self.options = options.path, options
        self.group, self.path_lock = group, path_lock
        self.health = StoreHealth(self.path)
        self.meters = meters = ByteMeters()
        self.exports = Exports(options, group)
        self.store_lock: StoreLock | None = None
        self.binding_lock = threading.RLock()
        self.descriptions = deque[StoreDescription](maxlen=8)  # jits may alternate
        self.shardings: tuple[NamedSharding, ...] = ()
        self.contents_version = 0
        self.on_close: list[Callable[[], None]] = []
        self._steps: StepRunner | None = None
        self._last_step = -1  # the last finished step; -1 before step 0
        self._payloads: dict[int, JsonValue] = {}
        self._payloads_lock = threading.Lock()
        group.report_progress(lambda: hash((meters.snapshot(), file_progress())))
        self.health.failure.listen(self._fail_in_group)

    def _fail_in_group(self) -> None:
        health, error = self.health, self.health.error

        def is_known() -> bool:
            return health.is_closed or not health.is_unraised

        if error is not None and not isinstance(error, StoreClosedError):
            self.group.fail(error)
            exit_unless_known(self.group, is_known, error)

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
    def steps(self) -> StepRunner:
        """The steps of the store; StoreFormatError while there is none."""
        steps = self._steps
        if steps is None:
            raise StoreFormatError(
                f"{self.path}: the store is empty until tx.init has run on it"
            )
        return steps

    @steps.setter
    def steps(self, steps: StepRunner | None) -> None:
        self._steps = steps
        self._last_step = -1 if self.is_new else self.files.commit.step

    def make_steps(
        self, subgroups: SubgroupTable, commit: CommitRecord | None, fleet: CsdFleet
    ) -> StepRunner:
        """Opens files for the steps of a store, new if it has no commit."""

        def count_replacement() -> None:
            self.contents_version += 1

        owned = self.group, self.health, self.meters
        return StepRunner(
            StoreFiles(subgroups, commit, fleet, *owned),
            self.exports,
            take_payload=self.take_payload,
            on_replaced=count_replacement,
        )

    @property
    def resume_check(self) -> ResumeCheck:
        """The check that a run's params and state are those of the last step."""
        return self.steps.resume_check

    @property
    def files(self) -> StoreFiles:
        """The open files, with the records of the last steps."""
        return self.steps.files

    @property
    def directory(self) -> StoreDirectory:
        """The store's directory; raises the failure that stopped the store."""
        self.health.check()
        return self.files.directory

    @property
    def layout(self) -> StateLayout:
        """The places of the optax state in the store, by the optimizer bound last."""
        if not self.descriptions:
            raise StaleStateError(
                f"{self.path}: expected an optimizer for the store's state, "
                "found none; call tx.init(params) of smart_update(tx, store) first"
            )
        return self.descriptions[-1].layout

    def annotate(self, step: int, payload: JsonValue) -> None:
        """Keeps a payload for the commit of a step that has not finished."""
        self.health.check()
        raw = encode({"payload": payload})  # nested as it will be in the record
        payload = parse_json(raw, most_bytes=_MAX_PAYLOAD_BYTES)["payload"]
        with self._payloads_lock:
            if step <= self._last_step:
                raise ValueError(
                    f"{self.path}: annotate(step={step}): expected a step still"
                    f" to be committed, the store is at step {self._last_step}; "
                    "annotate before the update"
                )
            self._payloads[step] = payload

    def take_payload(self, step: int) -> JsonValue:
        """Returns the payload of a step that ends now; later ones are refused."""
        with self._payloads_lock:
            self._last_step = step
            return self._payloads.pop(step, None)

    def close(self) -> None:
        """Ends the step in flight, stops the workers; idempotent, raises no failure."""
        with self.binding_lock:
            if self.health.is_closed:
                return
            self.health.is_closed = True
        if sys.exception() is not None:
            self.exports.stop.set()
        elif url := self.exports.current_url:
            message = "%s: closing waits for the export to %s; Ctrl-C gives it up"
            _LOG.warning(message, self.path, url)
        self.group.leave()
        with contextlib.ExitStack() as stack:
            stack.callback(self.release_lock)
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

    def release_lock(self) -> None:
        """Releases the lock on disk; idempotent. A forked child leaves it locked."""
        if self.store_lock is not None:
            self.store_lock.release()
            self.store_lock = None

    def detach_fork(self) -> None:
        """Ends the use of the store in a forked child; the parent keeps it."""
        self.binding_lock, self.path_lock = threading.RLock(), threading.RLock()
        self.health.detach_fork()
        self.release_lock()
