"""Ties a run's params and state to a step of its store, before its first step.

      begin(step) ──► compare(leaf) … ──► finish: go on, or roll the store back

Invariant: nothing is written before every leaf was compared with the step from which
the run continues; only the first step of a run may go back to another step.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxinf.engine.opened import OpenStore
from jaxinf.engine.state import same_params
from jaxinf.errors import StaleStateError, StoreMismatchError
from jaxinf.store import (
    SLOTS,
    CommitRecord,
    StepReader,
    list_checkpoints,
    read_spare,
    verify_spare,
)
from jaxinf.typing import Array

__all__ = ["RESTART", "Binding"]

_LOG = logging.getLogger("jaxinf")

RESTART = (
    'or begin anew with smart_update(…, on_existing="restart"), which keeps the old '
    "run as a checkpoint"
)
"""A remedy in several messages."""


@dataclass
class _Candidate:
    """A step of the store that may be the run's.

    Attributes:
      place: its slot, or ``checkpoints/NAME``.
      record: its commit.
      reader: reader of its chunks.
      differing: a leaf whose params differ from the run's; empty if none was found.
    """

    place: str
    record: CommitRecord
    reader: StepReader
    differing: str = ""


class Binding:
    """Binds a run to the open store. Thread-safe.

    Args:
      opened: the open store.
      roll_back: makes another step the committed one, and opens the store anew.

    Attributes:
      is_bound: whether the run's params were compared with the store's.
    """

    def __init__(
        self, opened: Callable[[], OpenStore], roll_back: Callable[[str], None]
    ) -> None:
        self.is_bound = False
        self._opened = opened
        self._roll_back = roll_back
        self._guard = threading.Lock()
        self._candidates: list[_Candidate] = []
        self._step = 0
        self._has_compared = False

    def begin(self, step: int) -> None:
        """Looks for the step of the run's state; no step may be under way.

        Raises:
          StaleStateError: the store has no such step; lists the existing ones.
        """
        with self._guard:
            self._forget()
            opened = self._opened()
            places, others = _places(opened, step)
            if not places:
                raise StaleStateError(
                    f"{opened.options.path}: the optimizer state given to update is of "
                    f"step {step}; the store has {'; '.join(others)}. Restore your "
                    "checkpoint of one of these (open_store(…, keep_steps=k) keeps "
                    f"those of every k steps), {RESTART}"
                )
            self._step, self._has_compared = step, False
            self._candidates = [
                _Candidate(
                    place,
                    record,
                    StepReader(
                        opened.directory.step_path(place),
                        record,
                        directory=opened.directory,
                        memory_bytes=opened.options.memory_bytes,
                        meters=opened.meters,
                    ),
                )
                for place, record in places
            ]

    def compare(self, leaf: int, params: Array, origin: Sequence[int]) -> None:
        """Compares a leaf, or a shard of it, with the step; blocks.

        Args:
          leaf: number of the leaf.
          params: params on the JAX device, in their own dtype; only read.
          origin: index in the leaf of the array's first element.
        """
        opened = self._opened()
        for candidate in list(self._candidates):
            if candidate.differing:
                continue
            one = candidate.record, candidate.reader
            if not same_params(opened, *one, leaf, params, origin):
                name = opened.directory.manifest.leaves[leaf].name
                candidate.differing = name
        self._has_compared = True

    def finish(self) -> None:
        """Binds the run, after a rollback if necessary; every leaf was compared.

        Raises:
          StoreMismatchError: the params differ from the step's; nothing was written.
          StaleStateError: the step does not verify any more.
        """
        with self._guard:
            opened = self._opened()
            path = opened.options.path
            same = [c for c in self._candidates if not c.differing]
            if not same:
                raise StoreMismatchError(
                    f"{path}: the state given to update is of step {self._step}, the "
                    "params are not those that the store holds of that step (leaf "
                    f"{self._candidates[0].differing}). Take the store's own, params = "
                    "store.params(like=params), or restore params and state from one "
                    f"checkpoint, {RESTART}"
                )
            if not self._has_compared and opened.directory.manifest.num_params:
                _LOG.warning(
                    "%s: update was given no params, so they are not held against "
                    "those of step %d in the store; give them: "
                    "tx.update(grads, state, params)",
                    path,
                    self._step,
                )
            self._go_on_from(opened, same)
            self._forget()
            self.is_bound = True

    def release(self) -> None:
        """Unbinds the run, so that the next step must bind it first."""
        self.is_bound = False

    def _go_on_from(self, opened: OpenStore, same: list[_Candidate]) -> None:
        committed, before = opened.chunks.committed, opened.commit.step
        for candidate in same:
            if candidate.place == committed:
                return
            if candidate.place in SLOTS:
                damages = verify_spare(opened.directory, candidate.place)
                if damages:
                    first = damages[0]
                    raise StaleStateError(
                        f"{opened.options.path}: the optimizer state given to update "
                        f"is of step {self._step}; the store is at step {before}, and "
                        "what its other slot has of that step is overwritten in part "
                        f"({first.what}: {first.problem}). Restore a later checkpoint "
                        "of yours (open_store(…, keep_steps=k) keeps the steps of "
                        f"your checkpoints), {RESTART}"
                    )
            self._roll_back(candidate.place)
            _LOG.warning(
                "%s: rolled back from step %d to step %d (%s), of which the state "
                "given to update is; what lies between is given up unless a checkpoint "
                "keeps it",
                opened.options.path,
                before,
                self._step,
                candidate.place,
            )
            return

    def _forget(self) -> None:
        for candidate in self._candidates:
            candidate.reader.__exit__()
        self._candidates = []


def _places(
    opened: OpenStore, step: int
) -> tuple[list[tuple[str, CommitRecord]], list[str]]:
    """Returns the places of a step, best first, and a description of all steps.

    The spare slot is listed by its record alone; it is verified before a rollback.
    """
    directory = opened.directory
    found: list[tuple[str, CommitRecord]] = []
    words = [f"step {opened.commit.step}, the current one"]
    if opened.commit.step == step:
        found.append((opened.chunks.committed, opened.commit))
    infos = list_checkpoints(directory)
    for info in sorted(infos, key=lambda info: info.name != str(info.step)):
        words.append(f"step {info.step}, checkpoint {info.name!r}")
        if info.step == step:
            place = f"checkpoints/{info.name}"
            record = CommitRecord.read(directory.step_path(place) / "commit.json")
            found.append((place, record))
    spare = read_spare(directory)
    if spare is not None:
        words.append(f"step {spare[1].step}, its other slot")
        if spare[1].step == step:
            found.append(spare)
    return found, words
