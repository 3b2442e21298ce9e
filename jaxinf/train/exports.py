"""What a run says of its exports, and their end.

Invariant: training never waits for an export; a complete run does, until Ctrl-C.
"""

from rich.console import Console

from jaxinf.engine import Store
from jaxinf.terminal import format_bytes

_FAILED = 3  # the exit status of a complete run


class ExportsOfRun:
    """The exports of a run; none without a store.

    Args:
      console: where exported steps are said; the store logs the others.
    """

    def __init__(self, store: Store | None, console: Console) -> None:
        self._store, self._console = store, console
        self._num_said = 0

    def say_new(self) -> None:
        """Says which steps have been exported since the last call."""
        infos = [] if self._store is None else self._store.exports()
        for info in infos[self._num_said :]:
            if info.outcome == "under way":
                break
            self._num_said += 1
            if info.outcome == "exported":
                self._console.print(f"step {info.step}: exported to {info.url}")

    def end(self, *, waits: bool = True) -> int:
        """Waits for the export under way, or gives it up; returns the exit status.

        Ctrl-C ends the wait, and gives it up.
        """
        if self._store is None:
            return 0
        self._store.wait()  # for the last step, which may be due
        under_way = [i for i in self._store.exports() if i.outcome == "under way"]
        try:
            if under_way and waits:
                self._wait(self._store, under_way[0].step)
            self._store.end_export(waits=waits)
        except KeyboardInterrupt:
            pass  # the export was given up, which the store has logged
        self.say_new()
        failed = [i.step for i in self._store.exports() if i.outcome == "failed"]
        if not failed:
            return 0
        if waits:  # else the status is that of the signal
            steps = ", ".join(map(str, failed))
            text = f"exports of step {steps} failed: exit status {_FAILED}"
            self._console.print(text)
        return _FAILED

    def _wait(self, store: Store, step: int) -> None:
        text = f"waiting for the export of step {step}; Ctrl-C gives it up"
        if not self._console.is_terminal:
            self._console.print(text)
        with self._console.status(text) as status:

            def show(done: int, total: int) -> None:
                sizes = f"{format_bytes(done)} of {format_bytes(total)}"
                status.update(f"{text}: {sizes}")

            store.end_export(progress=show)
