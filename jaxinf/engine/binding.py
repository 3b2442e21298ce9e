"""Ties a run's params and state to a step of its store.

      is_at? ─ no ─► begin(step) ──► compare(leaf) … ──► finish: go on, or go back
         └──── yes ─────────────────────────────────────► step ──► advance

Invariant: a step begins from the state of the step before it, or after every leaf was
compared with the step from which the run continues. The first step of a run may go back
to any step of the store, a later one only to the step before, as its last update was
discarded. A state of a step that was given up is never taken for one that replaced it.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from jaxinf.engine.divergence import (
    FROM_STORE,
    RESTART,
    RESUMED,
    UPDATE,
    check_known,
    diverged_at_first,
    stale_state,
)
from jaxinf.engine.opened import OpenStore
from jaxinf.engine.state import same_params
from jaxinf.errors import StaleStateError, StoreMismatchError
from jaxinf.store import (
    SLOTS,
    CommitRecord,
    StepReader,
    list_checkpoints,
    other_slot,
    verify_step,
)
from jaxinf.typing import Array

_LOG = logging.getLogger("jaxinf")

_State: TypeAlias = tuple[int, int]
"""Step and origin of a state."""

_DISCARDED = (
    "An update whose result is discarded is a step of the store, too, which goes back "
    "only where the step before is durable (durability='step'). "
)

AHEAD = (
    f"The store is ahead, and nothing is lost if you go on from it. {FROM_STORE}; "
    "store.step is the number of steps done. A step to come back to must be kept: "
    "call store.checkpoint(state=state) beside your program's own save, or open the "
    "store with keep_steps= set to its interval. Or restore your checkpoint of a step "
    f"that is here, {RESTART}, and restore none"
)
"""The remedy where a program comes back to a step that was not kept."""

BEHIND = (
    "The store has not come so far: restore your checkpoint of a step that is here. "
    f"{FROM_STORE}"
)
"""The remedy where the store lost steps, or is another one."""


@dataclass
class _Candidate:
    """A step of the store that may be the run's.

    Attributes:
      place: its slot, or ``checkpoints/NAME``.
      differing: a leaf whose params differ from the run's; empty if none was found.
    """

    place: str
    record: CommitRecord
    reader: StepReader
    differing: str = ""


class Binding:
    """Binds a run to the open store. Thread-safe.

    Args:
      roll_back: makes another step the committed one, and opens the store anew.

    Attributes:
      origin: the origin of the states that updates return from now on, as in
        `jaxinf.SmartUpdateState`.
      has_advanced: whether the run has made a step of its own since the store was
        opened, or begun anew.
    """

    def __init__(
        self, opened: Callable[[], OpenStore], roll_back: Callable[[str], None]
    ) -> None:
        self.origin = UPDATE
        self._opened = opened
        self._roll_back = roll_back
        self._guard = threading.Lock()
        self._candidates: list[_Candidate] = []
        self._state: _State = 0, UPDATE
        self._has_compared = False
        self._at: _State | None = None  # the state that the next update should get
        self._before: _State | None = None  # the one that the last update got
        self._has_warned = False
        self.has_advanced = False

    def is_at(self, step: int, origin: int) -> bool:
        """Whether a state is the last step's, so that nothing must be compared."""
        return self._at == (step, origin)

    def begin_anew(self) -> None:
        """Binds the run to the initial state of a new store."""
        self._at, self._before = (0, UPDATE), None
        self.has_advanced = False

    def advance(self, step: int) -> None:
        """Notes that an update has ended, which returns a state of a step."""
        self._at, self._before = (step, self.origin), self._at
        self.has_advanced = True

    def release(self) -> None:
        """Unbinds the run, so that the next step must bind it first."""
        self._at = self._before = None

    def begin(self, step: int, origin: int = UPDATE) -> None:
        """Looks for the step of the run's state; no step may be under way.

        Raises:
          StaleStateError: the store has no such step, and lists the existing ones; or
            the run may not go back to it.
        """
        with self._guard:
            self._forget()
            opened = self._opened()
            path = opened.options.path
            if self._at is not None and (step, origin) != self._before:
                raise stale_state(path, step, self._at[0])
            places, others = _places(opened, step)
            if not places:
                why = "" if self._at is None else _DISCARDED
                raise StaleStateError(
                    f"{path}: the optimizer state given to update is of step {step}; "
                    f"the store has {'; '.join(others)}. {why}"
                    + (AHEAD if step < opened.commit.step else BEHIND)
                )
            self._state, self._has_compared = (step, origin), False
            own = {"directory": opened.directory, "meters": opened.meters}
            own["memory_bytes"] = opened.options.memory_bytes
            for place, record in places:
                path = opened.directory.step_path(place)
                reader = StepReader(path, record, **own)
                self._candidates.append(_Candidate(place, record, reader))

    def compare(self, leaf: int, params: Array, origin: Sequence[int]) -> None:
        """Compares a leaf, or a shard of it, with the step; blocks.

        Args:
          params: params on the JAX device, in their own dtype; only read.
          origin: index in the leaf of the array's first element.
        """
        opened = self._opened()
        for one in list(self._candidates):
            step = one.record, one.reader
            if not one.differing and not same_params(
                opened, *step, leaf, params, origin
            ):
                one.differing = opened.name(leaf)
        self._has_compared = True

    def finish(self) -> None:
        """Binds the run, after a rollback if necessary; every leaf was compared.

        Raises:
          StoreMismatchError: the params differ from the step's, or are neither given
            nor known from `init`; nothing was written.
          StaleStateError: the step does not verify any more; or the state is old, and
            the params are not of its step.
        """
        with self._guard:
            opened = self._opened()
            path, (step, origin) = opened.options.path, self._state
            same = [c for c in self._candidates if not c.differing]
            if not same:
                differing = self._candidates[0].differing
                if self._at is not None:
                    raise stale_state(path, step, self._at[0])
                if not step:
                    raise diverged_at_first(f"{path}: leaf {differing}")
                raise StoreMismatchError(
                    f"{path}: the state given to update is of step {step}, the params "
                    f"are not those that the store holds of that step (leaf "
                    f"{differing}). A store has one model (one store per init). Take "
                    "the store's own, params = store.params(like=params), or restore "
                    f"params and state from one checkpoint, {RESTART}"
                )
            if not self._has_compared and opened.directory.manifest.num_params:
                check_known(path, step, origin)
            self._go_on_from(opened, same[0].place)
            self._forget()
            if origin != RESUMED:
                self.origin = max(self.origin, origin)
            if self._at is not None:  # its states are no longer the store's
                self.origin = max(self.origin, RESUMED) + 1
            self._at, self._before = self._state, None

    def _go_on_from(self, opened: OpenStore, place: str) -> None:
        """Makes the step at a place the committed one, if it is another's."""
        path, (step, _), before = opened.options.path, self._state, opened.commit.step
        if place == opened.chunks.committed:
            return
        if place in SLOTS and place not in opened.directory.published:
            damages = verify_step(opened.directory, opened.directory.step_path(place))
            if damages:
                raise StaleStateError(
                    f"{path}: the optimizer state given to update is of step {step}; "
                    f"the store is at step {before}, and what its other slot has of "
                    f"that step is overwritten in part ({damages[0].what}: "
                    f"{damages[0].problem}). {AHEAD}"
                )
        self._roll_back(place)
        if self._at is None:
            _LOG.warning(
                "%s: rolled back from step %d to step %d (%s), of which the state "
                "given to update is; what lies between is given up unless a "
                "checkpoint keeps it",
                path,
                before,
                step,
                place,
            )
        elif not self._has_warned:
            self._has_warned = True
            _LOG.warning(
                "%s: the result of the last update was discarded, as update is given "
                "the state of step %d again; the store went back to it from step %d. "
                "Each call of update is a step of the store, so a discarded one takes "
                "the time of two (jitted.lower(…).compile() compiles without one). "
                "This is said once",
                path,
                step,
                before,
            )

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
    spare = other_slot(opened.chunks.committed)
    if (record := directory.found_record(spare)) is not None:
        words.append(f"step {record.step}, its other slot")
        if record.step == step:
            found.append((spare, record))
    return found, words
