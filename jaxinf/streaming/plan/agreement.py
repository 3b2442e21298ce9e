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
    """

    def __init__(self, training: Training | None = None) -> None:
        is_alone = training is None or training.members.is_alone
        self._training = None if is_alone else training
        self._failure: Exception | None = None
        self._is_interrupted = False
        if self._training is not None:
            self._training.members.may_hang = False  # it comes to the step's end

    @property
    def is_alone(self) -> bool:
        """Whether the process decides by itself."""
        return self._training is None

    # --- plans ---------------------------------------------------------------------

    def call(self, what: str, action: Callable[[], _T]) -> _T:
        """Returns what an action returns, when it has gone well in all processes.

        Raises:
          ProcessError: It failed in another process.
        """
        if self._training is None:
            return action()
        return self._training.members.in_all(what, action)

    def values(self, what: str, value: Callable[[], JsonValue]) -> list[Any]:
        """Returns the values of all processes; see `call`."""
        if self._training is None:
            return [value()]
        return self._training.members.agree(what, value)

    def same(self, what: str, value: Callable[[], JsonValue], remedy: str) -> None:
        """Refuses values that differ.

        Raises:
          StreamError: Names the processes.
        """
        found = self.values(what, value)
        others = [n for n, one in enumerate(found) if one != found[0]]
        if others:
            raise StreamError(
                f"jaxinf.stream: expected {what} to be the same in all "
                f"{len(found)} processes, found another one in process "
                f"{', '.join(map(str, others))} than in process 0; {remedy}"
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
            if self._training is not None and self._training.members.has_failed:
                self._training.fail(error)
            raise

    def hold(self, error: Exception) -> None:
        """Keeps an error until all agree; raises it if the process is alone."""
        if self._training is None:
            raise error
        self._failure = self._failure or error

    @contextlib.contextmanager
    def holding(self) -> Iterator[None]:
        """Holds an error of its context; see `hold`."""
        try:
            yield
        except Exception as error:
            self.hold(error)

    def noting(self, check: Callable[[], None]) -> Callable[[], None]:
        """Returns a check that keeps an interrupt until all agree."""
        if self._training is None:
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
        if training is None:
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
        interrupted = [n for n, one in enumerate(found) if one["is_interrupted"]]
        if interrupted:
            raise ProcessError(
                f"{training.members.path}: step {step}: process "
                f"{', '.join(map(str, interrupted))} was interrupted (Ctrl-C), so all "
                f"gave the step up; the store stays at step {step - 1}",
                interrupted,
                step,
            )
        return list(dict.fromkeys(name for one in found for name in one["refusing"]))
