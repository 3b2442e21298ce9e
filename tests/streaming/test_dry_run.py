"""A dry run says what the step then takes, and writes nothing."""

import jax
import jax.numpy as jnp
import optax
import pytest
from families import family
from streaming import CHUNKS
from zoo import ZOO

import jaxinf
from jaxinf.errors import BudgetError

pytestmark = pytest.mark.optimized("long")

PROGRAM = ZOO["stack_by_index"]()
TX = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))
SHAPES = jax.eval_shape(lambda: PROGRAM.params)


@pytest.fixture
def made(place, open_store):
    """Makes a step on a store that is not there."""

    def make(memory_bytes, csd=None, **options):
        return jaxinf.stream(
            PROGRAM.loss,
            TX,
            open_store(place / "store", csd=csd, **CHUNKS),
            memory_bytes=memory_bytes,
            has_aux=PROGRAM.has_aux,
            **options,
        )

    return make


def calls_of(plan):
    return plan.cuts, [call.program.key for call in plan.calls], plan.evictions


@pytest.mark.parametrize(
    ("policy", "memory"),
    family(
        [("recompute", "13MiB"), ("offload", "13MiB")], short=[("offload", "13MiB")]
    ),
)
def test_what_it_counts_is_what_the_step_moves(made, place, policy, memory):
    with made(memory, policy=policy, micro_batches=2) as step:
        found = step.dry_run(PROGRAM.batch, params=SHAPES)
        assert not [*place.rglob("*")]
        assert found.device_bytes == 0
        assert found.host_bytes < 13 << 20
        assert step.plan is None
        step.load(PROGRAM.params, batch=PROGRAM.batch)
        again = step.dry_run(PROGRAM.batch)
        for _ in range(2):
            step(PROGRAM.batch)
        step.store.wait()
        moved = step.store.metrics.traffic
        assert again.drive_read_bytes == moved.drive_read_bytes
        assert again.drive_write_bytes == moved.drive_write_bytes
        assert calls_of(again.plan) == calls_of(step.plan)
        assert again.disk_bytes == found.disk_bytes
        step(PROGRAM.batch)  # a dry run leaves the step alone
        held = [path.stat().st_size for path in place.rglob("*") if path.is_file()]
        assert sum(held) < 1.2 * again.disk_bytes + (1 << 20)


def test_a_budget_that_is_too_small_is_answered_with_one_that_works(made):
    parts = {"micro_batches": 2}
    with made("64KiB", **parts) as step, pytest.raises(BudgetError) as refused:
        step.dry_run(PROGRAM.batch, params=SHAPES)
    with made(**parts, **refused.value.works) as step:
        assert step.dry_run(PROGRAM.batch, params=SHAPES).host_bytes


def test_values_that_leave_are_counted(tmp_path):
    def loss(params, batch):
        for name in sorted(params):
            batch = jnp.tanh(batch @ params[name])
        return (batch**2).mean()

    shapes = {str(n): jax.ShapeDtypeStruct((64, 64), "float32") for n in range(12)}
    batch = jax.ShapeDtypeStruct((16384, 64), "float32")
    options = {"memory_bytes": "40MiB", "policy": "offload", "scratch": tmp_path}
    with jaxinf.stream_in_memory(loss, optax.sgd(1.0), **options) as step:
        found = step.dry_run(batch, shapes)
    assert 16 << 20 < found.host_bytes <= 40 << 20
    assert found.disk_bytes == found.drive_write_bytes == found.drive_read_bytes
    assert found.disk_bytes in range(4 << 20, 96 << 20, 4 << 20)
