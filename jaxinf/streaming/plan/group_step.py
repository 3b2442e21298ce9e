"""A step of several processes, which all begin and end alike.

    begin ─► programs, whose collectives need all ─► agree ─► updates ─► agree ─► commit

A process that fails on the way, or is interrupted, goes on with zeros in place of what
it lacks, since the others would wait for it in a collective. It says so where all
agree.

Invariant: all processes run the same programs in the same order, and end the same
steps.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence

from jaxinf.engine import Engine
from jaxinf.errors import ProcessError
from jaxinf.processes import Group
from jaxinf.typing import JsonValue


class GroupStep:
    """What this process has to say where all end a step.

    Args:
      engine: The engine of the run's store; None for a process alone.

    Attributes:
      group: The processes of the run.
    """

    def __init__(self, engine: Engine | None = None) -> None:
        self.group = Group("jaxinf.stream") if engine is None else engine.group
        self._engine = engine
        self._failure: Exception | None = None
        self._is_interrupted = False
        self.group.may_hang = False  # it comes to the step's end

    def begin(self, what: str, batch: str, prepare: Callable[[], None]) -> None:
        """Begins a step or a call of a function in all processes.

        Args:
          prepare: Prepares for it; meets no other process.

        Raises:
          ProcessError: Another process has failed, does not come, or has a batch of
            another form.
        """
        self._failure, self._is_interrupted = None, False

        def form() -> JsonValue:
            prepare()
            return batch

        try:
            self.group.agree(f"the batch of {what}", form, "give all the same shapes")
        except ProcessError as error:
            if self._engine is not None and self.group.has_failed:
                self._engine.health.fail(error)
            raise

    @contextlib.contextmanager
    def holding(self) -> Iterator[None]:
        """Keeps an error of its context until all agree, unless alone."""
        try:
            yield
        except Exception as error:
            if self.group.is_alone:
                raise
            self._failure = self._failure or error

    def noting(self, check: Callable[[], None]) -> Callable[[], None]:
        """Returns a check that keeps an interrupt until all agree, unless alone."""

        def note() -> None:
            try:
                check()
            except KeyboardInterrupt:
                self._is_interrupted = True

        return check if self.group.is_alone else note

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
        engine = self._engine
        if engine is None or self.group.is_alone:
            return list(action())
        step = engine.opened.finished.step + 1

        def value() -> JsonValue:
            refusing = list(action())
            if self._failure is not None:
                raise self._failure
            return [refusing, self._is_interrupted]

        try:
            found = self.group.gather(f"the end of step {step}", value)
        except BaseException as error:
            engine.health.fail(error)
            raise
        if self._is_interrupted:
            raise KeyboardInterrupt
        gave_up = [n for n, (_, is_interrupted) in enumerate(found) if is_interrupted]
        if gave_up:
            raise ProcessError(
                f"{self.group.where}: step {step}: process "
                f"{', '.join(map(str, gave_up))} was interrupted (Ctrl-C), so all "
                f"gave the step up; the store stays at step {step - 1}",
                gave_up,
                step,
            )
        return list(dict.fromkeys(name for refusing, _ in found for name in refusing))
