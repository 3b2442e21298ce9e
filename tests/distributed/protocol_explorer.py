"""Explores all interleavings of a run's members, with crashes anywhere.

A member is a small model of a store: two slots, each with data and a record, and the
name `current`. The order of a commit and the choice after a crash are the real code's,
`jaxinf.store.CommitAction` and `agree_on_step`. Whatever was not synced may be lost in
part.
"""

import itertools
from typing import Any, NamedTuple

from jaxinf.errors import ProcessError
from jaxinf.store import CommitAction, HeldSteps, StepId, agree_on_step

REMOVE_RECORD, WRITE, REWRITE = "remove_record", "write", "rewrite"
TORN = StepId(-1, "torn")

WITHOUT_MEETING = tuple(a for a in CommitAction if a is not CommitAction.MEET)
"""A broken commit: no member waits for another."""

EARLY = tuple(
    action
    for part in CommitAction
    for action in ((REWRITE, part) if part is CommitAction.MEET else (part,))
)
"""A broken commit: the next step begins before all members have this one."""


class Violation(AssertionError):
    """Members could not go on, or a step was lost."""


class Explored(NamedTuple):
    """The number of states of all members together, and of recoveries from a crash."""

    num_states: int
    num_recoveries: int


class _Slot(NamedTuple):
    """Data and record as the process sees them, and what a crash may bring back."""

    data: Any
    record: Any
    old_data: Any = None  # of writes that are not synced
    old_record: Any = None  # of a removal that is not synced


class _Member(NamedTuple):
    place: int  # number of the next action of its step
    current: int
    slots: tuple[_Slot, _Slot]

    @property
    def step(self):
        return self.slots[self.current].record

    def held(self):
        return HeldSteps(self.step, self.slots[1 - self.current].record)


class _State(NamedTuple):
    members: tuple[_Member, ...]
    session: int
    going_back: frozenset  # members that have still to go back a step, first of all
    going_on: Any = None  # the agreed step, while members recover


def explore(num_members, num_steps, num_crashes, commit=tuple(CommitAction)):
    """Visits every state; raises `Violation` at the first that breaks a promise."""
    actions = (REMOVE_RECORD, WRITE, *commit)
    first = StepId(0, "0")
    empty = _Slot(None, None)
    member = _Member(0, 0, (_Slot(first, first), empty))
    begun = _State((member,) * num_members, 0, frozenset())
    seen, waiting, num_recoveries = {begun}, [begun], 0
    while waiting:
        state = waiting.pop()
        following = list(_steps(state, actions, num_steps))
        if state.session < num_crashes:
            # What may be left of each member; a mere kill loses nothing.
            for crashed in itertools.product(*map(_left, state.members)):
                num_recoveries += 1
                following += _recovered(crashed, state)
        for new in following:
            if new not in seen:
                seen.add(new)
                waiting.append(new)
    return Explored(len(seen), num_recoveries)


def _steps(state, actions, num_steps):
    for number, member in enumerate(state.members):
        moved = None
        if state.going_on is not None:
            if member.step != state.going_on:
                moved = member._replace(current=1 - member.current)
        elif state.going_back:
            if number in state.going_back:
                moved = member._replace(current=1 - member.current)
                rest = state.going_back - {number}
                yield _with(state, number, moved)._replace(going_back=rest)
            continue
        elif member.step.step < num_steps and _may(state, number, actions):
            moved = _acted(member, actions[member.place], state.session)
            moved = moved._replace(place=(member.place + 1) % len(actions))
        if moved is not None:
            yield _with(state, number, moved)
    if state.going_on is not None and all(
        m.step == state.going_on for m in state.members
    ):
        settled = state._replace(going_on=None)
        yield settled
        if _can_go_back(settled):
            everyone = frozenset(range(len(state.members)))
            yield settled._replace(going_back=everyone)


def _with(state, number, member):
    members = list(state.members)
    members[number] = member
    return state._replace(members=tuple(members))


def _may(state, number, actions):
    """Whether a member may act: at a meeting it waits until all others came or left."""
    member = state.members[number]
    if actions[member.place] is not CommitAction.MEET:
        return True
    meeting = member.step.step, member.place
    return all((other.step.step, other.place) >= meeting for other in state.members)


def _acted(member, action, session):
    new = StepId(member.step.step + 1, str(session))
    target = 1 - member.current
    slot, own = member.slots[target], member.slots[member.current]
    if action == REMOVE_RECORD:
        if slot.record is not None:
            slot = slot._replace(record=None, old_record=slot.record)
    elif action == WRITE:
        slot = slot._replace(data=new, old_data=slot.data or TORN)
    elif action is CommitAction.SYNC:
        slot = _Slot(slot.data, slot.record)
    elif action is CommitAction.RECORD:
        slot = slot._replace(record=new, old_record=None)
    elif action is CommitAction.FLIP:
        return member._replace(current=target)
    elif action == REWRITE:
        own = own._replace(data=TORN, old_data=own.data)
    slots = (own, slot) if target else (slot, own)
    return member._replace(slots=slots)


def _left(member):
    found = []
    for slots in itertools.product(*map(_left_of_slot, member.slots)):
        found.append(_Member(0, member.current, tuple(slots)))
    return found


def _left_of_slot(slot):
    records = {slot.record, slot.old_record or slot.record}
    data = {slot.data}
    if slot.old_data is not None:
        data |= {slot.old_data, TORN}
    return [_Slot(d, r) for d in data for r in records]


def _recovered(members, state):
    """Returns the state in which members go on; checks what they are promised."""
    published = max(member.step for member in state.members)
    try:
        step = agree_on_step([member.held() for member in members])
    except ProcessError:
        raise Violation(f"no common step: {members}") from None
    if state.going_back:
        published = min(member.step for member in state.members)
    if step is None or step.step < published.step:
        raise Violation(f"{published} is lost, {step} is left: {members}")
    for member in members:
        whole = [s.data for s in member.slots if s.record == step]
        if not whole or any(data != step for data in whole):
            raise Violation(f"{step} is not whole: {member}")
    return [_State(tuple(members), state.session + 1, frozenset(), step)]


def _can_go_back(state):
    """Whether all members have one step in their spare slots, verified as a whole."""
    spares = [member.slots[1 - member.current] for member in state.members]
    first = spares[0].record
    step = state.members[0].step
    return (
        first is not None
        and first.step < step.step
        and all(spare.record == first == spare.data for spare in spares)
    )
