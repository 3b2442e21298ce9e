"""Values that leave, for drives or by the host's memory: bits, memory, failures."""

import gc
import threading
import time
import weakref
from dataclasses import replace

import jax
import jax.numpy as jnp
import late_copies
import optax
import pytest
from families import family
from golden_streams import edit, streams
from streaming import (
    assert_same_bits,
    moved_as_planned,
    prepared,
    run,
    smallest_bytes,
    streamed,
)
from zoo import ONLY_PLANNED, ZOO, Program, normal

import jaxinf
from jaxinf.errors import BudgetError, StoreIOError, StoreSpaceError, StreamError
from jaxinf.streaming import compiled_step
from jaxinf.streaming.move.scratch import Scratch
from jaxinf.streaming.move.values import Values
from jaxinf.streaming.plan import cut_to_fit as cutting
from jaxinf.streaming.plan import leaving
from jaxinf.streaming.plan.compiled import Executables, measured
from jaxinf.streaming.plan.cut_to_fit import cut_to_fit, plan_of
from jaxinf.streaming.plan.leaving import evicted, least_bytes, plan_tiers
from jaxinf.transfer import page_ceil

pytestmark = pytest.mark.optimized("long")

TX = optax.adam(1e-2)
ENOUGH = 1 << 40


@pytest.fixture
def small_values_leave(monkeypatch):
    monkeypatch.setattr(leaving, "SMALL_BYTES", 1)


# --- plans ---------------------------------------------------------------------------


def plans(program):
    """Plans of one program: with all values in memory, and with some away."""
    ready = prepared(program)
    cuts = cut_to_fit(ready, smallest_bytes(ready) * 3 // 2).cuts
    keep, offload = (plan_of(ready, cuts, policy) for policy in ("keep", "offload"))
    return keep, measured(offload, executables := Executables()), executables


def least_of(plan):
    """The least memory of the host for values."""
    try:
        plan_tiers(plan, 0)
    except BudgetError as error:
        return error.missing_bytes
    return 0


def pinned_bytes():
    """Pinned memory of the process, in whole pages of each array."""
    arrays = [x for x in jax.live_arrays() if x.sharding.memory_kind == "pinned_host"]
    return sum(page_ceil(array.nbytes) for array in arrays)


class Watched(Values):
    """Notes the most bytes of values, and of the host's copies, while a step runs."""

    peak_bytes = most_pinned_bytes = 0

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.made = {}
        gc.collect()
        self.others = pinned_bytes()

    def put(self, slots, outputs):
        super().put(slots, outputs)
        self.made |= zip(slots, map(weakref.ref, outputs), strict=True)
        held_bytes = sum(value.nbytes for value in self._held.values())
        self.peak_bytes = max(self.peak_bytes, held_bytes)

    def before(self, number):
        super().before(number)
        for slots in (self._gone[n] for n in self._gone if n <= number):
            for slot in slots:
                assert self.made[slot]() is None, "it is still on the device"
        pinned = pinned_bytes() - self.others
        self.most_pinned_bytes = max(self.most_pinned_bytes, pinned)


QUICK = ("custom_rules", "scan_remat_reverse")


@pytest.mark.usefixtures("small_values_leave")
@pytest.mark.parametrize("name", family(ZOO, short=QUICK, beyond=ONLY_PLANNED))
def test_bits_are_those_of_keep(name, tmp_path):
    program = ZOO[name]()
    keep, offload, executables = plans(program)
    expected = streamed(program, keep, executables)
    least, most = least_bytes(offload), max(offload.call_bytes())
    for budget in {least, (least + most) // 2}:
        plan = evicted(offload, budget)
        assert plan.peak_bytes <= budget
        values = Values(plan, Scratch([tmp_path]))
        for _ in range(2):  # the second step reuses the files
            found = streamed(program, plan, executables, values=values)
            assert_same_bits(found, expected)
        counts = values.counts()
        sizes = [plan.lives[slot].num_bytes for slot in plan.evictions]
        assert counts.num_written_bytes == counts.num_read_bytes == 2 * sum(sizes)
        values.close()
    assert not list(tmp_path.iterdir())


NAMES = ("scan_remat_reverse", "custom_rules", "gpt2_nano", "linen_dropout")


@pytest.mark.usefixtures("small_values_leave")
@pytest.mark.parametrize("name", family(NAMES, short=NAMES[:1]))
def test_bits_are_those_of_keep_by_way_of_the_host(name, tmp_path):
    program = ZOO[name]()
    keep, offload, executables = plans(program)
    plan = evicted(offload, least_bytes(offload))
    expected = streamed(program, keep, executables)
    sizes = {slot: plan.lives[slot].num_bytes for slot in plan.evictions}
    most, least = plan_tiers(plan, ENOUGH).host_bytes, least_of(plan)
    for host_bytes in (most, least, (least + most) // 2):
        tiers = plan_tiers(plan, host_bytes)
        values = Watched(plan, Scratch([tmp_path]), tiers)
        for _ in range(2):
            found = streamed(program, plan, executables, values=values)
            assert_same_bits(found, expected)
        counts = values.counts()
        on_drive = sum(sizes[slot] for slot in tiers.on_drive)
        assert bool(on_drive) == (host_bytes < most)
        assert counts.num_out_bytes == 2 * sum(sizes.values())
        assert counts.num_written_bytes == 2 * on_drive
        assert counts.num_read_bytes <= 2 * on_drive
        assert max(values.most_pinned_bytes, tiers.host_bytes) <= host_bytes
        values.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("small_values_leave")
@pytest.mark.parametrize(
    ("names", "has_link"), [(["write", "read"], True), (["write"], False)]
)
def test_bits_do_not_depend_on_a_slow_drive(names, has_link, tmp_path, monkeypatch):
    """What still has to be written, and what is read late, is waited for."""
    program, drive = ZOO["l2_penalty"](depth=8), threading.Lock()
    keep, offload, executables = plans(program)
    plan = evicted(offload, least_bytes(offload))
    least = least_of(plan)
    tiers = plan_tiers(plan, least) if has_link else None

    def slow(move):
        def moved(scratch, part, *arguments, **named):
            with drive:
                time.sleep(part.num_bytes / 1e5)
            return move(scratch, part, *arguments, **named)

        return moved

    for name in names:
        monkeypatch.setattr(Scratch, name, slow(getattr(Scratch, name)))
    values = (Watched if has_link else Values)(plan, Scratch([tmp_path]), tiers)
    found = streamed(program, plan, executables, values=values)
    assert_same_bits(found, streamed(program, keep, executables))
    assert values.counts().num_written_bytes > 0
    if has_link:  # the host is not filled
        assert values.most_pinned_bytes <= least
    values.close()


@pytest.mark.usefixtures("small_values_leave")
def test_a_value_that_is_still_written_is_forwarded(tmp_path, monkeypatch):
    program, coming = ZOO["l2_penalty"](depth=8), threading.Event()
    keep, offload, executables = plans(program)
    plan = evicted(offload, least_bytes(offload))
    tiers = replace(plan_tiers(plan, least_of(plan)), leaving_bytes=ENOUGH)
    first = min(one.back for one in plan.evictions.values())
    write, before = Scratch.write, Values.before

    def written(*arguments):
        coming.wait(10)
        return write(*arguments)

    def noted(values, number):
        before(values, number)
        if number == first:  # a value is on its way back
            coming.set()

    monkeypatch.setattr(Scratch, "write", written)
    monkeypatch.setattr(Values, "before", noted)
    values = Values(plan, Scratch([tmp_path]), tiers)
    found = streamed(program, plan, executables, values=values)
    assert_same_bits(found, streamed(program, keep, executables))
    counts = values.counts()
    assert counts.num_read_bytes < counts.num_written_bytes
    values.close()


@pytest.mark.usefixtures("small_values_leave")
def test_memory_is_as_planned(tmp_path):
    program = ZOO["l2_penalty"](depth=8)
    _, offload, executables = plans(program)
    plan = evicted(offload, least_bytes(offload))
    values = Watched(plan, Scratch([tmp_path]))
    streamed(program, plan, executables, values=values)
    in_memory = Watched()
    streamed(program, offload, executables, values=in_memory)
    assert values.peak_bytes < 0.7 * in_memory.peak_bytes
    values.close()


@pytest.mark.usefixtures("small_values_leave")
def test_the_value_needed_last_leaves_first():
    plan = plans(ZOO["l2_penalty"](depth=8))[1]
    most = max(plan.call_bytes())
    assert not evicted(plan, most).evictions
    one = evicted(plan, most - 1).evictions
    others = [
        life.takers[-1]
        for slot, life in plan.lives.items()
        if slot not in one and life.takers and life.made == 0
    ]
    assert max(eviction.needed for eviction in one.values()) >= max(others)
    for eviction in evicted(plan, 0).evictions.values():
        assert eviction.written + 2 <= eviction.gone < eviction.back <= eviction.needed
    away = evicted(plan, least_bytes(plan))
    on_drive = plan_tiers(away, least_of(away)).on_drive
    stay = [e.needed for slot, e in away.evictions.items() if slot not in on_drive]
    assert min(away.evictions[s].needed for s in on_drive) >= max(stay, default=0)


# --- steps on a CPU ------------------------------------------------------------------


@pytest.fixture
def everything_leaves(small_values_leave, monkeypatch):
    """Lets every value leave that can, although the budget has room."""
    monkeypatch.setattr(cutting, "evicted", lambda plan, _: evicted(plan, 0))


@pytest.fixture
def offloading(everything_leaves, open_store):
    """Opens steps of a program by their policy."""

    def make(program, policy, **options):
        step = jaxinf.stream(
            program.loss,
            TX,
            open_store(policy, chunk_elements=4096, memory_bytes=16 << 20, **options),
            memory_bytes=256 << 20,
            policy=policy,
        )
        step.load(program.params, batch=program.batch)
        return step

    return make


def assert_same_params(step, other, program):
    assert_same_bits(*(s.store.params(like=program.params) for s in (step, other)))


@pytest.mark.parametrize(
    ("name", "num_csds"),
    family([("l2_penalty", 2), ("scan_remat_reverse", 0)], short=[("l2_penalty", 2)]),
)
def test_a_step_is_that_of_keep(name, num_csds, offloading, place):
    program = ZOO[name]()
    csds = [place / f"csd{i}" for i in range(num_csds)]
    for csd in csds:
        csd.mkdir()
    offload = offloading(program, "offload", csds=csds)
    keep = offloading(program, "keep")
    assert run(offload, program, 3) == run(keep, program, 3)
    assert_same_params(offload, keep, program)
    assert offload.metrics.offloaded_drive_bytes > 0
    assert offload.metrics.fetched_drive_bytes > 0
    assert not keep.metrics.offloaded_drive_bytes
    moved_as_planned(offload)


# --- steps on a device with memory of its own ----------------------------------------


def wide(params, batch):
    x = batch
    for w in params["layers"]:
        x = jnp.tanh(x @ w) + jnp.sin(x)
    return jnp.mean(x**2)


LAYERS = {"layers": [normal(i, 64, 64) / 8 for i in range(12)]}
WIDE = Program(wide, LAYERS, normal(100, 2048, 64))  # values of 512 KiB
DEVICE_BYTES = 9 << 19
# What leaves has room on the host, or not.
HOSTS = {"host": 64 << 20, "drives": 17 << 20}


def opened(open_store, name, memory_bytes, device=DEVICE_BYTES, **options):
    options = {"policy": "offload"} | options
    options |= {"memory_bytes": memory_bytes, "device_memory_bytes": device}
    store = open_store(name, chunk_elements=4096, memory_bytes=4 << 20)
    return jaxinf.stream(wide, TX, store, **options)


def kept(open_store, like, **options):
    """A step with all values in memory, and the cuts of another one."""
    options |= {"memory_bytes": 256 << 20, "device": 64 << 20, "policy": "keep"}
    first = opened(open_store, "keep", **options)
    first.load(LAYERS)
    first.close()
    like.store.wait()
    record = first.store.path / "current/commit.json"
    edit(record, streams=streams(like.store.path))
    step = opened(open_store, "keep", **options)
    step.load(LAYERS)
    return step


def test_a_value_keeps_its_memory_until_its_copy_has_left(
    open_store, late, monkeypatch
):
    """A copy that is under way holds what it reads, which `Watched` looks for."""
    del late
    monkeypatch.setattr(late_copies, "DELAY_S", 0.02)
    monkeypatch.setattr(compiled_step, "Values", Watched)
    step = opened(open_store, "step", HOSTS["host"])
    step.load(LAYERS, batch=WIDE.batch)
    step(WIDE.batch)
    assert step.metrics.offloaded_host_bytes > 0


@pytest.mark.long
@pytest.mark.usefixtures("own_memory")
def test_a_host_that_is_too_small_is_named(open_store, place):
    message = r"memory_bytes: it leaves \d+ bytes of the host for values .* expected "
    message += r"2097152, .* 4 x the largest, .* memory_bytes=.* works"
    options = {"memory_bytes": 9 << 20, "device_memory_bytes": DEVICE_BYTES}
    options |= {"policy": "offload", "scratch": place}
    for step in (
        opened(open_store, "step", 15 << 20),
        jaxinf.stream_in_memory(wide, TX, **options),
    ):
        with pytest.raises(StreamError, match=message):
            step.load(LAYERS, batch=WIDE.batch)
    assert not open_store("step").exists


@pytest.mark.long
@pytest.mark.usefixtures("own_memory")
@pytest.mark.parametrize(
    ("owner", "name", "number", "error"),
    [
        (Values, "before", 20, KeyboardInterrupt),
        (Scratch, "write", 3, StoreSpaceError),
        (Scratch, "read", 2, StoreIOError),
    ],
)
def test_a_step_that_ends_early(open_store, monkeypatch, owner, name, number, error):
    step = opened(open_store, "step", HOSTS["drives"])
    step.load(LAYERS, batch=WIDE.batch)
    found = run(step, WIDE, 1)
    real, hits = getattr(owner, name), []

    def stop(*arguments):
        hits.append(arguments[1])
        if len(hits) == number:
            raise error("it is over")
        return real(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, stop)
        with pytest.raises(error):
            step(WIDE.batch)
    hits.clear()
    found += run(step, WIDE, 2)
    keep = kept(open_store, step)
    assert found == run(keep, WIDE, 3)
    assert_same_params(step, keep, WIDE)
