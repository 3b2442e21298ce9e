"""A dry run says what the step then takes, and writes nothing."""

import jax
import optax
import pytest
from streaming import CHUNKS
from zoo import ZOO

import jaxinf
from jaxinf.errors import BudgetError, StreamError

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


@pytest.mark.parametrize(
    ("policy", "memory"), [("recompute", "8MiB"), ("offload", "13MiB")]
)
def test_what_it_says_is_what_the_step_takes(made, place, policy, memory):
    with made(memory, policy=policy, micro_batches=2) as step:
        found = step.dry_run(PROGRAM.batch, params=SHAPES)
        assert not [*place.rglob("*")]
        assert found.now_bytes == 0
        assert step.plan is None
        step.load(PROGRAM.params, batch=PROGRAM.batch)
        step(PROGRAM.batch)
        assert found.traffic == step.traffic
        assert found.plan.peak_bytes == step.plan.peak_bytes
        assert str(found.plan) == str(step.plan)
        again = step.dry_run(PROGRAM.batch)
        assert again.traffic == found.traffic
        assert again.now_bytes <= again.disk_bytes == found.disk_bytes
        step(PROGRAM.batch)  # a dry run leaves the step alone
        held = [path.stat().st_size for path in place.rglob("*") if path.is_file()]
        assert 0.9 * again.now_bytes < sum(held) < 1.2 * again.now_bytes + (1 << 20)
    assert "of programs and their params" in str(found)


def test_the_least_memory_works(made):
    with made("64MiB") as step:
        least = step.dry_run(PROGRAM.batch, params=SHAPES).least
    assert least["memory_bytes"] < 64 << 20
    with made(**least) as step:
        assert step.dry_run(PROGRAM.batch, params=SHAPES).least == least
    with made(least["memory_bytes"] // 8) as step:
        with pytest.raises(BudgetError) as refused:
            step.dry_run(PROGRAM.batch, params=SHAPES)
        assert refused.value.works


def test_a_step_in_memory_has_one(tmp_path):
    step = jaxinf.stream_in_memory(
        PROGRAM.loss,
        TX,
        memory_bytes="9MiB",
        has_aux=PROGRAM.has_aux,
        policy="offload",
        scratch=tmp_path,
    )
    found = step.dry_run(PROGRAM.batch, params=SHAPES)
    step.load(PROGRAM.params, batch=PROGRAM.batch)
    step(PROGRAM.batch)
    assert found.traffic == step.traffic
    assert found.disk_bytes == found.traffic.drive_write_bytes
    step.close()


def test_without_params_it_is_refused(made):
    with made("8MiB") as step, pytest.raises(StreamError, match="init or"):
        step.dry_run(PROGRAM.batch)
