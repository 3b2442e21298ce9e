"""What the processes of a run decide together: each step's plan, begin and end.

    begin ─► programs, whose collectives need all ─► agree ─► updates ─► agree ─► commit

A process that fails on the way, or is interrupted, goes on with zeros in place of what
it lacks, since the others would wait for it in a collective. It says so where all
agree.

Invariant: all processes run the same programs in the same order, and end the same
steps.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from jaxinf.engine import Training
from jaxinf.errors import ProcessError, StreamError
from jaxinf.typing import JsonValue

_T = TypeVar("_T")


class Together:
    """The processes of a run, as the steps of one of them see them.

    Args:
      training: The store that they have together; None for a process alone.

    Attributes:
      is_alone: Whether the process decides by itself.
    """

    def __init__(self, training: Training | None = None) -> None:
        self.is_alone = training is None or training.group.is_alone
        self._training = training
        self._failure: Exception | None = None
        self._is_interrupted = False
        if training is not None:
            training.group.may_hang = False  # it comes to the step's end

    def values(self, what: str, value: Callable[[], JsonValue]) -> list[Any]:
        """Returns the values of all processes.

        Raises:
          ProcessError: Another process failed to make its own.
        """
        if self._training is None:
            return [value()]
        return self._training.group.gather(what, value)

    def call(self, what: str, action: Callable[[], _T]) -> _T:
        """Returns what an action returns, when it has gone well in all processes."""
        found: list[_T] = []
        self.values(what, lambda: found.append(action()))
        return found[0]

    def same(self, what: str, value: Callable[[], JsonValue], remedy: str) -> None:
        """Refuses values that differ.

        Raises:
          StreamError: Names the processes.
        """
        found = self.values(what, value)
        others = [str(n) for n, one in enumerate(found) if one != found[0]]
        if others:
            raise StreamError(
                f"jaxinf.stream: expected {what} to be the same in all "
                f"{len(found)} processes, found another one in process "
                f"{', '.join(others)} than in process 0; {remedy}"
            )

    # --- a step --------------------------------------------------------------------

    def begin(self, what: str, batch: str, prepare: Callable[[], None]) -> None:
        """Begins a step or a call of a function in all processes.

        Args:
          prepare: Prepares for it; meets no other process.

        Raises:
          ProcessError: Another process has failed, or does not come.
          StreamError: The batches have other forms.
        """
        self._failure, self._is_interrupted = None, False

        def form() -> JsonValue:
            prepare()
            return batch

        try:
            self.same(f"the batch of {what}", form, "give all the same shapes")
        except ProcessError as error:
            if self._training is not None and self._training.group.has_failed:
                self._training.fail(error)
            raise

    @contextlib.contextmanager
    def holding(self) -> Iterator[None]:
        """Keeps an error of its context until all agree, unless alone."""
        try:
            yield
        except Exception as error:
            if self.is_alone:
                raise
            self._failure = self._failure or error

    def noting(self, check: Callable[[], None]) -> Callable[[], None]:
        """Returns a check that keeps an interrupt until all agree."""
        if self.is_alone:
            return check

        def note() -> None:
            try:
                check()
            except KeyboardInterrupt:
                self._is_interrupted = True

        return note

    def agree(self, action: Callable[[], Sequence[str]]) -> list[str]:
        """Returns the leaves that refuse the step, those of all processes.

        Args:
          action: Waits for what is under way; returns the leaves that refuse the step
            here. Meets no other process.

        Raises:
          KeyboardInterrupt: This process was interrupted.
          ProcessError: Another one was, or failed.
          Exception: What this process has held, or the action has raised.
        """
        training = self._training
        if training is None or self.is_alone:
            return list(action())
        step = training.opened.finished.step + 1

        def value() -> JsonValue:
            refusing = list(action())
            if self._failure is not None:
                raise self._failure
            return {"refusing": refusing, "is_interrupted": self._is_interrupted}

        try:
            found = self.values(f"the end of step {step}", value)
        except BaseException as error:
            training.fail(error)
            raise
        if self._is_interrupted:
            raise KeyboardInterrupt
        gave_up = [n for n, one in enumerate(found) if one["is_interrupted"]]
        if gave_up:
            raise ProcessError(
                f"{training.group.where}: step {step}: process "
                f"{', '.join(map(str, gave_up))} was interrupted (Ctrl-C), so all "
                f"gave the step up; the store stays at step {step - 1}",
                gave_up,
                step,
            )
        return list(dict.fromkeys(name for one in found for name in one["refusing"]))
