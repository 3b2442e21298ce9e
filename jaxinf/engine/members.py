"""The processes of a run, as one of them sees them: what they tell each other.

     agree: every process gives a value ──► keys ──► each gets the values of all
     meet:  every process has done its part of a commit ──► keys ──► all go on

Invariant: everything goes over JAX's coordination service, host-side, and never over a
collective of the devices. Names carry the session and a counter, so that no call meets
one of an earlier opening. A process that fails says so to the others, and comes to
where they wait for it.
"""

import atexit
import json
import logging
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from jaxinf import compat
from jaxinf.engine.channel import SLICE_S, Channel, failed_error
from jaxinf.errors import ProcessError, StoreFormatError
from jaxinf.store import Member, member_name
from jaxinf.typing import JsonValue

_T = TypeVar("_T")

LIMIT_S = 60.0
"""The longest wait for another process that reports no progress."""

_LOG = logging.getLogger("jaxinf")
_GRACE_S = 10.0
_LEAVE_S = 1.5
_num_joined = 0
_GUARD = threading.Lock()


class Members:
    """The processes that have a store together; alone without a service. Thread-safe.

    Args:
      path: the path of the run, for messages.
      service: the service; None in a program of one process, or for a store of its own.
      session: id of this opening, the same in all processes.

    Attributes:
      number: number of this process, 0 if it is alone.
      may_hang: whether the program may wait for another process in a collective
        without end, so that a failure must end this process.
    """

    def __init__(
        self,
        path: Path,
        service: compat.Coordination | None = None,
        session: str = "",
    ) -> None:
        self.path = path
        self._service = service
        self._session = session
        self.number = 0 if service is None else service.process
        self.count = 1 if service is None else service.num_processes
        self._guard = threading.Lock()
        self.may_hang = True
        self._num_agreed = 0
        self._num_met = 0
        self._has_told = False
        self._has_left = threading.Event()
        self._ending = threading.Lock()  # held until the process ends
        self._is_exiting = False

    @property
    def is_alone(self) -> bool:
        """Whether the store belongs to this process alone."""
        return self._service is None

    @property
    def member(self) -> Member | None:
        """This process's part in a run that begins now; None if it is alone."""
        if self._service is None:
            return None
        return Member(self._session, self.number, self.count)

    def agree(self, what: str, value: Callable[[], JsonValue]) -> list[Any]:
        """Returns the values of all processes, in their order; all make this call.

        Args:
          what: what it is about, for messages.
          value: makes this process's; an exception of it is raised here, and told to
            the others.

        Raises:
          ProcessError: another process failed to make its value, or did not come.
        """
        if self._service is None:
            return [value()]
        with self._guard:
            self._num_agreed += 1
            number = self._num_agreed
        folder = f"jaxinf/{self._session}/agreed"
        found = _agree(
            self._service,
            f"{folder}/{number}",
            what,
            value,
            self.path,
            self._gone,
            self._progress,
        )
        if self.number == 0:  # all have come here, so they have read the one before
            self._service.remove(f"{folder}/{number - 1}")
        return found

    def in_all(self, what: str, action: Callable[[], _T]) -> _T:
        """Returns what an action returns, when it has gone well in all processes.

        So no process fails where the others wait for it in a collective.

        Raises:
          ProcessError: as `agree`.
        """
        found: list[_T] = []
        self.agree(what, lambda: found.append(action()))
        return found[0]

    def channel(self, name: str, silence_s: float | None = None) -> Channel:
        """What the processes say to each other beside their calls, by a new name."""
        place = f"jaxinf/{self._session}/{name}"
        return Channel(
            self._service,
            self.path,
            place,
            lambda: self.has_failed,
            silence_s,
        )

    # --- commits -------------------------------------------------------------------

    def next_commit(self) -> str:
        """The id of the commit that meets next; empty if this process is alone."""
        if self._service is None:
            return ""
        return f"{self._session}-{self._num_met}"

    def meet(self, step: int) -> None:
        """Waits until every process has its part of a step durable.

        Raises:
          ProcessError: a process failed, or did not come in time; nothing may be
            published then.
        """
        service, began_s = self._service, time.monotonic()
        if service is None:
            return
        folder = self._next_meeting()
        try:
            service.put(f"{folder}/{self.number}", "")
            waiting = _Waiting(service, self._told, self._progress, began_s)
            absent = [
                number
                for number in range(self.count)
                if waiting.heard(f"{folder}/{number}", number) is None
            ]
            failed = self._told()
            missing = [number for number in absent if number not in failed]
            if self.number == 0 and not absent:
                service.remove(self._meeting(self._num_met - 1))
            if missing:  # they may come later, and must not publish then
                text = f"it waited for process {', '.join(map(str, missing))} in vain"
                service.put(f"{self._failures}/{self.number}", text)
        except Exception as error:
            raise ProcessError(
                f"{self.path}: step {step}: expected JAX's coordination service in "
                f"process 0, found {type(error).__name__}: {error}; step {step} "
                "is not committed here. Start the run again",
                [0],
                step,
            ) from error
        if missing:
            names = ", ".join(map(str, missing))
            raise ProcessError(
                f"{self.path}: step {step}: expected all {self.count} processes to "
                f"have it durable within {LIMIT_S:g} s, or to work on it, found none "
                f"of process {names}, which hangs, is stopped, or "
                f"does something else; step {step} is not committed here. Look at that "
                "process, end the run and start it again",
                missing,
                step,
            )
        if failed:
            raise failed_error(self.path, failed, step)

    def _next_meeting(self) -> str:
        with self._guard:
            self._num_met += 1
            return self._meeting(self._num_met)

    def _meeting(self, number: int) -> str:
        return f"jaxinf/{self._session}/commit/{number}"

    # --- progress ------------------------------------------------------------------

    def report(self, progress: Callable[[], int]) -> None:
        """Tells the others from time to time how far this process is, until it leaves.

        Args:
          progress: a number that changes as long as the store moves bytes, or makes,
            links, copies or flushes files.
        """
        service = self._service
        if service is None:
            return

        def tell() -> None:
            said = 0
            while not self._has_left.wait(LIMIT_S / 4):
                if (now := progress()) == said:
                    continue
                said = now
                try:
                    service.put(f"{self._reports}/{self.number}", str(said), again=True)
                except Exception as error:  # the service is gone
                    _LOG.debug("%s: no progress was told: %s", self.path, error)
                    return

        threading.Thread(target=tell, name="jaxinf-progress", daemon=True).start()

    @property
    def _reports(self) -> str:
        return f"jaxinf/{self._session}/progress"

    def _progress(self) -> dict[int, str]:
        """What the processes have reported of their progress, by number."""
        assert self._service is not None
        return _by_number(self._service.below(self._reports))

    # --- failures ------------------------------------------------------------------

    def tell(self, error: BaseException) -> None:
        """Tells the others that this process fails; does not block for long.

        It comes to where they meet next, so they need not wait for the time-out.
        """
        with self._guard:
            if self._service is None or self._has_told:
                return
            self._has_told = True
        if isinstance(error, ProcessError):  # they know, or tell the others themselves
            return
        text = f"{type(error).__name__}: {error}"
        threading.Thread(
            target=self._tell, args=(text,), name="jaxinf-tell", daemon=True
        ).start()

    def _tell(self, text: str) -> None:
        assert self._service is not None
        try:
            self._service.put(f"{self._failures}/{self.number}", text)
            self._service.put(f"{self._next_meeting()}/{self.number}", "")
        except Exception as error:  # the service is gone, and with it the others
            _LOG.debug("%s: the others were not told: %s", self.path, error)

    @property
    def _failures(self) -> str:
        return f"jaxinf/{self._session}/failed"

    def _told(self) -> dict[int, str]:
        """What the processes that fail have said, by number."""
        assert self._service is not None
        return _by_number(self._service.below(self._failures))

    def _gone(self) -> dict[int, str]:
        """What the processes have said that make no further calls, by number."""
        assert self._service is not None
        return _by_number(self._service.below(self._closed)) | self._told()

    @property
    def _closed(self) -> str:
        return f"jaxinf/{self._session}/closed"

    @property
    def has_failed(self) -> bool:
        """Whether a process has said that its store failed."""
        return self._service is not None and bool(self._told())

    def leave(self) -> None:
        """Tells the others that this process makes no further calls."""
        self._has_left.set()
        if self._service is None:
            return
        try:
            self._service.put(f"{self._closed}/{self.number}", "it closed the store")
        except Exception as error:  # the service is gone, and with it the others
            _LOG.debug("%s: the others were not told: %s", self.path, error)

    def failure_of_others(self, step: int) -> ProcessError:
        """The error of a step that another process has failed; waits for its words."""
        until_s = time.monotonic() + 5
        while not (found := {} if self._service is None else self._told()):
            if time.monotonic() > until_s:
                return ProcessError(
                    f"{self.path}: step {step}: another process of the run failed, "
                    "and did not say why; see its output",
                    step=step,
                )
            time.sleep(0.01)
        return failed_error(self.path, found, step)

    def end_unless(self, is_known: Callable[[], bool], error: BaseException) -> None:
        """Ends this process soon if the program does not learn of a failure.

        Its main thread may wait in a collective for a process that never comes, and
        JAX cannot end that wait. The exit status is 1. JAX aborts a process that finds
        another one or the service gone, so all leave together; the one with the service
        waits longest.
        """
        service = self._service
        if service is None or not self.may_hang:
            return

        def watch() -> None:
            until_s = time.monotonic() + _GRACE_S
            while time.monotonic() < until_s:
                if is_known():
                    return
                time.sleep(0.1)
            print(
                f"{type(error).__name__}: {error}\n{self.path}: process "
                f"{self.number} ends, since it waits for another one in a collective",
                file=sys.stderr,
                flush=True,
            )
            with self._ending:
                leave_s = _LEAVE_S if self.number else 2 * _LEAVE_S
                if self._is_exiting:  # JAX leaves already
                    time.sleep(leave_s)
                else:
                    service.leave(leave_s)
                os._exit(1)

        atexit.register(self._exit)
        threading.Thread(target=watch, name="jaxinf-end", daemon=True).start()

    def _exit(self) -> None:
        """Called at exit, before JAX leaves the service, which is done once."""
        self._is_exiting = True
        with self._ending:
            pass


def member_path(path: Path, number: int) -> Path:
    """Returns the place of a member's store below the path of a run."""
    return path / member_name(number)


def meet_members(path: Path) -> Members:
    """Finds out who has a path; in a program of several processes all call it.

    If all give one path, they have it together. If each gives a path of its own, each
    is alone.

    Args:
      path: the path of a store or a run.

    Raises:
      ProcessError: some do not come, or some give one path and others another.
    """
    global _num_joined
    service = compat.coordination()
    if service is None:
        return Members(path)
    with _GUARD:
        _num_joined += 1
        folder = f"jaxinf/open/{_num_joined}"

    def own() -> JsonValue:
        return {"path": str(path), "session": uuid.uuid4().hex}

    found = _agree(service, folder, "open_store", own, path)
    paths = [one["path"] for one in found]
    if len(set(paths)) == len(paths):
        return Members(path)
    if len(set(paths)) > 1:
        listed = "; ".join(f"process {n}: {one}" for n, one in enumerate(paths))
        raise ProcessError(
            f"{path}: expected one path in all {len(paths)} processes for a run on a "
            f"mesh of all, or a path of its own in each, found {listed}",
            range(len(paths)),
        )
    return Members(path, service, found[0]["session"])


def join_members(path: Path) -> Members:
    """As `meet_members`, for the members of a run, or a store of one process.

    Raises:
      ProcessError: as `meet_members`.
      StoreFormatError: there is a store of one process at the path.
    """
    members = meet_members(path)
    if members.is_alone:
        return members
    if (path / "jaxinf.json").exists():
        raise StoreFormatError(
            f"{path}: expected a run of {members.count} processes, which has a store "
            f"in {member_path(path, 0).name} and so on, found the store of one "
            f"process; {division_advice(path, members.count)}"
        )
    return members


def by_first(members: Members, what: str, action: Callable[[], None]) -> None:
    """Does something in process 0; the others wait as long as that goes on.

    Raises:
      Exception: it failed; the others get a ProcessError.
    """
    channel = members.channel(what, LIMIT_S)
    if members.number:
        channel.hear(0, "done")
        return
    with channel.living():
        try:
            action()
        except BaseException as error:
            channel.fail(f"{type(error).__name__}: {error}")
            raise
    channel.say("done")


def division_advice(path: Path, count: int) -> str:
    """Says how a run goes on with another number of processes."""
    return (
        f'divide it among {count}: jaxinf store copy "{path}" "{path}" --processes '
        f"{count} (the trainer's --elastic does it), or start it as before"
    )


def place_of_root(root: Path) -> JsonValue:
    """Returns what tells whether two processes would share a CSD root."""
    return [socket.gethostname(), os.path.realpath(root)]


def _agree(
    service: compat.Coordination,
    folder: str,
    what: str,
    value: Callable[[], JsonValue],
    path: Path,
    gone: Callable[[], dict[int, str]] = dict,
    progress: Callable[[], dict[int, str]] = dict,
) -> list[Any]:
    error: BaseException | None = None
    try:
        own = json.dumps({"what": what, "value": value()})
    except BaseException as failure:
        error = failure
        own = json.dumps({"error": f"{type(failure).__name__}: {failure}"})
    service.put(f"{folder}/{service.process}", own)
    if error is not None:
        raise error
    waiting = _Waiting(service, gone, progress, time.monotonic())
    found: list[Any] = []
    missing, failed = [], {}
    for number in range(service.num_processes):
        text = waiting.heard(f"{folder}/{number}", number)
        told = {} if text is None else json.loads(text)
        if text is None and number in (left := gone()):
            failed[number] = left[number]
        elif text is None:
            missing.append(number)
        elif "error" in told:
            failed[number] = told["error"]
        elif told["what"] != what:
            failed[number] = f"it makes another call, {told['what']}"
        found.append(told.get("value"))
    if failed:
        raise failed_error(path, failed, None, what)
    if missing:
        raise ProcessError(
            f"{path}: {what}: expected all {service.num_processes} processes to make "
            f"this call within {LIMIT_S:g} s, found none of process "
            f"{', '.join(map(str, missing))}; make it in all of them, in one order",
            missing,
        )
    return found


class _Waiting:
    """Waits for what each process says, as long as it may still say it.

    Args:
      gone: what the processes have said that say nothing more, by number.
      progress: what they have reported of their progress, by number; a process that
        reports something else may take another `LIMIT_S`.
    """

    def __init__(
        self,
        service: compat.Coordination,
        gone: Callable[[], dict[int, str]],
        progress: Callable[[], dict[int, str]],
        since_s: float,
    ) -> None:
        self._service, self._gone, self._progress = service, gone, progress
        self._since_s = since_s
        self._reports: dict[int, str] = {}
        self._changed_s: dict[int, float] = {}

    def heard(self, key: str, number: int) -> str | None:
        while True:
            since_s = self._changed_s.get(number, self._since_s)
            left_s = since_s + LIMIT_S - time.monotonic()
            text = self._service.get(key, max(0.001, min(left_s, SLICE_S)))
            if text is not None:
                return text
            if number in self._gone():
                return self._service.get(key, 0.001)  # what it has said before
            before, self._reports = self._reports, self._progress()
            for one, report in self._reports.items():  # not only of the awaited one
                if before.get(one, report) != report:
                    self._changed_s[one] = time.monotonic()
            if left_s <= 0 and self._changed_s.get(number, 0.0) <= since_s:
                return None


def _by_number(found: dict[str, str]) -> dict[int, str]:
    return {int(key.rpartition("/")[2]): text for key, text in found.items()}
