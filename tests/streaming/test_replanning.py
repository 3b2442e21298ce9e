"""Steps that are planned by what they measure: bits, memory, traffic, both kinds."""

import shutil
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from families import family
from streaming import (
    FORM_LIMITS,
    assert_same_bits,
    prepared,
    relative_error,
    states,
    streamed,
)
from zoo import ONLY_PLANNED, QUICKEST, ZOO, normal

import jaxinf
from jaxinf.errors import StreamError
from jaxinf.streaming.move.probe import probe
from jaxinf.streaming.move.scratch import Scratch
from jaxinf.streaming.move.values import Values
from jaxinf.streaming.plan import offload
from jaxinf.streaming.plan.forms import PART_BYTES
from jaxinf.streaming.plan.search import Problem, choose
from jaxinf.streaming.plan.simulator import Profile
from jaxinf.streaming.run import CompiledMemory

TX = optax.adam(1e-2)
SHORT = {"tied_and_unused"}
ONLY_OFFLOADED = {*ZOO} - QUICKEST - ONLY_PLANNED


@pytest.mark.long
@pytest.mark.parametrize("name", family(ZOO, short=SHORT, beyond=ONLY_OFFLOADED))
def test_bits_are_those_of_keep(name, tmp_path, monkeypatch):
    monkeypatch.setattr(offload, "SMALL_BYTES", 1)
    program = ZOO[name]()
    ready = prepared(program)
    cuts = ready.plan(ready.smallest_bytes() * 3 // 2).cuts
    plan, executables = ready.plan_of(cuts, "plan"), {}
    expected = streamed(program, ready.plan_of(cuts, "keep"), executables)
    found = {}
    for budget in budgets(plan, executables):
        for rate in (1.0, 1e5, 1e12):
            for one in choices(ready, plan, executables, budget, rate):
                assert one.peak_bytes <= budget
                found[one.key] = one
    for one in found.values():
        chosen = plan.chosen(one)
        values = Values(chosen.calls, Scratch([tmp_path]))
        assert_same_bits(
            streamed(program, chosen, executables, values=values), expected
        )
        assert values.peak_bytes == one.value_bytes
        values.close()


def budgets(plan, executables):
    """The least memory, the most, and one between."""
    memory = CompiledMemory(plan, executables, 0)
    least = max(memory.call_bytes(memory.fitted().calls))
    most = max(memory.call_bytes(plan.calls))
    return {least, (least + most) // 2, most}


def choices(ready, plan, executables, budget, rate):
    """Choices, and those without a drive, with programs that all take a second."""
    memory = CompiledMemory(plan, executables, budget)
    problem = Problem(
        ready.lifetimes.graph,
        plan.programs,
        budget,
        memory.call_bytes,
        admits=memory.admits,
    )
    programs = (*plan.programs.forward, *plan.programs.backward, *plan.programs.free)
    seconds = {program.key: 1.0 for program in programs if program}
    profile = Profile(seconds, rate, rate)
    best = choose(problem, profile)
    found = [best, *best.without_drive] if best else []
    return [one for one in found if problem.admits(one.calls)]


def wide(params, batch):
    x = batch
    for w in params["layers"]:
        x = jnp.tanh(x @ w) @ w + x
    return jnp.mean(x**2)


LAYERS = {"layers": [normal(i, 32, 32) / 6 for i in range(12)]}
BATCH = normal(100, 8192, 32)


def opened(open_store, name, policy, memory_bytes, **options):
    step = jaxinf.stream(
        wide,
        TX,
        open_store(name, chunk_elements=4096, memory_bytes=4 << 20),
        memory_bytes=memory_bytes,
        policy=policy,
        **options,
    )
    step.load(LAYERS)
    return step


def losses(step, num_steps=9):
    return [float(step(BATCH)[0]) for _ in range(num_steps)]


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.long),
        {"resident": "params"},
        pytest.param({"micro_batches": 2, "order": "parts"}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_training_is_that_of_keep(open_store, options):
    step = opened(open_store, "plan", "plan", 28 << 20, **options)
    found = losses(step)
    keep = opened(open_store, "keep", "keep", 256 << 20, **options)
    cuts = step.store.path / "stream"
    shutil.copytree(cuts, keep.store.path / "stream")
    assert found == losses(keep)
    for one, two in zip(
        *(jax.tree.leaves(s.store.params(like=LAYERS)) for s in (step, keep)),
        strict=True,
    ):
        np.testing.assert_array_equal(one, two)
    forecast = step.forecast
    assert forecast is not None
    assert forecast.found_peak_bytes == forecast.expected_peak_bytes
    assert step.plan is not None
    assert keep.plan is not None
    assert step.plan.cuts == keep.plan.cuts
    assert step.plan.peak_bytes < keep.plan.peak_bytes
    assert keep.forecast is None
    step.store.wait()
    traffic, planned = step.store.metrics.traffic, step.traffic
    assert traffic.drive_read_bytes == planned.drive_read_bytes
    assert traffic.drive_write_bytes == planned.drive_write_bytes


@pytest.mark.long
def test_a_plan_is_printed(open_store):
    step = opened(open_store, "plan", "plan", 28 << 20)
    assert "run forward again" not in str(step.compile(BATCH))
    assert step.forecast is None
    losses(step, 3)
    forecast, text = step.forecast, str(step.plan)
    assert f"{forecast.num_offloaded} values of " in text
    assert f"leave, {forecast.num_repeated} segments run forward again" in text
    assert forecast.num_offloaded
    assert forecast.offloaded_bytes == step.metrics.offloaded_drive_bytes
    assert "calls of" in text
    assert "(plan)" in text
    assert "run forward again; expected" in text


@pytest.mark.long
def test_without_a_store(place):
    found = []
    for policy, memory_bytes in (("keep", 64 << 20), ("plan", 18 << 20)):
        step = jaxinf.stream_in_memory(
            wide,
            TX,
            memory_bytes=memory_bytes,
            policy=policy,
            scratch=place,
        )
        step.load(LAYERS)
        found.append(losses(step))
        assert (step.forecast is None) == (policy == "keep")
        step.close()
    np.testing.assert_allclose(found[0], found[1], rtol=1e-6)  # the cuts differ
    assert not list(place.iterdir())


# Params stay, and the state of the first is the gradient.
SEEN = optax.chain(optax.trace(0.0), optax.scale(0.0))


def seen(step):
    """Gradients of the last step."""
    if isinstance(step, jaxinf.InMemoryStep):
        return [np.asarray(leaf) for leaf in jax.tree.leaves(step.state())]
    step.store.wait()
    return [x for (name, _), x in states(step.store).items() if name == "trace"]


def stored_bytes(calls):
    return sum(calls.stored_bytes(s, one.needed) for s, one in calls.evictions.items())


@pytest.mark.parametrize("with_store", [True, False])
@pytest.mark.long
def test_values_in_fewer_bits(open_store, place, with_store):
    """In a budget that neither keeping nor recomputing everything fits."""
    losses, gradients, written = {}, {}, {}
    for form in (None, *FORM_LIMITS):
        options = {"policy": "plan", "activations": form}
        if with_store:
            store = open_store(str(form), chunk_elements=4096)
            step = jaxinf.stream(wide, SEEN, store, memory_bytes=28 << 20, **options)
        else:
            options |= {"memory_bytes": 18 << 20, "scratch": place}
            step = jaxinf.stream_in_memory(wide, SEEN, **options)
        step.load(LAYERS, batch=BATCH)
        losses[form], gradients[form] = [], []
        for _ in range(6):
            losses[form].append(float(step(BATCH)[0]))
            gradients[form].append(seen(step))
            calls = step.plan.calls
            assert calls.form == form
            assert calls.evictions
        written[form] = stored_bytes(calls)
        raw = sum(calls.lives[slot].num_bytes for slot in calls.evictions)
        assert written[form] < raw or form is None
        assert step.wear.step_bytes == step.traffic.drive_write_bytes
        if with_store:
            assert step.metrics.offloaded_drive_bytes == written[form]
            assert step.store.metrics.traffic.drive_write_bytes == step.wear.step_bytes
        else:
            assert step.wear.step_bytes == written[form]
        step.close()
    assert losses["bf16"] == losses["int8"] == losses[None] == losses[None][:1] * 6
    exact = gradients[None][0]
    for form, limit in FORM_LIMITS.items():
        for one in gradients[form]:
            assert 0 < relative_error(one, exact) < limit
    for one in gradients[None]:
        assert_same_bits(one, exact)


def test_a_probe_leaves_nothing(place):
    found = probe([place, place])
    assert list(found) == ["written", "read"]
    for moved in found.values():
        assert moved.num_bytes == 2 * PART_BYTES
        assert moved.seconds > 0
    assert not list(place.iterdir())


def test_a_probe_of_a_drive_that_fails_tells_nothing(place):
    assert probe([place / "gone"]) == {}


def test_a_budget_below_the_largest_value_is_refused(open_store):
    step = opened(open_store, "plan", "plan", 28 << 20)
    with pytest.raises(StreamError, match=r"largest value .* \d+ bytes.* works"):
        step(np.zeros((1 << 16, 32), np.float32))
    assert step.store.step == 0


@pytest.mark.long
def test_a_step_that_ended_early_is_not_measured(place):
    step = jaxinf.stream_in_memory(
        wide, TX, memory_bytes=18 << 20, policy="plan", scratch=place
    )
    step.load(LAYERS)
    losses(step, 3)
    before = step.forecast
    bad = replace  # any object that no array can be made of
    with pytest.raises(TypeError):
        step(bad)
    assert step.forecast == before
    with pytest.raises(jaxinf.NonFiniteGradientError):
        step(BATCH * np.float32(np.nan))
    assert step.forecast == before
    losses(step, 3)
    step.close()


@pytest.mark.long
def test_wear_is_told_once_below_a_year(place):
    step = jaxinf.stream_in_memory(
        wide,
        TX,
        memory_bytes=18 << 20,
        policy="plan",
        scratch=place,
        endurance_tbw=1e-3,
    )
    step.load(LAYERS)
    assert step.wear is None
    losses(step, 4)
    with pytest.warns(UserWarning, match=r"a drive of 0.001 TBW out in 0.0 months"):
        losses(step, 1)
    losses(step, 4)  # a second warning would be an error
    wear = step.wear
    assert wear is not None
    assert wear.step_bytes == step.traffic.drive_write_bytes > 0
    assert "written a step" in str(step.plan)
    step.close()


def test_state_wears_drives_too(open_store):
    step = opened(open_store, "store", "recompute", 256 << 20)
    losses(step, 1)
    wear = step.wear
    assert wear is not None
    assert wear.step_bytes == step.traffic.drive_write_bytes > 0
    assert "consumer" in str(wear)
