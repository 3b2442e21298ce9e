"""The processes of a run, as one of them sees them, and their messages.

     post:    a value of this process, which the others see at once
     gather:  every process gives a value ──► each gets the values of all
     agree:   every process gives the same value, or all raise
     first:   process 0 does something ──► all get its value
     barrier: every process has come

Invariant: all goes over JAX's coordination service, host-side, from any thread, and
never over a collective of the devices. Keys carry the session and a counter, so that no
call meets one of an earlier group. An error in one process is raised in all.
"""

import contextlib
import functools
import itertools
import json
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from jaxinf import compat
from jaxinf.errors import ProcessError
from jaxinf.typing import JsonValue

_T = TypeVar("_T")

LIMIT_S = 60.0
"""The longest wait for another process that reports no progress."""

SLICE_S = 1.0
"""Time between looks at whether a process is gone."""

_LAST_LOOK_S = 0.001
_LOG = logging.getLogger("jaxinf")
_numbers = itertools.count(1)

silent_groups: list["Group"] = []
"""Groups of which a process was silent for too long, and has not come back."""


class Group:
    """Processes that make the same calls in one order; one alone without a service.

    Thread-safe, but only one thread may call `gather`, `agree`, `in_all` and `first`,
    and only one `barrier`.

    Args:
      where: The path of the run, for messages.
      service: None in a program of one process, or if each process has its own store.
      session: Id of the group, the same in all processes.
      limit_s: The longest silence of a process; by default `LIMIT_S`.
    """

    def __init__(
        self,
        where: Path | str,
        service: compat.Coordination | None = None,
        session: str = "",
        *,
        limit_s: float | None = None,
    ) -> None:
        self.where, self.service, self.session = where, service, session
        self.is_alone = service is None
        self.number = 0 if service is None else service.process  # of this process
        self.count = 1 if service is None else service.num_processes
        # Whether the program may wait in a collective for a process that never comes,
        # so that a failure must end this process.
        self.may_hang = True
        self.num_barriers = 0
        self._limit_s = limit_s
        self._guard = threading.Lock()
        self._num_calls = 0
        self._read: list[str] = []  # topics that all have read at their next `gather`
        self._has_failed = False
        self._has_left = threading.Event()

    # --- calls of all --------------------------------------------------------------

    def gather(self, what: str, make: Callable[[], JsonValue]) -> list[Any]:
        """Returns the values of all processes, in their order.

        Args:
          what: The subject, for messages.
          make: Makes this process's value. If it raises, the exception is raised here,
            and a ProcessError that tells it in the others.
        """
        if self.service is None:
            return [make()]
        topic = self._next_topic()
        self._run_call(topic, what, make)
        values = self._values(topic, what, range(self.count))
        silent_groups.clear()
        self._retract_read(topic)
        return values

    def agree(self, what: str, make: Callable[[], JsonValue], remedy: str) -> None:
        """Refuses values that differ; names the process and what differs."""
        self.check_alike(what, self.gather(what, make), remedy)

    def check_alike(
        self,
        what: str,
        values: Sequence[JsonValue],
        remedy: str,
        error_type: type[Exception] = ProcessError,
    ) -> None:
        """Refuses gathered values that differ."""
        others = [n for n, value in enumerate(values) if value != values[0]]
        if others:
            first, other = values[0], values[others[0]]
            raise error_type(
                f"{self.where}: expected {what} to be the same in all {len(values)} "
                f"processes, found {_differing(other, first)} in process "
                f"{_listed(others)}, and {_differing(first, other)} in process 0; "
                f"{remedy}",
            )

    def in_all(self, what: str, action: Callable[[], _T]) -> _T:
        """Returns the result of an action once it has succeeded in all processes.

        So no process fails where the others wait for it in a collective.
        """
        results: list[_T] = []
        self.gather(what, lambda: results.append(action()))
        return results[0]

    def first(self, what: str, make: Callable[[], JsonValue]) -> Any:
        """Returns the value of process 0; the others wait while it makes the value."""
        if self.service is None:
            return make()
        topic = self._next_topic()
        self._read.append(topic)
        if self.number:
            return self._values(topic, what, [0])[0]
        with self.reporting():
            return self._run_call(topic, what, make)

    def barrier(self, what: str) -> None:
        """Waits until every process has come; one thread may, beside the other calls.

        If a process failed, or did not come in time, none goes on that sees this.

        Args:
          what: What is not done if one does not come, for messages.
        """
        if self.service is None:
            return
        self.num_barriers += 1
        topic = f"barrier/{self.num_barriers}"
        self.post(topic)
        present = self._await_texts(topic, range(self.count), what)
        absent = [n for n in range(self.count) if n not in present]
        failed = self._failed(absent)
        if silent := [n for n in absent if n not in failed]:
            silent_groups.append(self)
            # They may come later, and must not go on then.
            self.post("failed", f"it waited for process {_listed(silent)} in vain")
            raise ProcessError(
                f"{self.where}: {what}: expected all {self.count} processes to be "
                f"ready within {self.limit_s:g} s, or to work on it, found none of "
                f"process {_listed(silent)}, which hangs, is stopped, or does "
                "something else. Look at it, end the run and start it again",
            )
        if failed:
            raise self._failed_error(failed, what)
        silent_groups.clear()
        if self.number == 0:
            self.retract(f"barrier/{self.num_barriers - 1}")

    def _next_topic(self) -> str:
        with self._guard:
            self._num_calls += 1
            return f"call/{self._num_calls}"

    def _run_call(self, topic: str, what: str, make: Callable[[], JsonValue]) -> Any:
        try:
            value = make()
            json.dumps(value)
        except BaseException as error:
            with contextlib.suppress(ProcessError):  # the service is gone
                self.post(topic, {"error": _error_text(error)})
            raise
        self.post(topic, {"what": what, "value": value})
        return value

    def _values(self, topic: str, what: str, numbers: Sequence[int]) -> list[Any]:
        texts = self._await_texts(topic, numbers, what)
        calls = {number: json.loads(text) for number, text in texts.items()}
        failed = {n: call["error"] for n, call in calls.items() if "error" in call} or {
            n: f"it makes another call, {call['what']}"
            for n, call in calls.items()
            if call["what"] != what
        }
        if failed:
            raise self._failed_error(failed, what)
        if missing := [number for number in numbers if number not in calls]:
            raise self._absent_error(missing, what)
        return [calls[number]["value"] for number in numbers]

    def _retract_read(self, topic: str) -> None:
        """Removes what all have read, since all have come to this topic."""
        read, self._read = self._read, [topic]
        for earlier in read if self.number == 0 else ():
            self.retract(earlier)

    # --- posted values -------------------------------------------------------------

    def post(
        self, topic: str, value: JsonValue = None, *, replaces: bool = False
    ) -> None:
        """Posts this process's value of a topic, once unless it replaces one."""
        text, key = json.dumps(value), f"{self._key(topic)}/{self.number}"
        if self.service is not None:
            with self._service_call(topic):
                self.service.put(key, text, self.limit_s, replaces=replaces)

    def posted(self, topic: str) -> dict[int, Any]:
        """Returns the values that processes have posted so far, by number."""
        if self.service is None:
            return {}
        with self._service_call(topic):
            texts = self.service.read_folder(self._key(topic), self.limit_s)
        return {int(k.rpartition("/")[2]): json.loads(v) for k, v in texts.items()}

    def _key(self, topic: str) -> str:
        return f"jaxinf/{self.session}/{topic}"

    def retract(self, topic: str) -> None:
        """Removes the values of all processes."""
        if self.service is not None:
            with self._service_call(topic):
                self.service.remove(self._key(topic), self.limit_s)

    @contextlib.contextmanager
    def _service_call(self, what: str) -> Iterator[None]:
        """Names the process that is gone if the service does not answer."""
        try:
            yield
        except ProcessError:
            raise
        except Exception as error:
            if isinstance(error, TimeoutError):
                silent_groups.append(self)
            raise ProcessError(
                f"{self.where}: {what}: expected JAX's coordination service in process "
                f"0, found {_error_text(error)}. Start the run again",
            ) from error

    # --- waiting -------------------------------------------------------------------

    @property
    def limit_s(self) -> float:
        """The longest wait for a process that reports no progress."""
        return LIMIT_S if self._limit_s is None else self._limit_s

    def _await_texts(
        self, topic: str, numbers: Sequence[int], what: str
    ) -> dict[int, str]:
        """Waits for processes' values; returns those of the ones that came in time."""
        assert self.service is not None
        heard_s = dict.fromkeys(numbers, time.monotonic())
        texts, progress = dict[int, str](), dict[int, Any]()

        def left_s(number: int) -> float:
            return heard_s[number] + self.limit_s - time.monotonic()

        with self._service_call(what):
            for number in numbers:
                key, text = f"{self._key(topic)}/{number}", None
                while text is None:
                    wait_s = max(_LAST_LOOK_S, min(left_s(number), SLICE_S))
                    text = self.service.get(key, wait_s)
                    if text is None and number in self._failed([number]):
                        text = self.service.get(key, _LAST_LOOK_S)  # it came meanwhile
                        break
                    if text is None:
                        before, progress = progress, self.posted("progress")
                        for other, count in progress.items():  # not only of this one
                            if before.get(other, count) != count:
                                heard_s[other] = time.monotonic()
                    if left_s(number) <= 0:
                        break
                if text is not None:
                    texts[number] = text
        return texts

    def _failed(self, missing: Sequence[int]) -> dict[int, str]:
        """Returns why processes failed, or why missing ones have left, by number."""
        closed = self.posted("closed") if missing else {}
        return {n: closed[n] for n in missing if n in closed} | self.posted("failed")

    def _absent_error(self, missing: Sequence[int], what: str) -> ProcessError:
        if failed := self._failed(missing):
            return self._failed_error(failed, what)
        silent_groups.append(self)
        return ProcessError(
            f"{self.where}: {what}: expected all {self.count} processes to make this "
            f"call within {self.limit_s:g} s, found none of process "
            f"{_listed(missing)}; make it in all of them, in one order",
        )

    def _failed_error(self, failed: dict[int, str], what: str) -> ProcessError:
        listed = "; ".join(f"process {n}: {text}" for n, text in sorted(failed.items()))
        text = f"{self.where}: {what}: another process of the run failed: {listed}"
        return ProcessError(text)

    # --- progress ------------------------------------------------------------------

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """Reports progress while its body runs, so that the others wait."""
        ended, count = threading.Event(), itertools.count(1)
        thread = self.report_progress(lambda: next(count), ended)
        try:
            yield
        finally:
            ended.set()
            if thread is not None and thread.ident is not None:
                thread.join()

    def report_progress(
        self, progress: Callable[[], int], ended: threading.Event | None = None
    ) -> threading.Thread | None:
        """Starts to tell the others from time to time that this process works.

        Args:
          progress: Returns a number that changes as long as this process works.
          ended: When to stop; by default when it leaves.

        Returns:
          The thread that does it; None if there are no others.
        """
        if self.service is None:
            return None
        ended = ended or self._has_left

        def tell() -> None:
            last = 0
            while not ended.wait(self.limit_s / 4):
                if (now := progress()) == last:
                    continue
                last = now
                try:
                    self.post("progress", now, replaces=True)
                except ProcessError as error:  # the service is gone
                    _LOG.debug("%s: no progress was told: %s", self.where, error)
                    return

        thread = threading.Thread(target=tell, name="jaxinf-progress", daemon=True)
        with contextlib.suppress(RuntimeError):  # at the program's exit
            thread.start()
        return thread

    # --- failures ------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """Tells the others that this process fails; does not block."""
        with self._guard:
            if self.service is None or self._has_failed:
                return
            self._has_failed = True
        if not isinstance(error, ProcessError):  # else the others know
            text = _error_text(error)
            tell = functools.partial(self._try_post, "failed", text)
            try:
                threading.Thread(target=tell, name="jaxinf-tell", daemon=True).start()
            except RuntimeError:  # at the program's exit there are no new threads
                tell()

    def leave(self) -> None:
        """Tells the others that this process makes no more calls."""
        self._has_left.set()
        self._try_post("closed", "it closed the store")

    def _try_post(self, topic: str, text: str) -> None:
        try:
            self.post(topic, text)
        except ProcessError as error:  # the service is gone, and with it the others
            _LOG.debug("%s: the others were not told: %s", self.where, error)

    def failure_of_others(self, step: int) -> ProcessError:
        """Waits for the error of a step that failed in another process; returns it."""
        until_s = time.monotonic() + 5
        while not (failed := self.posted("failed")):
            if time.monotonic() > until_s:
                return ProcessError(
                    f"{self.where}: step {step}: another process of the run failed, "
                    "and did not say why; see its output",
                )
            time.sleep(0.01)
        return self._failed_error(failed, f"step {step}")


def all_processes(name: str, *, limit_s: float | None = None) -> Group:
    """Returns the group of all processes of the program.

    Args:
      name: What its messages begin with, the same in all processes.
    """
    return Group(name, compat.coordination(), name, limit_s=limit_s)


def join_group(path: Path) -> Group:
    """Returns the group of the processes that open a path; all processes call it.

    If all give one path, they have it together. If each gives a path of its own, each
    is alone. Anything else is refused.
    """
    program = all_processes("program")
    if program.is_alone:
        return Group(path)
    opening = {"path": str(path), "session": uuid.uuid4().hex}
    meeting = Group(path, program.service, f"open/{next(_numbers)}")
    openings = meeting.gather("open_store", lambda: opening)
    paths = [each["path"] for each in openings]
    if len(set(paths)) == len(paths):
        return Group(path)
    if len(set(paths)) > 1:
        listed = "; ".join(f"process {n}: {each}" for n, each in enumerate(paths))
        raise ProcessError(
            f"{path}: expected one path in all {len(paths)} processes for a run on a "
            f"mesh of all, or a path of its own in each, found {listed}",
        )
    return Group(path, program.service, openings[0]["session"])


def _error_text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _differing(value: JsonValue, other: JsonValue) -> str:
    if isinstance(value, dict) and isinstance(other, dict):
        value = {key: each for key, each in value.items() if other.get(key) != each}
    text = json.dumps(value)
    return text if len(text) <= 200 else f"{text[:200]}…"
