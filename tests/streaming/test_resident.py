"""Params that stay in memory between steps: bits, traffic, choice, steps given up."""

import functools
import os
import signal
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small_stores
from families import family
from raw_stores import memory_directory
from streaming import prepared, states
from zoo import ZOO, Program, normal

import jaxinf
from jaxinf.engine.steps import StepEngine
from jaxinf.errors import StreamError
from jaxinf.schedule.reads import Fetch
from jaxinf.store import StoreDirectory
from jaxinf.streaming.plan import memory
from jaxinf.streaming.plan.memory import Division
from jaxinf.streaming.plan.resident import ResidentChooser, updated_in_place
from jaxinf.streaming.program.units import StoreUnits

pytestmark = pytest.mark.optimized("long")

MEMORY_BYTES = 256 << 20
TIER_BYTES = 64 << 10
CHUNKS = {"chunk_elements": 4096, "memory_bytes": 16 << 20}
ADAM = optax.adam(1e-2)
CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), ADAM)
NUM_STEPS = 4


@functools.cache
def small():
    """A table that is read at both ends, a stack, and a leaf that nothing reads."""

    def loss(params, batch):
        x = params["table"][batch["tokens"]]
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["layers"])
        return batch["scale"] * jnp.mean((x @ params["table"].T) ** 2)

    params = {"table": normal(0, 64, 32), "layers": normal(1, 3, 32, 32) / 5}
    params["unused"] = normal(2, 8)
    batch = {"tokens": np.arange(8, dtype=np.int32), "scale": np.float32(1)}
    return Program(loss, params, batch)


def start(program, tx, store, **options):
    step = jaxinf.stream(
        program.loss,
        tx,
        store,
        memory_bytes=MEMORY_BYTES,
        has_aux=program.has_aux,
        **options,
    )
    step.load(program.params, batch=program.batch)
    return step


@pytest.fixture
def started(open_store):
    """Opens a store, and makes or resumes its step."""

    def make(program, name, tx=ADAM, store=None, durability="step", **options):
        store = store or open_store(name, durability=durability, **CHUNKS)
        return start(program, tx, store, **options)

    return make


class Plain(NamedTuple):
    """What steps come to if all params are read."""

    losses: list
    states: dict
    read_bytes: int


@pytest.fixture(scope="module")
def plainly():
    """Runs a program plainly, once for each optimizer and its options."""
    runs = {}

    def train(program, tx, durability, options):
        with (
            memory_directory() as path,
            small_stores.open_store(
                path / "s", durability=durability, **CHUNKS
            ) as store,
        ):
            step = start(program, tx, store, **options)
            losses, num_bytes = run(step, program), read_bytes(step)
            return Plain(losses, states(store), num_bytes)

    def make(program, tx=ADAM, durability="step", **options):
        key = (id(program), id(tx), durability, *options.values())
        if key not in runs:
            runs[key] = program, tx, train(program, tx, durability, options)
        return runs[key][-1]

    return make


def run(step, program, num_steps=NUM_STEPS):
    return [float(step(program.batch)[0]) for _ in range(num_steps)]


def assert_same_states(store, expected):
    store.wait()
    found = states(store)
    assert found.keys() == expected.keys()
    for key, array in expected.items():
        np.testing.assert_array_equal(found[key], array, err_msg=str(key))


def read_bytes(step):
    """Bytes that the last step read; it moved what its plan says."""
    step.store.wait()
    traffic, planned = step.store.metrics.traffic, step.traffic
    assert traffic.drive_read_bytes == planned.drive_read_bytes
    assert traffic.drive_write_bytes == planned.drive_write_bytes
    return traffic.drive_read_bytes


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "tx", "durability"),
    [
        ("small", ADAM, "step"),
        ("small", CLIPPED, 3),
        pytest.param("half_precision_loss", ADAM, "step", marks=pytest.mark.long),
        pytest.param("scan_twice_cast", ADAM, "checkpoint", marks=pytest.mark.long),
        pytest.param("l2_penalty", CLIPPED, "step", marks=pytest.mark.long),
    ],
)
def test_steps_have_the_bits_of_params_that_are_read(
    name, tx, durability, started, plainly
):
    program = small() if name == "small" else ZOO[name]()
    plain = plainly(program, tx, durability=durability)
    kept = started(program, "kept", tx, durability=durability, resident="params")
    assert run(kept, program) == plain.losses
    assert read_bytes(kept) < plain.read_bytes
    assert kept.metrics.fetched_drive_bytes == 0
    assert_same_states(kept.store, plain.states)


@pytest.mark.long
@pytest.mark.parametrize(
    ("tx", "options"),
    [
        pytest.param(optax.lamb(1e-2), {}, marks=pytest.mark.long),
        (optax.apply_if_finite(ADAM, 2), {}),
        (ADAM, {"compress": jaxinf.top_k(0.1)}),
    ],
    ids=["lamb", "if finite", "compress"],
)
def test_steps_of_several_passes_and_of_parts_of_gradients(
    tx, options, started, plainly
):
    program = small()
    plain = plainly(program, tx, **options)
    kept = started(program, "kept", tx, resident="params", **options)
    assert run(kept, program) == plain.losses
    read_bytes(kept)
    assert_same_states(kept.store, plain.states)


def test_a_step_of_adam_moves_20_bytes_a_param(started):
    def loss(params, batch):
        return jnp.mean(jnp.tanh(batch @ params["in"]) @ params["out"])

    params = {"in": normal(1, 64, 1024), "out": normal(2, 1024, 64)}
    program = replace(ZOO["l2_penalty"](), loss=loss, params=params)
    program = replace(program, batch=normal(3, 8, 64))
    step = started(program, "store", resident="params")
    run(step, program, 2)
    num_params = sum(leaf.size for leaf in params.values())
    assert read_bytes(step) == 8 * num_params
    assert step.traffic.drive_write_bytes == 12 * num_params


def test_16_bit_params_stay_as_the_store_has_them(started, open_store):
    program = small()
    half = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), program.params)
    program = replace(program, params=half)
    stores = [open_store(f"{n}", **CHUNKS) for n in range(2)]
    plain = started(program, "", store=stores[0])
    kept = started(program, "", store=stores[1], resident="params")
    assert run(kept, program) == run(plain, program)
    assert read_bytes(kept) < read_bytes(plain)
    assert_same_states(stores[1], states(stores[0]))


@pytest.mark.long
def test_micro_steps_leave_what_stays_alone(started, plainly):
    program = small()
    tx = optax.MultiSteps(ADAM, 2)
    plain = plainly(program, tx)
    kept = started(program, "kept", tx, resident="params")
    assert run(kept, program) == plain.losses
    assert_same_states(kept.store, plain.states)


def test_on_a_device_with_memory_of_its_own(started, plainly, monkeypatch):
    program = small()
    plain = plainly(program)
    expected = plain.losses
    monkeypatch.setattr(memory, "device_is_host", lambda device: False)
    options = {"resident": "params", "device_memory_bytes": 64 << 20}
    kept = started(program, "kept", **options)
    assert run(kept, program) == expected
    read_bytes(kept)
    assert_same_states(kept.store, plain.states)


# --- steps that are given up -----------------------------------------------------


@pytest.mark.parametrize(
    "tx", [ADAM, pytest.param(CLIPPED, marks=pytest.mark.long)], ids=["adam", "clipped"]
)
def test_after_a_refused_step_params_are_those_of_the_store(tx, started, plainly):
    program = small()
    plain = plainly(program, tx)
    kept = started(program, "kept", tx, resident="params", nonfinite="skip")
    found = run(kept, program, 2)
    kept({**program.batch, "scale": np.float32(np.nan)})
    assert kept.num_skipped == 1
    found += run(kept, program, 2)
    assert found == plain.losses
    assert_same_states(kept.store, plain.states)


@pytest.fixture
def pythons_handler():
    """Sets Python's handler of SIGINT, which a process in the background lacks."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("pythons_handler")
@pytest.mark.parametrize(
    ("tx", "is_error"), [(CLIPPED, False), (ADAM, True)], ids=["ctrl-c", "error"]
)
def test_after_a_step_that_ended_early(tx, is_error, started, plainly, monkeypatch):
    program = small()
    plain = plainly(program, tx)
    kept = started(program, "kept", tx, resident="params")
    found = run(kept, program, 2)
    update, calls = StepEngine.update, []

    def ending(self, *asked):
        finite = update(self, *asked)
        calls.append(1)
        if is_error:
            raise RuntimeError("given up")
        os.kill(os.getpid(), signal.SIGINT)
        return finite

    with monkeypatch.context() as patch:
        patch.setattr(StepEngine, "update", ending)
        with pytest.raises(RuntimeError if is_error else KeyboardInterrupt):
            run(kept, program, 1)
    assert calls
    left = NUM_STEPS - kept.store.step
    found += run(kept, program, left)
    expected = plain.losses
    assert found == [*expected[:2], *expected[NUM_STEPS - left :]]
    assert_same_states(kept.store, plain.states)


def test_after_a_commit_that_failed(started, plainly, monkeypatch):
    program = small()
    plain = plainly(program)
    kept = started(program, "kept", resident="params")
    found = run(kept, program, 2)
    kept.store.wait()

    def fail(self, slot):
        raise OSError("the drive is gone")

    with monkeypatch.context() as patch:
        patch.setattr(StoreDirectory, "flip", fail)
        run(kept, program, 1)
        with pytest.raises(OSError, match="the drive is gone"):
            run(kept, program, 1)
    kept.close()
    again = started(program, "kept", resident="params")
    assert again.store.step == 2
    found += run(again, program, 2)
    assert found == plain.losses
    assert_same_states(again.store, plain.states)


def test_steps_made_elsewhere_are_noticed(started, plainly):
    """Two steps of one store take turns."""
    program = small()
    plain = plainly(program)
    one = started(program, "kept", resident="params")
    other = started(program, "", store=one.store, resident="params", policy="keep")
    found = run(one, program, 1) + run(other, program, 1) + run(one, program, 2)
    assert found == plain.losses
    assert_same_states(one.store, plain.states)


# --- the choice ------------------------------------------------------------------


def test_an_amount_saves_a_part_of_the_traffic(started):
    program = small()
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(program.params))
    losses, found = [], []
    for resident in (None, num_bytes // 2, "params"):
        step = started(program, f"store{resident}", resident=resident)
        losses.append(run(step, program))
        found.append(read_bytes(step))
        assert step.plan.resident_bytes <= (
            num_bytes // 2 if len(found) < 3 else 1 << 30
        )
        assert ("of params stay" in str(step.plan)) == (resident is not None)
    assert losses[0] == losses[1] == losses[2]
    assert found[0] > found[1] > found[2]


def test_units_that_are_read_most_stay_first():
    program = ZOO["l2_penalty"](depth=3)
    ready = prepared(program)
    plan = ready.plan(MEMORY_BYTES)
    store_units = StoreUnits(ready.traced.params, lambda *_: True)
    units = sorted(map(store_units.unit, ready.gradient_pieces), key=lambda u: u.leaf)
    large = [unit for unit in units if unit.num_bytes == 4096]
    fetches = [Fetch(large[0], 0, 0), Fetch(large[1], 1, 1), Fetch(large[2], 2, 2)]
    fetches += [Fetch(large[1], 4, 4), Fetch(large[2], 9, 9)]

    def chosen(resident):
        chooser = ResidentChooser(
            resident,
            store_units,
            units,
            Division(0, 0, MEMORY_BYTES, 0, 0, "memory_bytes"),
            lambda plan, division: fetches,
            lambda unit: False,
            lambda plan: plan.peak_bytes,
        )
        stays = chooser.choose(plan)
        found = stays.applied(plan)
        assert found.resident_bytes == sum(unit.page_bytes for unit in stays.units)
        assert found.most_bytes() <= plan.peak_bytes
        return stays.units

    assert chosen(4095) == set()
    assert chosen(4096) == {large[2]}
    assert chosen(3 * 4096 - 1) == {large[1], large[2]}
    assert chosen(3 * 4096) == set(large)
    assert chosen("params") == set(units)


def test_a_unit_that_is_read_after_its_gradient_is_not_overwritten():
    ready = prepared(ZOO["tied_and_unused"]())
    calls = ready.plan(MEMORY_BYTES).calls
    store_units = StoreUnits(ready.traced.params, lambda *_: True)
    in_place = updated_in_place(calls, store_units)
    assert in_place
    reader = next(call for call in calls if call.reads)
    again = {store_units.unit(piece) for piece in reader.reads}
    assert updated_in_place([*calls, reader], store_units) == in_place - again


@pytest.mark.parametrize("resident", ["some", -1, "2 apples", True])
def test_neither_params_nor_bytes(resident, open_store):
    with pytest.raises(ValueError, match='expected "params" or bytes'):
        jaxinf.stream(
            lambda p, b: 0.0,
            ADAM,
            open_store(),
            memory_bytes=1 << 30,
            resident=resident,
        )


@pytest.mark.long
def test_more_than_there_is_room_for_is_refused(open_store):
    step = jaxinf.stream(
        lambda p, b: sum(jnp.sum(jnp.sin(w) * b) for w in p),
        ADAM,
        open_store(**CHUNKS),
        memory_bytes=32 << 20,
        resident="params",
    )
    step.load([np.ones(1 << 19, np.float32) for _ in range(12)])
    with pytest.raises(StreamError, match="'params': expected room for 25165824"):
        step(np.float32(1))


def test_what_checkpoints_alone_write_is_none_of_a_steps(open_store):
    program = small()
    options = {**CHUNKS, "durability": "checkpoint", "tiers": {"host": TIER_BYTES}}
    store = open_store("store", **options)
    with jaxinf.stream(
        program.loss, ADAM, store, memory_bytes=MEMORY_BYTES, resident="params"
    ) as step:
        step.load(program.params, batch=program.batch)
        meters = store._training.opened.meters
        for name in ("first", "second"):
            before = meters.snapshot()
            for _ in range(3):
                step(program.batch)
            step.store._training.steps.join()
            moved = meters.snapshot() - before
            assert moved.drive_write_bytes == 3 * step.traffic.drive_write_bytes
            store.checkpoint(name)
            assert meters.snapshot().drive_write_bytes > (
                before.drive_write_bytes + moved.drive_write_bytes
            )


@pytest.mark.parametrize("resident", family([None, "params"], short=["params"]))
@pytest.mark.parametrize("durability", family(["step", 2], short=["step"]))
def test_state_that_stays_on_the_host_moves_fewer_bytes(
    open_store, durability, resident
):
    program, found = small(), []
    for tier in (0, TIER_BYTES):
        options = {**CHUNKS, "durability": durability, "tiers": {"host": tier}}
        store = open_store(f"tier{tier}", **options)
        with jaxinf.stream(
            program.loss, ADAM, store, memory_bytes=MEMORY_BYTES, resident=resident
        ) as step:
            step.load(program.params, batch=program.batch)
            losses = [float(step(program.batch)[0]) for _ in range(2)]
            losses += [float(step(program.batch)[0]) for _ in range(2)]
            store.wait()
            moved = [store.metrics_of(n).traffic.drive_write_bytes for n in (3, 4)]
            assert sum(moved) == 2 * step.traffic.drive_write_bytes
            planned = step.traffic
            params = store.params(like=program.params)
        found.append((losses, planned, jax.tree.leaves(params)))
    (losses, plain, params), (same_losses, tiered, same_params) = found
    assert losses == same_losses
    for one, other in zip(params, same_params, strict=True):
        np.testing.assert_array_equal(one, other)
    assert tiered.drive_read_bytes < plain.drive_read_bytes
    assert (tiered.drive_write_bytes < plain.drive_write_bytes) == (durability == 2)
