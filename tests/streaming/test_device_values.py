"""Values that leave a device with memory of its own, forced on a CPU: to the host's
memory and to drives."""

import gc
import threading
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from families import family
from streaming import assert_same_bits, prepared, smallest_bytes, streamed
from zoo import ZOO, normal

import jaxinf
from jaxinf.errors import BudgetError, StreamError
from jaxinf.store import seal
from jaxinf.streaming.move.scratch import Scratch
from jaxinf.streaming.move.values import Values
from jaxinf.streaming.plan import leaving
from jaxinf.streaming.plan.compiled import measured
from jaxinf.streaming.plan.fit import cut_to_fit, plan_of
from jaxinf.streaming.plan.leaving import NUM_COPIES, evicted, least_bytes, plan_tiers
from jaxinf.transfer.pages import page_ceil

pytestmark = pytest.mark.optimized("long")

TX = optax.adam(1e-2)
ENOUGH = 1 << 40
DRIVE = threading.Lock()


@pytest.fixture
def small_values_leave(monkeypatch):
    monkeypatch.setattr(leaving, "SMALL_BYTES", 1)


def plans(program, share=0.0):
    """Plans of one program: with all values in memory, and with as many away as fit."""
    ready = prepared(program)
    cuts = cut_to_fit(ready, smallest_bytes(ready) * 3 // 2).cuts
    keep, offload = (plan_of(ready, cuts, policy) for policy in ("keep", "offload"))
    offload = measured(offload, executables := {})
    least = least_bytes(offload)
    budget = least + int(share * (offload.most_bytes() - least))
    return keep, evicted(offload, budget), executables


def least_of(plan):
    """The least memory of the host for values."""
    try:
        plan_tiers(plan, 0)
    except BudgetError as error:
        return error.missing_bytes
    return 0


def hosts(plan):
    """Memory of the host: enough for all, the least, and between."""
    most = plan_tiers(plan, ENOUGH).host_bytes
    least = least_of(plan)
    return [most, *{max(least, most - 4096), least, (least + most) // 2}]


def pinned_bytes():
    """Pinned memory of the process, in whole pages of each array."""
    arrays = [x for x in jax.live_arrays() if x.sharding.memory_kind == "pinned_host"]
    return sum(page_ceil(array.nbytes) for array in arrays)


class Watched(Values):
    """Notes what is in memory while a step runs."""

    def __init__(self, plan, scratch, tiers):
        super().__init__(plan, scratch, tiers)
        self.made = {}
        gc.collect()
        self.others = pinned_bytes()
        self.most_bytes = 0

    def put(self, slots, outputs):
        super().put(slots, outputs)
        for slot, output in zip(slots, outputs, strict=True):
            self.made[slot] = weakref.ref(output)

    def before(self, number):
        super().before(number)
        for slots in (self._gone[n] for n in self._gone if n <= number):
            for slot in slots:
                assert self.made[slot]() is None, "it is still on the device"
        self.most_bytes = max(self.most_bytes, pinned_bytes() - self.others)


NAMES = ("scan_remat_reverse", "custom_rules", "gpt2_nano", "linen_dropout")


@pytest.mark.usefixtures("small_values_leave")
@pytest.mark.parametrize("name", family(NAMES, short=NAMES[:2]))
def test_bits_are_those_of_keep(name, tmp_path):
    program = ZOO[name]()
    keep, plan, executables = plans(program)
    expected = streamed(program, keep, executables)
    for host_bytes in hosts(plan):
        tiers = plan_tiers(plan, host_bytes)
        assert tiers.host_bytes <= host_bytes
        values = Watched(plan, Scratch([tmp_path]), tiers)
        for _ in range(2):  # the second step reuses the files
            found = streamed(program, plan, executables, values=values)
            assert_same_bits(found, expected)
        counts = values.counts()
        lives = plan.lives
        sizes = {slot: lives[slot].num_bytes for slot in plan.evictions}
        on_drive = sum(sizes[slot] for slot in tiers.on_drive)
        assert bool(on_drive) == (host_bytes < hosts(plan)[0])
        assert counts.num_out_bytes == 2 * sum(sizes.values())
        assert counts.num_written_bytes == 2 * on_drive
        assert (counts.num_read_bytes == 2 * on_drive) == (not counts.num_forwarded)
        assert values.most_bytes <= host_bytes
        values.close()
    assert not list(tmp_path.iterdir())


def slow(move):
    """A read or write of a drive that moves 100 kB a second."""

    def moved(scratch, part, *arguments, **named):
        with DRIVE:
            time.sleep(part.num_bytes / 1e5)
        return move(scratch, part, *arguments, **named)

    return moved


@pytest.mark.usefixtures("small_values_leave")
def test_bits_do_not_depend_on_a_slow_drive(tmp_path, monkeypatch):
    program = ZOO["l2_penalty"](depth=8)
    keep, plan, executables = plans(program)
    least = least_of(plan)
    tiers = plan_tiers(plan, least)
    assert tiers.on_drive
    for name in ("write", "read"):
        monkeypatch.setattr(Scratch, name, slow(getattr(Scratch, name)))
    values = Watched(plan, Scratch([tmp_path]), tiers)
    found = streamed(program, plan, executables, values=values)
    assert_same_bits(found, streamed(program, keep, executables))
    assert values.most_bytes <= least
    values.close()


# --- where values wait -------------------------------------------------------------


@pytest.mark.usefixtures("small_values_leave")
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_what_is_needed_soonest_stays_on_the_host(share):
    plan = plans(ZOO["l2_penalty"](depth=12), share=share)[1]
    most = plan_tiers(plan, ENOUGH)
    assert most.on_drive == ()
    largest = page_ceil(max(plan.lives[slot].num_bytes for slot in plan.evictions))
    assert least_of(plan) == 2 * NUM_COPIES * largest
    numbers = []
    for host_bytes in range(least_of(plan), most.host_bytes, largest):
        tiers = plan_tiers(plan, host_bytes)
        needed = [plan.evictions[slot].needed for slot in tiers.on_drive]
        stay = [
            (one, page_ceil(plan.lives[slot].num_bytes))
            for slot, one in plan.evictions.items()
            if slot not in tiers.on_drive
        ]
        others = [one.needed for one, _ in stay]
        assert needed == sorted(needed)
        assert min(needed) >= max(others, default=0)
        assert list(tiers.room) == sorted(tiers.room)
        assert min(tiers.room) >= largest
        passing = tiers.leaving_bytes + (NUM_COPIES - 1) * largest
        for number, room in enumerate(tiers.room):
            held = sum(n for one, n in stay if one.written < number <= one.needed)
            assert held + passing + room <= host_bytes
        numbers.append(len(needed))
    assert numbers[-1] < numbers[0]


# --- whole steps -------------------------------------------------------------------


def wide(params, batch):
    x = batch
    for w in params["layers"]:
        x = jnp.tanh(x @ w) + jnp.sin(x)
    return jnp.mean(x**2)


LAYERS = {"layers": [normal(i, 64, 64) / 8 for i in range(12)]}
BATCH = normal(100, 2048, 64)  # values of 512 KiB
DEVICE_BYTES = 9 << 19
# What leaves has room on the host, or not.
HOSTS = {"host": 64 << 20, "drives": 17 << 20}


def opened(
    open_store, name, policy, memory_bytes, device=DEVICE_BYTES, like=None, **options
):
    step = jaxinf.stream(
        wide,
        TX,
        open_store(name, chunk_elements=4096, memory_bytes=4 << 20),
        memory_bytes=memory_bytes,
        device_memory_bytes=device,
        policy=policy,
        **options,
    )
    if like is None:
        step.load(LAYERS, batch=BATCH)
    else:
        step.load(LAYERS)
        (bound,) = like._bound.values()
        (step.store.path / "stream").mkdir()
        for name, plan in bound.sink._streams.items():
            (step.store.path / f"stream/{name}.json").write_bytes(seal(plan))
    return step


def kept(open_store, like, **options):
    """A step with all values in memory, and the same cuts."""
    memory, device = 256 << 20, 64 << 20
    return opened(open_store, "keep", "keep", memory, device, like, **options)


def losses(step, num_steps=3):
    return [float(step(BATCH)[0]) for _ in range(num_steps)]


def assert_same_params(step, other):
    found, expected = (s.store.params(like=LAYERS) for s in (step, other))
    for one, two in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.long
@pytest.mark.usefixtures("own_memory")
@pytest.mark.parametrize(
    ("tier", "options"),
    [
        ("drives", {}),
        ("host", {"micro_batches": 2}),
    ],
    ids=str,
)
def test_training_is_that_of_keep(open_store, tier, options):
    options = {"policy": "offload", **options}
    step = opened(open_store, "step", memory_bytes=HOSTS[tier], **options)
    found = losses(step)
    del options["policy"]
    keep = kept(open_store, step, **options)
    assert found == losses(keep)
    assert_same_params(step, keep)
    if options.get("micro_batches", 1) == 1:
        assert step.metrics.offloaded_host_bytes > 0
        assert (step.metrics.offloaded_drive_bytes > 0) == (tier == "drives")
    step.store.wait()
    traffic, planned = step.store.metrics.traffic, step.traffic
    assert traffic.drive_write_bytes == planned.drive_write_bytes


@pytest.mark.long
@pytest.mark.usefixtures("own_memory")
def test_without_a_store(place):
    found = []
    for own, memory_bytes, device_bytes in (
        ("keep", 64 << 20, 64 << 20),
        ("offload", HOSTS["drives"] - (5 << 20), DEVICE_BYTES),
    ):
        step = jaxinf.stream_in_memory(
            wide,
            TX,
            memory_bytes=memory_bytes,
            device_memory_bytes=device_bytes,
            policy=own,
            scratch=place,
        )
        step.load(LAYERS, batch=BATCH)
        found.append(losses(step, 8))
        if own == "offload":
            assert step.plan.evictions
            assert step.traffic.drive_write_bytes > 0
        step.close()
    np.testing.assert_allclose(found[0], found[1], rtol=1e-6)  # the cuts may differ
    assert not list(place.iterdir())


@pytest.mark.long
@pytest.mark.usefixtures("own_memory")
def test_a_host_that_is_too_small_is_named(open_store, place):
    message = r"memory_bytes: it leaves \d+ bytes of the host for values .* expected "
    message += r"2097152, .* 4 x the largest, .* memory_bytes=.* works"
    with pytest.raises(StreamError, match=message):
        opened(open_store, "step", "offload", 15 << 20)
    assert not open_store("step").exists
    step = jaxinf.stream_in_memory(
        wide,
        TX,
        memory_bytes=9 << 20,
        device_memory_bytes=DEVICE_BYTES,
        policy="offload",
        scratch=place,
    )
    with pytest.raises(StreamError, match=message):
        step.load(LAYERS, batch=BATCH)


@pytest.mark.long
@pytest.mark.usefixtures("own_memory")
def test_a_step_that_is_interrupted(open_store, monkeypatch):
    step = opened(open_store, "step", "offload", HOSTS["drives"])
    found = losses(step, 1)
    real, hits = Values.before, []

    def stop(self, number):
        real(self, number)
        hits.append(number)
        if len(hits) == len(step.plan.calls) // 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Values, "before", stop)
        with pytest.raises(KeyboardInterrupt):
            step(BATCH)
    found += losses(step, 2)
    keep = kept(open_store, step)
    assert found == losses(keep, 3)
    assert_same_params(step, keep)
