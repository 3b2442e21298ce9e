"""policy="plan": what measured steps choose, and that it changes no bit."""

import jax
import numpy as np
import optax
import pytest
from streaming import prepared
from zoo import ZOO

import jaxinf
from jaxinf.streaming import compiled_step
from jaxinf.streaming import step as steps
from jaxinf.streaming.plan import cut_to_fit as cutting
from jaxinf.streaming.plan import leaving
from jaxinf.streaming.plan.choice import (
    NUM_MEASURED,
    StepTimes,
    freed_bytes,
    segments_to_recompute,
)
from jaxinf.streaming.plan.cut_to_fit import plan_of
from jaxinf.streaming.plan.leaving import evicted
from jaxinf.streaming.program.cut import cuts_of

PROGRAM = ZOO["l2_penalty"](depth=8)


@pytest.fixture(autouse=True)
def everything_leaves(monkeypatch):
    monkeypatch.setattr(leaving, "SMALL_BYTES", 1)
    monkeypatch.setattr(cutting, "evicted", lambda plan, _: evicted(plan, 0))


@pytest.fixture(scope="module")
def ready():
    return prepared(PROGRAM)


@pytest.fixture
def plan(ready):
    return evicted(plan_of(ready, cuts_of(ready, 1 << 14), "plan"), 0)


def times(plan, waited_share, seconds):
    """Measured steps of a second in all, of which forward calls take these seconds."""
    own = [seconds.get(call.program.name, 0.0) for call in plan.calls]
    return [StepTimes(1.0, waited_share, own)] * NUM_MEASURED


def test_the_cheapest_bytes_are_recomputed_as_far_as_drives_are_slower(plan):
    freed = freed_bytes(plan)
    assert len(freed) > 3
    away_bytes = sum(plan.lives[slot].num_bytes for slot in plan.evictions)
    cost = {k: 1e-4 * (1 + n) * freed[k] / away_bytes for n, k in enumerate(freed)}
    seconds = {f"forward {k}": own_s for k, own_s in cost.items()}
    everything = segments_to_recompute(plan, times(plan, 1.0, seconds))
    assert everything == set(freed)
    some = segments_to_recompute(plan, times(plan, 0.3, seconds))
    assert some == set(list(freed)[: len(some)])
    left = away_bytes - sum(freed[k] for k in some)
    assert left / away_bytes <= 0.7 + sum(cost[k] for k in some)
    assert 0 < len(some) < len(freed)
    dear = {
        name: 2 * freed[k] / away_bytes for name, k in zip(seconds, freed, strict=True)
    }
    assert not segments_to_recompute(plan, times(plan, 1.0, dear))


def slow(step_s, waited_s, call_s):
    """What a drive would give that takes nearly all of a step's time."""
    return StepTimes(step_s, 0.9 * step_s, [1e-9] * len(call_s))


@pytest.mark.parametrize("num_parts", [1, 2])
def test_losses_and_params_are_those_of_keep(open_store, monkeypatch, num_parts):
    monkeypatch.setattr(compiled_step, "StepTimes", slow)
    found = {}
    for policy in ("keep", "plan"):
        step = jaxinf.stream(
            PROGRAM.loss,
            optax.adam(1e-2),
            open_store(policy, chunk_elements=4096, memory_bytes=16 << 20),
            memory_bytes=256 << 20,
            policy=policy,
            micro_batches=num_parts,
        )
        step.load(PROGRAM.params, batch=PROGRAM.batch)
        losses, plans = [], []
        for _ in range(2 * NUM_MEASURED + 1):
            losses.append(float(step(PROGRAM.batch)[0]))
            plans.append(step.plan)
        found[policy] = losses, step.store.params(like=PROGRAM.params)
        step.store.wait()
        moved, planned = step.store.metrics.traffic, step.traffic
        assert moved.drive_write_bytes == planned.drive_write_bytes
        step.close()
    assert found["plan"][0] == found["keep"][0]
    jax.tree.map(np.testing.assert_array_equal, found["plan"][1], found["keep"][1])
    first, *_, last = plans
    assert first is plans[NUM_MEASURED - 1] is not last
    assert first.cuts == last.cuts
    assert not any(call.is_repeat for call in first.calls)
    assert any(call.is_repeat for call in last.calls)
    assert len(last.evictions) < len(first.evictions)
    assert plans[NUM_MEASURED] is last  # it is chosen once


@pytest.mark.parametrize("is_slow", [False, True])
def test_in_memory_without_a_choice_or_with_one_that_does_not_fit(
    monkeypatch, tmp_path, is_slow
):
    monkeypatch.setattr(compiled_step, "StepTimes", slow)
    if not is_slow:
        monkeypatch.setattr(steps, "segments_to_recompute", lambda *_: frozenset())
    most = cutting.least_bytes

    def least_bytes(plan):
        """Of plans with repeated calls, more than there is."""
        return most(plan) + (any(call.is_repeat for call in plan.calls) << 40)

    monkeypatch.setattr(cutting, "least_bytes", least_bytes)
    step = jaxinf.stream_in_memory(
        PROGRAM.loss,
        optax.sgd(0.1),
        memory_bytes=64 << 20,
        policy="plan",
        scratch=tmp_path,
    )
    step.load(PROGRAM.params, batch=PROGRAM.batch)
    for _ in range(NUM_MEASURED + 1):
        step(PROGRAM.batch)
    assert not any(call.is_repeat for call in step.plan.calls)
    step.close()
