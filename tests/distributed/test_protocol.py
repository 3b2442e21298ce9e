"""The protocol of a commit, explored: no interleaving or crash loses a step."""

import pytest
from families import LONG
from protocol_explorer import EARLY, WITHOUT_MEETING, Violation, explore

from jaxinf.errors import ProcessError
from jaxinf.store import HeldSteps, StepId, agree_on_step

pytestmark = pytest.mark.optimized("long")

SIZES = [(2, 3, 2), (3, 3, 1), *([(2, 3, 3), (3, 3, 2)] if LONG else [])]


@pytest.mark.parametrize(("num_members", "num_steps", "num_crashes"), SIZES)
def test_every_crash_leaves_a_step_that_all_have(num_members, num_steps, num_crashes):
    explored = explore(num_members, num_steps, num_crashes)
    print(f"{num_members} members, {num_crashes} crashes: {explored}")
    assert explored.num_recoveries > 1000


@pytest.mark.parametrize("broken", [WITHOUT_MEETING, EARLY], ids=["alone", "early"])
def test_a_broken_protocol_is_refuted(broken):
    with pytest.raises(Violation):
        explore(2, 3, 1, broken)


def test_members_agree_on_a_step_by_its_commit():
    old, new = StepId(7, "a"), StepId(7, "b")
    assert agree_on_step([HeldSteps(old, new), HeldSteps(new, old)]) == new
    with pytest.raises(ProcessError, match="a step that all members have"):
        agree_on_step([HeldSteps(old, None), HeldSteps(new, None)])
