"""Values that wait on a drive: bits, memory as planned, traffic, failures."""

import errno
import os

import jax
import numpy as np
import optax
import pytest
from families import family
from streaming import assert_same_bits, in_memory, prepared, smallest_bytes, streamed
from zoo import ONLY_PLANNED, ZOO

import jaxinf
from jaxinf.errors import StoreIOError, StoreSpaceError
from jaxinf.streaming.move.scratch import Scratch
from jaxinf.streaming.move.values import Values
from jaxinf.streaming.plan import compiled, leaving
from jaxinf.streaming.plan.compiled import measured
from jaxinf.streaming.plan.fit import cut_to_fit, plan_of
from jaxinf.streaming.plan.leaving import evicted, fitted, least_bytes
from jaxinf.streaming.run import Runner

pytestmark = pytest.mark.optimized("long")

CHUNKS = {"chunk_elements": 4096, "memory_bytes": 16 << 20}
TX = optax.adam(1e-2)


def failing(patched, call, code, numbers):
    """Lets calls of these numbers fail, on files that have no name."""
    real, hits = getattr(os, call), []

    def fail(fd, *args):
        if "(deleted)" in os.readlink(f"/proc/self/fd/{fd}"):
            hits.append(fd)
            if len(hits) in numbers:
                raise OSError(code, os.strerror(code))
        return real(fd, *args)

    patched.setattr(os, call, fail)


@pytest.fixture(autouse=True)
def small_values_leave(monkeypatch):
    monkeypatch.setattr(leaving, "SMALL_BYTES", 1)


def plans(ready, policies=("keep", "offload")):
    cuts = cut_to_fit(ready, smallest_bytes(ready) * 3 // 2).cuts
    return [plan_of(ready, cuts, policy) for policy in policies]


QUICK = ("custom_rules", "scan_remat_reverse")


@pytest.mark.parametrize("name", family(ZOO, short=QUICK, beyond=ONLY_PLANNED))
def test_bits_are_those_of_keep(name, tmp_path):
    program = ZOO[name]()
    keep, offload = plans(prepared(program))
    executables = {}
    expected = streamed(program, keep, executables)
    offload = measured(offload, executables)
    least, most = least_bytes(offload), offload.most_bytes()
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


class Watched(Values):
    """Notes the most bytes of values in memory."""

    peak_bytes = 0

    def put(self, slots, outputs):
        super().put(slots, outputs)
        held_bytes = sum(value.nbytes for value in self._held.values())
        self.peak_bytes = max(self.peak_bytes, held_bytes)


def test_memory_is_as_planned(tmp_path):
    program = ZOO["l2_penalty"](depth=8)
    offload = measured(plans(prepared(program))[1], executables := {})
    plan = evicted(offload, least_bytes(offload))
    values = Watched(plan, Scratch([tmp_path]))
    streamed(program, plan, executables, values=values)
    in_memory = Watched()
    streamed(program, offload, executables, values=in_memory)
    assert values.peak_bytes < 0.7 * in_memory.peak_bytes
    values.close()


def test_the_value_needed_last_leaves_first():
    plan = plans(prepared(ZOO["gpt2_nano"]()))[1]
    most = plan.most_bytes()
    assert not fitted(plan, most).evictions
    one = fitted(plan, most - 1).evictions
    needed = {slot: eviction.needed for slot, eviction in one.items()}
    others = [
        life.takers[-1]
        for slot, life in plan.lives.items()
        if slot not in needed and life.takers and life.made == 0
    ]
    assert needed
    assert max(needed.values()) >= max(others)
    everything = fitted(plan, 0).evictions
    for eviction in (*one.values(), *everything.values()):
        assert eviction.written + 2 <= eviction.gone < eviction.back <= eviction.needed


@pytest.mark.parametrize("share", family([0.0, 0.3, 0.6, 1.0], short=[0.3, 1.0]))
def test_values_come_back_in_the_order_of_use(share):
    plan = plans(prepared(ZOO["l2_penalty"](depth=8)))[1]
    least, most = least_bytes(plan), plan.most_bytes()
    found = fitted(plan, int(least + share * (most - least)))
    assert found.most_bytes() <= int(least + share * (most - least))
    ordered = sorted(found.evictions.values(), key=lambda one: one.needed)
    assert [one.back for one in ordered] == sorted(one.back for one in ordered)


# --- with a store ------------------------------------------------------------------


@pytest.fixture
def everything_leaves(monkeypatch):
    """Lets every value leave that can, although the budget has room."""
    monkeypatch.setattr(compiled, "evicted", lambda plan, _: evicted(plan, 0))


def opened(open_store, name, policy, program, tx=TX, **options):
    step = jaxinf.stream(
        program.loss,
        tx,
        open_store(name, **CHUNKS, **options),
        memory_bytes=256 << 20,
        policy=policy,
    )
    step.load(program.params, batch=program.batch)
    return step


def losses(step, program, num_steps):
    return [float(step(program.batch)[0]) for _ in range(num_steps)]


def assert_same_params(step, other, program):
    found, expected = (s.store.params(like=program.params) for s in (step, other))
    for one, two in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.long
def test_training_is_that_of_keep(open_store, everything_leaves, place):
    program = ZOO["l2_penalty"]()
    csds = [place / f"csd{i}" for i in range(2)]
    for csd in csds:
        csd.mkdir()
    offload = opened(open_store, "offload", "offload", program, csds=csds)
    keep = opened(open_store, "keep", "keep", program)
    assert losses(offload, program, 3) == losses(keep, program, 3)
    assert_same_params(offload, keep, program)
    assert offload.metrics.offloaded_drive_bytes > 0
    assert not keep.metrics.offloaded_drive_bytes
    assert not (offload.store.path / "stream").exists()


def test_the_meters_show_the_planned_traffic(open_store, everything_leaves):
    program = ZOO["scan_remat_reverse"]()
    step = opened(open_store, "store", "offload", program)
    losses(step, program, 3)
    assert step.metrics.offloaded_drive_bytes > 0
    assert step.metrics.fetched_drive_bytes > 0
    step.store.wait()
    found, planned = step.store.metrics.traffic, step.traffic
    assert found.drive_read_bytes == planned.drive_read_bytes
    assert found.drive_write_bytes == planned.drive_write_bytes


@pytest.mark.parametrize(
    ("call", "code", "kind"),
    family(
        [
            ("pwritev", errno.ENOSPC, StoreSpaceError),
            ("pwritev", errno.EIO, StoreIOError),
            ("preadv", errno.EIO, StoreIOError),
        ],
        short=[("pwritev", errno.EIO, StoreIOError)],
    ),
)
def test_a_drive_that_fails_in_mid_step(
    open_store, everything_leaves, monkeypatch, call, code, kind
):
    program = ZOO["l2_penalty"]()
    step = opened(open_store, "store", "offload", program)
    kept = opened(open_store, "keep", "keep", program)
    losses(step, program, 1)
    step.store.wait()
    with monkeypatch.context() as patched:
        failing(patched, call, code, [3 if call == "pwritev" else 1])
        with pytest.raises(kind, match=r"store \(a file of activations\)"):
            step(program.batch)
    assert step.store.step == 1
    losses(step, program, 2)
    losses(kept, program, 3)
    assert step.store.step == 3
    assert_same_params(step, kept, program)


def test_runner_drops_values_of_a_step_that_failed(tmp_path):
    program = ZOO["l2_penalty"]()
    offload = measured(plans(prepared(program))[1], executables := {})
    plan = evicted(offload, 0)
    values = Values(plan, Scratch([tmp_path]))
    runner = Runner(plan, executables, values=values)
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(program.params)]

    def stop(piece, gradient):
        raise KeyboardInterrupt

    params = in_memory(leaves)
    with pytest.raises(KeyboardInterrupt):
        runner(program.batch, params, stop)
    loss, _ = runner(program.batch, params, lambda piece, gradient: None)
    assert float(loss) == pytest.approx(
        float(program.loss(program.params, program.batch))
    )
    values.close()
