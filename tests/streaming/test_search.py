"""The planner: against every choice there is, and against simple rules."""

import math
from dataclasses import replace
from functools import cache
from itertools import product

import pytest
from families import family
from streaming import assert_same_bits, prepared, streamed
from zoo import ZOO

from jaxinf.schedule.placement import waiting
from jaxinf.schedule.simulator import Trip, Trips
from jaxinf.streaming.move.scratch import Scratch
from jaxinf.streaming.move.values import Values
from jaxinf.streaming.plan import offload, search
from jaxinf.streaming.plan.calls import Calls
from jaxinf.streaming.plan.offload import fitted
from jaxinf.streaming.plan.search import Problem, choose
from jaxinf.streaming.plan.sequence import all_repeats, make_calls
from jaxinf.streaming.plan.simulator import Profile, simulate


@pytest.fixture(autouse=True)
def small_values_leave(monkeypatch):
    monkeypatch.setattr(offload, "SMALL_BYTES", 1)


@cache
def cut(depth=8):
    program = ZOO["haiku"](depth=depth)
    ready = prepared(program)
    plan = ready.plan(ready.smallest_bytes() * 3 // 2, "offload")
    return program, ready.lifetimes.graph, plan


def profile(plan, bytes_per_s):
    """Backward takes twice the time of forward, a second in all."""
    keys = {program.key: 2.0 for program in plan.programs.backward if program}
    keys |= {program.key: 1.0 for program in plan.programs.forward}
    keys |= {program.key: 0.0 for program in plan.programs.free}
    return Profile(keys, bytes_per_s, bytes_per_s)


def budget_of(plan, share):
    return int(share * max(plan.calls.value_bytes()))


def chosen(graph, plan, budget, rates):
    return choose(Problem(graph, plan.programs, budget, Calls.value_bytes), rates)


def every_choice(graph, plan, budget, rates):
    """The time of each set of segments that fits."""
    segments = range(len(plan.programs.forward) - 1)
    found = {}
    for reaches in product((None, "own", "all"), repeat=len(segments)):
        repeats = {k: reach for k, reach in zip(segments, reaches) if reach}  # noqa: B905
        calls = make_calls(graph, plan.programs, "offload", repeats)
        calls = fitted(calls, budget, Calls.value_bytes)
        if max(calls.value_bytes()) <= budget:
            found[frozenset(repeats.items())] = simulate(calls, rates)
    return found


@cache
def every_time(share, rate):
    _, graph, plan = cut(6)
    return every_choice(graph, plan, budget_of(plan, share), profile(plan, rate))


@pytest.mark.parametrize(
    ("share", "rate"),
    family(
        [*product((0.45, 0.7), (50.0, 1500.0, 1e9))],
        short=[(0.45, 50.0), (0.7, 1500.0), (0.45, 1e9)],
    ),
)
@pytest.mark.parametrize("most_exhaustive", [1 << 20, 0], ids=["all", "searched"])
def test_no_choice_is_faster(share, rate, most_exhaustive, monkeypatch):
    monkeypatch.setattr(search, "MOST_EXHAUSTIVE", most_exhaustive)
    monkeypatch.setattr(search, "LEAST_TRIED", most_exhaustive or 100)
    _, graph, plan = cut(6)
    budget, rates = budget_of(plan, share), profile(plan, rate)
    found = chosen(graph, plan, budget, rates)
    every = every_time(share, rate)
    assert (found is None) == (not every)
    if found is None:
        return
    assert found.peak_bytes <= budget
    assert found.expected_s == pytest.approx(simulate(found.calls, rates))
    assert found.expected_s <= 1.02 * min(every.values())
    assert found.bound_s <= found.expected_s
    safe_s = [one.expected_s for one in found.without_drive]
    assert found.expected_s <= min(safe_s, default=math.inf)
    assert not any(one.leaves for one in found.without_drive)


def test_a_fast_drive_offloads_and_a_slow_one_recomputes():
    _, graph, plan = cut()
    budget = budget_of(plan, 0.7)
    fast, slow = (
        chosen(graph, plan, budget, profile(plan, rate)) for rate in (1e9, 10.0)
    )
    assert not fast.repeats
    assert fast.offloaded_bytes > 0
    assert slow.repeats
    assert slow.offloaded_bytes < fast.offloaded_bytes
    assert fast.expected_s == pytest.approx(fast.bound_s, rel=1e-3)
    assert "0 segments run forward again" in str(fast)


def test_gradients_that_wait_on_the_drive_cost_time():
    _, _, plan = cut()
    rates, calls = profile(plan, 1000.0), plan.calls
    pieces = [piece for call in calls.calls for piece, _ in call.gradients]
    sizes = dict.fromkeys(pieces, 50)
    held, spilled = (
        simulate(calls, rates, waiting=waiting(sizes, capacity, num_reads=2))
        for capacity in (1 << 20, 0)
    )
    assert held == simulate(calls, rates)
    # They are written beside the calls, the last one after it, and read twice.
    last = sum(piece in dict(calls.calls[-1].gradients) for piece in pieces)
    found = (spilled - held) / 0.05 - 2 * len(pieces)
    assert found == pytest.approx(last)
    half = replace(rates, num_parts=2)
    parts = simulate(calls, half, waiting=waiting(sizes, 0, num_reads=2))
    assert parts - 2 * held == pytest.approx(spilled - held)


def test_params_that_are_read_slowly_cost_time():
    _, graph, plan = cut()
    rates = replace(profile(plan, 1e9), params=10.0)
    calls = make_calls(graph, plan.programs, "offload")
    loads = Trips([Trip(3, 3, 1000, 1000, 4096)], {}, read_bytes=4096)
    alone, read = (simulate(calls, rates, one) for one in (None, loads))
    assert read > alone
    assert read > 100.0


def test_what_fits_stays():
    _, graph, plan = cut()
    budget = budget_of(plan, 1.0)
    found = chosen(graph, plan, budget, profile(plan, 1.0))
    assert not found.repeats
    assert not found.calls.evictions


def test_a_budget_that_is_too_small_has_no_plan():
    _, graph, plan = cut()
    assert chosen(graph, plan, 1, profile(plan, 1.0)) is None


@pytest.mark.parametrize("rate", [1500.0, 1e9])
def test_a_chosen_plan_has_the_bits_of_keep(rate, tmp_path):
    program, graph, plan = cut()
    budget, rates = budget_of(plan, 0.6), profile(plan, rate)
    found = chosen(graph, plan, budget, rates)
    executables = {}
    expected = streamed(program, plan, executables)
    values = Values(found.calls, Scratch([tmp_path]))
    mixed = replace(plan, calls=found.calls)
    assert_same_bits(streamed(program, mixed, executables, values=values), expected)
    assert values.peak_bytes == found.peak_bytes
    values.close()


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "which"),
    [
        ("haiku", "every second"),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                ("linen_scan_remat_dropout", "all"),
                ("gpt2_nano", "every second"),
                ("gpt2_nano", "all"),
                ("linen_scan_remat_dropout", "every second"),
                ("u_net", "every second"),
                ("u_net", "all"),
            )
        ),
    ],
)
def test_segments_that_run_again_for_all_parts_have_the_bits_of_keep(name, which):
    program = ZOO[name]()
    ready = prepared(program)
    plan = ready.plan(ready.smallest_bytes("offload") * 5 // 4, "offload")
    executables = {}
    expected = streamed(program, plan, executables)
    segments = range(len(plan.programs.forward) - 1)
    repeats = dict.fromkeys(segments[:: 2 if which == "every second" else 1], "all")
    graph = ready.lifetimes.graph
    calls = make_calls(graph, plan.programs, "plan", repeats)
    assert any(call.is_repeat for call in calls.calls)
    forgotten = {
        value for k in repeats for value in plan.programs.forward[k].outputs
    } - set(graph.results)
    kept = make_calls(graph, plan.programs, "plan")
    assert max(calls.held_bytes()) <= max(kept.held_bytes()) or not forgotten
    mixed = replace(plan, calls=calls)
    assert_same_bits(streamed(program, mixed, executables), expected)


def test_recomputing_all_holds_no_scores():
    """They have a segment of their own, whose backward part does not read them."""
    program = ZOO["gpt2_nano"]()
    ready = prepared(program)
    plan = ready.plan(ready.smallest_bytes("offload") * 5 // 4, "plan")
    repeats = all_repeats(plan.programs)
    assert set(repeats.values()) == {"own", "all"}
    graph = ready.lifetimes.graph
    own = {k: reach for k, reach in repeats.items() if reach == "own"}
    every, others = (
        make_calls(graph, plan.programs, "plan", which) for which in (repeats, own)
    )
    assert max(every.held_bytes()) < max(others.held_bytes())
