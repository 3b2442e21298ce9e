"""Measures how long each call of a step runs.

The thread that runs a step also waits for params, for values and for updates. So it may
learn late that a call has ended. A thread of its own learns it at once.

Invariant: a time is that of a call alone, from its start, or the end of the call before
it, to its own end.
"""

import contextlib
import queue
import threading
import time
from typing import Any

import jax


class Watch:
    """Waits for the calls of a step, in order. All methods are of one thread."""

    def __init__(self) -> None:
        self._called: queue.SimpleQueue[tuple[float, Any] | None] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[float] = queue.SimpleQueue()
        self._num_called = 0
        self._thread: threading.Thread | None = None

    def called(self, began_s: float, output: Any) -> None:
        """Notes that a call has been handed to the device.

        Args:
          output: One of its outputs; None if it has ended.
        """
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name="jaxinf-watch", daemon=True
            )
            self._thread.start()
        self._called.put((began_s, output))
        self._num_called += 1

    def take(self) -> list[float]:
        """Returns the times of calls since the last `take`; blocks until they end."""
        count, self._num_called = self._num_called, 0
        return [self._ended.get() for _ in range(count)]

    def close(self) -> None:
        """Ends the thread; idempotent."""
        if self._thread is not None:
            self._called.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        before_s = 0.0
        while (one := self._called.get()) is not None:
            began_s, output = one
            if output is not None:
                with contextlib.suppress(RuntimeError):  # the step raises it
                    jax.block_until_ready(output)
            del one, output
            ended_s = time.perf_counter()
            self._ended.put(ended_s - max(began_s, before_s))
            before_s = ended_s
