"""What the members of a run agree on: the order of a commit, the step to go on from.

Invariant: everything here is pure, and the same for the same arguments in every
process. The explorer of tests/support runs these very functions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class CommitAction(Enum):
    """The actions of a commit in their order; see docs/format.md for the argument.

    Each is over, and durable, before the next begins.

    Attributes:
      SYNC: the step's chunks become durable.
      RECORD: the slot gets its record.
      MEET: wait until every member has done the actions before.
      FLIP: `current` names the slot.
    """

    SYNC = "sync"
    RECORD = "record"
    MEET = "meet"
    FLIP = "flip"


@dataclass(frozen=True, order=True)
class StepId:
    """A committed step as members tell each other.

    Attributes:
      step: its number.
      commit: the id of its commit, the same in all members.
    """

    step: int
    commit: str


@dataclass(frozen=True)
class HeldSteps:
    """The steps of one member at its opening.

    Attributes:
      current: the committed step; None before the first.
      spare: the step that the record in the other slot names; None without a record.
    """

    current: StepId | None
    spare: StepId | None

    def has(self, step: StepId | None) -> bool:
        """Whether a slot has a step, or no step is wanted and none is committed."""
        if step is None:
            return self.current is None
        return step in (self.current, self.spare)


def agreed_step(members: Sequence[HeldSteps]) -> StepId | None:
    """Returns the step that all members go on from; None if none was ever committed.

    It is the committed step of at least one member, and all others have it, too. If
    they have several such steps, it is the latest: a record of it in a spare slot was
    written when its chunks were durable, and that slot is not rewritten before all have
    committed a later one.

    Raises:
      LookupError: the members have no such step.
    """
    found = {member.current for member in members}
    common = [step for step in found if all(member.has(step) for member in members)]
    if not common:
        raise LookupError("no common step")
    return max((step for step in common if step is not None), default=None)
