"""Times of the work of a store's threads, for a picture of a step; off by default.

Invariant: before `start` nothing is recorded, and no lock is taken.
"""

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Span", "Timeline"]


@dataclass(frozen=True)
class Span:
    """A piece of work with its times.

    Attributes:
      kind: ``"read"``, ``"checksum"``, ``"update"``, ``"write"``, ``"leaf"``,
        ``"drain"``, ``"sync"``, ``"publish"``; of a streamed step also ``"program"``
        and ``"fetch"``.
      thread: name of the thread.
      began_s, ended_s: beginning and end by `time.perf_counter`.
    """

    kind: str
    thread: str
    began_s: float
    ended_s: float


class Timeline:
    """Spans of all threads, in the order in which they ended. Thread-safe."""

    def __init__(self) -> None:
        self._spans: list[Span] | None = None

    def start(self) -> None:
        """Records spans from here on."""
        self._spans = []

    def stop(self) -> list[Span]:
        """Stops recording, and returns the recorded spans."""
        spans, self._spans = self._spans or [], None
        return spans

    def span(self, kind: str) -> contextlib.AbstractContextManager[None]:
        """Records the time of the body."""
        return _OFF if self._spans is None else self._kept(self._spans, kind)

    def add(self, kind: str, began_s: float, ended_s: float) -> None:
        """Records work whose times are known, by `time.perf_counter`."""
        if self._spans is not None:
            name = threading.current_thread().name
            self._spans.append(Span(kind, name, began_s, ended_s))

    @contextlib.contextmanager
    def _kept(self, spans: list[Span], kind: str) -> Iterator[None]:
        began_s = time.perf_counter()
        try:
            yield
        finally:
            name = threading.current_thread().name
            spans.append(Span(kind, name, began_s, time.perf_counter()))


_OFF = contextlib.nullcontext()
