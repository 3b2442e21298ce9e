"""What processes say to each other beside their calls, over JAX's coordination service.

     process 0:  say("begun") ─► key ─► hear(0, "begun")  :process 1
     process 1:  signs of life, while it works ─► hear(1, …) goes on waiting

Invariant: no collective of the devices is involved, and names are used once.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxinf import compat
from jaxinf.errors import ProcessError
from jaxinf.typing import JsonValue

SLICE_S = 1.0
"""Time between looks at whether a process is gone."""

_LAST_LOOK_S = 0.001


class Channel:
    """What the processes say to each other of one thing, from any thread.

    Without a service nothing is said, and nobody hears. Names are used once.

    Args:
      path: the path of the run, for messages.
      has_failed: whether the run has, so that no more will be said.
      silence_s: the longest silence of a process, all of which call `living`; None for
        no limit.
    """

    def __init__(
        self,
        service: compat.Coordination | None,
        path: Path,
        place: str,
        has_failed: Callable[[], bool],
        silence_s: float | None = None,
    ) -> None:
        self._service, self._path, self._place = service, path, place
        self._has_failed, self._silence_s = has_failed, silence_s
        self.number = 0 if service is None else service.process

    @contextlib.contextmanager
    def living(self) -> Iterator[None]:
        """Says all the while that this process is there, for those that hear it."""
        if self._service is None or self._silence_s is None:
            yield
            return
        wait_s = self._silence_s / 4
        service, ended = self._service, threading.Event()

        def live() -> None:
            number = 0
            while not ended.wait(wait_s):
                number += 1
                service.put(f"{self._alive(self.number)}/{number}", "")

        thread = threading.Thread(target=live, name="jaxinf-live", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def say(self, what: str, value: JsonValue = None) -> None:
        """Says something; does not wait for who hears it."""
        if self._service is not None:
            key = f"{self._place}/{what}/{self.number}"
            self._service.put(key, json.dumps(value))

    def fail(self, why: str) -> None:
        """Says that this process does no more here; others that wait hear why."""
        with contextlib.suppress(Exception):  # the service is gone, and they with it
            self.say("failed", why)

    def hear(self, number: int, what: str, stop: threading.Event | None = None) -> Any:
        """Waits for what another process says, as long as it may say it.

        Raises:
          ProcessError: a process said that it fails here, the run has failed, the
            process is silent, or `stop` is set.
        """
        assert self._service is not None
        key = f"{self._place}/{what}/{number}"
        num_signs, since_s = -1, time.monotonic()
        while True:
            text = self._service.get(key, SLICE_S)
            if text is not None:
                return json.loads(text)
            failed = self._service.below(f"{self._place}/failed")
            if failed:
                told = {int(k.rpartition("/")[2]): v for k, v in failed.items()}
                raise failed_error(self._path, told, None)
            if self._has_failed() or (stop is not None and stop.is_set()):
                text = self._service.get(key, _LAST_LOOK_S)  # said in the meantime
                if text is not None:
                    return json.loads(text)
                raise ProcessError(
                    f"{self._path}: the run ends before process {number} has done its "
                    "part",
                    [number],
                )
            if self._silence_s is None:
                continue
            found = len(self._service.below(self._alive(number)))
            if found != num_signs:
                num_signs, since_s = found, time.monotonic()
            elif time.monotonic() - since_s > self._silence_s:
                raise ProcessError(
                    f"{self._path}: expected a sign of process {number} within "
                    f"{self._silence_s:g} s, found none; look at its output",
                    [number],
                )

    def _alive(self, number: int) -> str:
        return f"{self._place}/alive/{number}"


def failed_error(
    path: Path, failed: Mapping[int, str], step: int | None, what: str = ""
) -> ProcessError:
    """Returns the error of processes that have failed.

    Args:
      step: the step in which they failed, if there is one.
    """
    where = f"step {step}: " if step is not None else f"{what}: " if what else ""
    listed = "; ".join(f"process {n}: {text}" for n, text in sorted(failed.items()))
    return ProcessError(
        f"{path}: {where}another process of the run failed: {listed}",
        sorted(failed),
        step,
    )
