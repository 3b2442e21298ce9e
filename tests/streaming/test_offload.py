"""Values that leave, for drives or by the host's memory: bits, memory, failures."""

import errno
import gc
import os
import threading
import time
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import late_copies
import numpy as np
import optax
import pytest
from families import family
from inject import at_call, at_each_call, raising
from raw_stores import make_roots
from streaming_cases import (
    CHUNKS,
    assert_same_bits,
    assert_same_states,
    moved_as_planned,
    prepared,
    run,
    smallest_bytes,
    states,
    trained,
)
from streaming_cases import streamed as streamed_plan
from zoo import ONLY_PLANNED, ZOO, Program, normal

import jaxinf
from jaxinf.errors import BudgetError, StoreIOError, StoreSpaceError, StreamError
from jaxinf.streaming import compiled_step
from jaxinf.streaming.move.scratch import MAX_RUN_BYTES, ScratchFiles, padded_bytes
from jaxinf.streaming.move.values import Values
from jaxinf.streaming.plan.compiled import Executables, measure_memory
from jaxinf.streaming.plan.cut_to_fit import cut_to_fit
from jaxinf.streaming.plan.offload import evict_values, least_peak_bytes, place_on_host
from jaxinf.streaming.plan.order import make_plan
from jaxinf.streaming.plan.recompute import (
    NUM_MEASURED,
    StepTimes,
    freed_bytes,
    segments_to_recompute,
)
from jaxinf.streaming.program.cut import cuts_of
from jaxinf.transfer import ByteMeters, allocate_pages, page_ceil

pytestmark = pytest.mark.optimized("long")

TX = optax.adam(1e-2)
ENOUGH = 1 << 40


# --- plans ---------------------------------------------------------------------------


@pytest.fixture
def plans(small_values_leave):
    """Makes plans of a program: with all values in memory, and with the most away."""

    def make(program):
        ready = prepared(program)
        cuts = cut_to_fit(ready, smallest_bytes(ready) * 3 // 2).cuts
        keep, offload = (make_plan(ready, cuts, name) for name in ("keep", "offload"))
        offload = measure_memory(offload, executables := Executables())
        plan = evict_values(offload, budget_bytes := least_peak_bytes(offload))
        assert plan.peak_bytes <= budget_bytes
        return keep, plan, executables

    return make


def least_of(plan):
    """The least memory of the host for values."""
    try:
        place_on_host(plan, 0)
    except BudgetError as error:
        return error.missing_bytes
    return 0


def pinned_bytes():
    """Pinned memory of the process, in whole pages of each array."""
    arrays = [x for x in jax.live_arrays() if x.sharding.memory_kind == "pinned_host"]
    return sum(page_ceil(array.nbytes) for array in arrays)


class Watched(Values):
    """Sees that values which are gone take no memory; notes the host's for copies."""

    most_pinned_bytes = 0

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.made = {}
        gc.collect()
        self.others = pinned_bytes()

    def put(self, values, outputs):
        super().put(values, outputs)
        self.made |= zip(values, map(weakref.ref, outputs), strict=True)

    def before_call(self, number):
        super().before_call(number)
        for value in (x for n in self._gone if n <= number for x in self._gone[n]):
            held = self.made[value]() if self._has_link else self._offloaded[value].host
            assert held is None, "it is still in memory"
        pinned = pinned_bytes() - self.others
        self.most_pinned_bytes = max(self.most_pinned_bytes, pinned)


BY_THE_HOST = ("scan_remat_reverse", "custom_rules", "gpt2_nano", "linen_scan")


@pytest.mark.parametrize(
    "name", family(ZOO, short=["scan_remat_reverse"], beyond=ONLY_PLANNED)
)
def test_bits_are_those_of_keep(name, plans, tmp_path):
    """By way of drives alone, and of a host that has room for all, none, or some."""
    program = ZOO[name]()
    keep, plan, executables = plans(program)
    expected = streamed_plan(program, keep, executables)
    sizes = {value: plan.lives[value].num_bytes for value in plan.evictions}
    most, least = place_on_host(plan, ENOUGH).host_bytes, least_of(plan)
    hosts = (most, least, (least + most) // 2) if name in BY_THE_HOST else ()
    for host_bytes in (None, *hosts):
        offload = place_on_host(plan, host_bytes) if host_bytes else plan.offload
        values = Watched(replace(plan, offload=offload), ScratchFiles([tmp_path]))
        for _ in range(2):  # the second step reuses the files
            found = streamed_plan(program, plan, executables, values=values)
            assert_same_bits(found, expected)
        moved = values.moved.snapshot()
        on_drive = sum(sizes[value] for value in offload.on_drive)
        assert moved.drive_write_bytes == 2 * on_drive
        assert moved.drive_read_bytes <= 2 * on_drive
        if host_bytes is not None:
            assert bool(on_drive) == (host_bytes < most)
            assert moved.link_up_bytes == 2 * sum(sizes.values())
            assert max(values.most_pinned_bytes, offload.host_bytes) <= host_bytes
        values.close()


def test_bits_do_not_depend_on_a_slow_drive(plans, tmp_path, monkeypatch):
    """What still has to be written, and what is read late, is waited for."""
    program, drive = ZOO["l2_penalty"](depth=8), threading.Lock()
    keep, plan, executables = plans(program)
    expected, least = streamed_plan(program, keep, executables), least_of(plan)

    def pause(scratch, part, *_):
        with drive:
            time.sleep(part.num_bytes / 1e5)

    def note(scratch, part, *_):
        written.add(part)

    for name in ("write", "read"):
        at_each_call(monkeypatch, ScratchFiles, name, pause)
    at_each_call(monkeypatch, ScratchFiles, "write", note, after=True)
    at_each_call(monkeypatch, ScratchFiles, "read", lambda _, p, *__: written.remove(p))
    for offload in (plan.offload, place_on_host(plan, least)):
        written = set()
        values = Watched(replace(plan, offload=offload), ScratchFiles([tmp_path]))
        found = streamed_plan(program, plan, executables, values=values)
        assert_same_bits(found, expected)
        assert values.moved.snapshot().drive_write_bytes > 0
        assert values.most_pinned_bytes <= least  # the host is not filled
        values.close()


def test_a_value_that_is_still_written_is_forwarded(plans, tmp_path, monkeypatch):
    """Its read, which is late, ends with its step."""
    program = ZOO["l2_penalty"](depth=8)
    keep, plan, executables = plans(program)
    offload = replace(place_on_host(plan, least_of(plan)), leaving_bytes=ENOUGH)
    values = Values(replace(plan, offload=offload), ScratchFiles([tmp_path]))
    last, coming, over = offload.on_drive[-1], threading.Event(), threading.Event()

    def pause(event, those, _, one, *__):
        assert one not in those or event.wait(10)

    def note(_, number):
        if number == plan.evictions[last].return_call:
            coming.set()

    for owner, name, event, those in (
        (ScratchFiles, "write", coming, values._places[last]),
        (Values, "_read", over, [last]),
    ):
        at_each_call(monkeypatch, owner, name, partial(pause, event, those))
    at_each_call(monkeypatch, Values, "before_call", note, after=True)
    at_each_call(monkeypatch, Values, "reset", lambda _: over.set(), after=True)
    found = streamed_plan(program, plan, executables, values=values)
    assert_same_bits(found, streamed_plan(program, keep, executables))
    moved = values.moved.snapshot()
    assert moved.drive_read_bytes < moved.drive_write_bytes
    ending = threading.Thread(target=values._jobs.wait_all, daemon=True)
    ending.start()
    ending.join(10)
    assert not ending.is_alive()
    values.close()


def test_the_value_needed_last_leaves_first(plans):
    plan = plans(ZOO["l2_penalty"](depth=8))[1]
    whole = replace(plan, evictions={})
    least, most = least_peak_bytes(whole), max(whole.call_bytes())
    assert least < 0.7 * most
    for budget_bytes in range(least, most, 4096):
        assert evict_values(whole, budget_bytes).peak_bytes <= budget_bytes
    one = evict_values(whole, most - 1).evictions
    others = [
        life.takers[-1]
        for value, life in plan.lives.items()
        if value not in one and life.takers and life.made == 0
    ]
    assert max(eviction.use_call for eviction in one.values()) >= max(others)
    on_drive = place_on_host(plan, least_of(plan)).on_drive
    stay = [e.use_call for value, e in plan.evictions.items() if value not in on_drive]
    assert min(plan.evictions[s].use_call for s in on_drive) >= max(stay, default=0)


@pytest.mark.usefixtures("everything_leaves")
@pytest.mark.parametrize(
    ("name", "num_csds"),
    family([("l2_penalty", 2), ("scan_remat_reverse", 0)], short=[("l2_penalty", 2)]),
)
def test_a_step_is_that_of_keep(name, num_csds, streamed, open_store, place):
    program, csds = ZOO[name](), make_roots(place, "offload", num_csds)
    store = open_store("offload", csds=csds, **CHUNKS)
    offload = streamed(program, TX, store=store, policy="offload")
    losses, found = trained(offload, program)
    keep = streamed(program, TX, "keep", policy="keep")
    expected_losses, expected = trained(keep, program)
    assert losses == expected_losses
    assert_same_states(found, expected)
    assert offload.metrics.offloaded_drive_bytes > 0
    assert not keep.metrics.offloaded_drive_bytes


# --- steps on a device with memory of its own ----------------------------------------


def wide(params, batch):
    x = batch
    for w in params["layers"]:
        x = jnp.tanh(x @ w) + jnp.sin(x)
    return jnp.mean(x**2)


LAYERS = {"layers": [normal(i, 64, 64) / 8 for i in range(12)]}
WIDE = Program(wide, LAYERS, normal(100, 2048, 64))  # values of 512 KiB
OFFLOAD = {"policy": "offload", "device_memory_bytes": 9 << 19}
# What leaves has room on the host, or not.
ROOM, NO_ROOM = {"memory_bytes": 64 << 20}, {"memory_bytes": 17 << 20}


def test_a_value_keeps_its_memory_until_its_copy_has_left(streamed, late, monkeypatch):
    """A copy that is under way holds what it reads, which `Watched` looks for."""
    del late
    monkeypatch.setattr(late_copies, "DELAY_S", 0.02)
    monkeypatch.setattr(compiled_step, "Values", Watched)
    step = streamed(WIDE, TX, **ROOM, **OFFLOAD)
    step.load(LAYERS, batch=WIDE.batch)
    step(WIDE.batch)
    assert step.metrics.offloaded_host_bytes > 0


@pytest.mark.long
@pytest.mark.usefixtures("own_memory")
def test_a_host_that_is_too_small_is_named(streamed, open_store, place):
    message = r"memory_bytes: it leaves .*iB of the host for values .* expected "
    message += r"2.00 MiB, .* 4 x the largest, .* memory_bytes=.* works"
    scratch = {"memory_bytes": 9 << 20, "scratch": place}
    for step in (
        streamed(WIDE, TX, memory_bytes=15 << 20, **OFFLOAD),
        jaxinf.stream_in_memory(wide, TX, **scratch, **OFFLOAD),
    ):
        with pytest.raises(StreamError, match=message):
            step.load(LAYERS, batch=WIDE.batch)
    assert not open_store("store").exists


@pytest.mark.long
@pytest.mark.usefixtures("own_memory")
@pytest.mark.parametrize(
    ("owner", "name", "number", "error"),
    [
        (Values, "before_call", 20, KeyboardInterrupt),
        (ScratchFiles, "write", 3, StoreSpaceError),
        (ScratchFiles, "read", 2, StoreIOError),
    ],
)
def test_a_step_that_ends_early(streamed, monkeypatch, owner, name, number, error):
    step = streamed(WIDE, TX, **NO_ROOM, **OFFLOAD)
    step.load(LAYERS, batch=WIDE.batch)
    found = run(step, WIDE, 1)
    with monkeypatch.context() as patched:
        at_call(owner, name, number, raising(error("it is over")), patch=patched)
        with pytest.raises(error):
            step(WIDE.batch)
    found += run(step, WIDE, 2)
    whole = streamed(WIDE, TX, "whole", **NO_ROOM, **OFFLOAD)
    whole.load(LAYERS, batch=WIDE.batch)
    assert found == run(whole, WIDE, 3)
    assert_same_bits(*(one.store.params(like=LAYERS) for one in (step, whole)))


# --- files without names --------------------------------------------------------------


SIZES = [0, 1, 4095, 4096, 4097, MAX_RUN_BYTES - 1, 2 * MAX_RUN_BYTES + 5]


def write(scratch, place, value):
    for part in place:
        scratch.write(part, value)


def read(scratch, place):
    out = allocate_pages(padded_bytes(place))
    for part in place:
        scratch.read(part, out)
    return out


def test_values_come_back(tmp_path):
    """All are written before one is read: places do not overlap, nor do runs' files."""
    folders = [*map(Path, make_roots(tmp_path, "values", 3))]
    meters = ByteMeters()
    scratch, beside = ScratchFiles(folders, meters), ScratchFiles(folders)
    rng = np.random.default_rng(0)
    values = [rng.integers(0, 256, size).astype(np.uint8) for size in SIZES]
    places = scratch.allocate(dict(enumerate(SIZES))).values()
    for value, place in zip(values, places, strict=True):
        write(scratch, place, value)
    write(beside, beside.allocate({0: 9000})[0], np.ones(9000, np.uint8))
    beside.close()
    for value, place in zip(values, places, strict=True):
        np.testing.assert_array_equal(read(scratch, place)[: value.nbytes], value)
    counts = meters.snapshot()
    assert counts.drive_write_bytes == sum(page_ceil(size) for size in SIZES)
    assert counts.drive_read_bytes == counts.drive_write_bytes
    assert {part.drive for place in places for part in place} == {0, 1, 2}
    assert not any(list(folder.iterdir()) for folder in folders)
    scratch.close()


def test_a_file_that_has_no_room_leaves_none(tmp_path, monkeypatch):
    full = raising(OSError(errno.ENOSPC, "No space left on device"))
    num_open = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StoreSpaceError, match="reserving room failed"):
        ScratchFiles([tmp_path]).allocate({0: 1})
    assert len(os.listdir("/proc/self/fd")) == num_open


# --- policy="plan" --------------------------------------------------------------------


PROGRAM = ZOO["l2_penalty"](depth=8)


def times(plan, waited, own):
    directions = [call.program.direction for call in plan.calls]
    one = StepTimes(
        [own.get(d, 0.0) for d in directions], [waited.get(d, 0.0) for d in directions]
    )
    return [one] * NUM_MEASURED


@pytest.mark.usefixtures("everything_leaves")
def test_the_cheapest_bytes_are_recomputed_as_far_as_drives_are_slower():
    ready = prepared(PROGRAM)
    plan = evict_values(make_plan(ready, cuts_of(ready, 1 << 15), "plan"), 0)
    freed = freed_bytes(plan)
    assert len(freed) > 2
    cheapest = sorted(freed, key=lambda one: -freed[one])
    away_bytes = sum(plan.lives[value].num_bytes for value in plan.evictions)
    both = {"forward": 1.0, "backward": 1.0}

    def chosen(waited, own):
        return segments_to_recompute(plan, times(plan, waited, own))

    assert chosen(both, {"forward": 1e-9}) == set(freed)
    for half in both:  # in which calls wait a fifth of the time
        found = chosen({half: 0.25}, both)
        assert found == set(cheapest[: len(found)])
        less, enough = (
            sum(freed[k] for k in cheapest[: len(found) - n]) for n in (1, 0)
        )
        assert less < away_bytes / 5 <= enough
    assert not chosen({"backward": 1.0}, {"forward": 100.0})  # it would take longer
    assert not chosen({"forward": 0.01}, both)  # drives keep up


@pytest.mark.usefixtures("everything_leaves")
def test_nothing_is_recomputed_where_nothing_is_backward():
    def loss(params, batch):
        given, *layers = jax.lax.stop_gradient(params)
        first = x = jnp.tanh(batch["x"] @ given["w"])
        for layer in layers:
            x = jnp.tanh(x @ layer["w"])
        return jnp.mean(x * first)  # which is away meanwhile

    ready = prepared(replace(PROGRAM, loss=loss))
    plan = evict_values(make_plan(ready, cuts_of(ready, 1 << 12), "plan"), 0)
    assert plan.evictions
    both = {"forward": 1.0, "free": 1.0}
    assert not segments_to_recompute(plan, times(plan, both, both))


def slow(call_s, waited_s):
    """What a drive would give that takes nearly all of a step's time."""
    return StepTimes([1e-9] * len(call_s), [1.0] * len(waited_s))


@pytest.mark.usefixtures("everything_leaves")
def test_a_plan_that_is_chosen_changes_no_bit(streamed, monkeypatch):
    monkeypatch.setattr(compiled_step, "StepTimes", slow)
    found, num_steps = {}, 2 * NUM_MEASURED + 1
    for policy in ("keep", "plan"):
        step = streamed(PROGRAM, TX, policy, policy=policy, micro_batches=2)
        step.load(PROGRAM.params, batch=PROGRAM.batch)
        losses, plans = [], []
        for _ in range(num_steps):
            losses += run(step, PROGRAM, 1)
            plans.append(step.plan)
        moved_as_planned(step, "drive_write_bytes")
        found[policy] = losses, states(step.store)
    assert found["plan"][0] == found["keep"][0]
    assert_same_states(found["plan"][1], found["keep"][1])
    first, *_, last = plans
    assert first is plans[NUM_MEASURED - 1] is not last
    assert first.cuts == last.cuts
    assert not any(call.is_repeat for call in first.calls)
    assert any(call.is_repeat for call in last.calls)
    assert len(last.evictions) < len(first.evictions)
    assert plans[NUM_MEASURED] is last  # it is chosen once
