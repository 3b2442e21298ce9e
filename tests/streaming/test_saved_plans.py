"""Plans that a store keeps: used again, damaged, changed, too large, refused."""

import json
import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from golden_streams import edit, streams
from streaming import CHUNKS, run
from zoo import ZOO

import jaxinf
from jaxinf.cli import main
from jaxinf.errors import BudgetError, JaxinfError, StoreFormatError, StreamError
from jaxinf.store import seal
from jaxinf.streaming.plan.fit import cut_to_fit, prepare
from jaxinf.streaming.plan.memory import divide
from jaxinf.streaming.plan.options import StepOptions
from jaxinf.streaming.planning import within
from jaxinf.terminal import parse_bytes


@pytest.mark.long
def test_another_loss_function_is_refused_until_replanned(streamed):
    program, tx = ZOO["l2_penalty"](depth=3), optax.sgd(0.1)
    step = streamed(program, tx)
    step.load(program.params)
    run(step, program, 1)
    step.close()
    other = replace(program, loss=lambda p, b: 2 * program.loss(p, b))
    again = streamed(other, tx)
    again.load(program.params)
    with pytest.raises(StreamError, match=r"another loss function .* replan=True"):
        again(program.batch)
    assert again.store.step == 1
    again.close()
    replanned = streamed(other, tx, replan=True)
    replanned.load(program.params)
    run(replanned, program, 1)
    assert replanned.store.step == 2


@pytest.fixture
def kept(streamed):
    """A store with a step, its plan, and a function that opens it again."""
    program = ZOO["l2_penalty"](depth=3)

    def opened(**options):
        step = streamed(program, optax.sgd(0.1), **options)
        step.load(program.params)
        return step, partial(run, step, program, 1)

    step, run_one = opened()
    run_one()
    step.close()
    ((name, plan),) = streams(step.store.path).items()
    assert tuple(plan["cuts"]) == step.plan.cuts
    assert not (step.store.path / "stream").exists()
    return step.store.path, name, plan, opened


def put(path, name, plan, kept_in):
    """Keeps a plan in a store's record, or as stores of before did."""
    if kept_in == "file":
        (path / "stream").mkdir()
        (path / f"stream/{name}.json").write_bytes(seal(plan))
    edit(
        path / "current/commit.json", streams={name: plan} if kept_in != "file" else {}
    )


IN = pytest.mark.parametrize("kept_in", ["record", "file"])


@IN
def test_a_kept_plan_is_used_whatever_would_be_chosen_now(kept, kept_in):
    path, name, plan, opened = kept
    cuts = sorted({*plan["cuts"], 1, plan["cuts"][-1] - 1})
    put(path, name, plan | {"cuts": cuts}, kept_in)
    other = "0" * 32  # of another shape of batch
    edit(path / "current/commit.json", streams=streams(path) | {other: plan})
    step, run_one = opened()
    run_one()
    assert list(step.plan.cuts) == cuts != plan["cuts"]
    step.close()
    assert streams(path) == {name: plan | {"cuts": cuts}, other: plan}


@IN
@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"cuts": [0, 10**9]}, "expected cuts of a program of"),
        ({"version": 1}, "another loss function"),
        (
            {"mesh": {"data": 2}},
            r"was trained on 2 devices \(data=2\), found arrays on",
        ),
        ({"rows": {"table": 512}}, "was trained with 1 tables in blocks of rows"),
    ],
)
def test_a_plan_of_another_program_is_refused(kept, kept_in, changes, problem):
    path, name, plan, opened = kept
    put(path, name, plan | changes, kept_in)
    step, run_one = opened()
    with pytest.raises(JaxinfError, match=f"{problem}.*replan=True"):
        run_one()
    step.close()
    step, run_one = opened(replan=True)
    run_one()
    step.close()
    assert streams(path) == {name: plan}
    step, run_one = opened()  # what replan=True has kept
    run_one()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"colour": "red"}, "expected no key 'colour'"),
        ({"cuts": [0, 5, 5]}, "numbers that rise from 0"),
        ({"mesh": {"\x1b[2J": 2}}, "an axis's name"),
        ({"mesh": {str(n): 2**61 for n in range(300)}}, "length <= 64"),
    ],
)
def test_a_damaged_plan_is_refused(kept, changes, problem):
    path, name, plan, opened = kept
    put(path, name, plan | changes, "file")
    step, run_one = opened()
    with pytest.raises(StoreFormatError, match=rf"{name}.json.*{problem}.*replan=True"):
        run_one()
    step.close()
    put(path, name, plan | changes, "record")
    assert main(["verify", str(path)]) == 1
    with pytest.raises(StoreFormatError, match=rf"commit.json.*{problem}"):
        opened()


def test_state_on_a_device_of_before_is_refused_until_replanned(kept):
    path, _, _, opened = kept
    edit(path / "current/commit.json", device_tier=1 << 20)
    with pytest.raises(StreamError, match=r"1048576 bytes of state .*replan=True"):
        opened()[1]()
    step, run_one = opened(replan=True)
    run_one()
    assert step.store.step == 2
    step.close()
    assert "device_tier" not in (path / "current/commit.json").read_text()


def test_a_plan_is_kept_with_the_first_commit_that_depends_on_it(streamed, open_store):
    program = ZOO["l2_penalty"](depth=2)
    store = open_store(**CHUNKS, durability=2)
    step = streamed(program, optax.sgd(0.1), store=store)
    step.load(program.params)
    step.compile(program.batch)
    run(step, program, 1)
    assert not streams(store.path)
    run(step, program, 1)
    store.wait()
    assert [tuple(p["cuts"]) for p in streams(store.path).values()] == [step.plan.cuts]
    store.checkpoint("best")
    step.close()
    copy = store.path.with_name("copy")
    assert main(["store", "copy", str(store.path), str(copy)]) == 0
    place = store.path / "checkpoints/best/commit.json"
    assert (
        json.loads(place.read_text())["streams"] == streams(copy) == streams(store.path)
    )


def test_another_loss_function_is_refused_within_a_run(streamed):
    program, tx = ZOO["l2_penalty"](depth=2), optax.sgd(0.1)
    step = streamed(program, tx)
    step.load(program.params)
    other = replace(program, loss=lambda p, b: 2 * program.loss(p, b))
    beside = streamed(other, tx, store=step.store)
    beside.load(program.params)
    beside.compile(program.batch)
    run(step, program, 1)
    with pytest.raises(StreamError, match=r"another loss function .* replan=True"):
        beside(program.batch)
    assert step.store.step == 1
    run(step, program, 1)


def test_a_plan_that_does_not_fit_is_refused(streamed, open_store):
    program = ZOO["l2_penalty"](depth=2)
    step = streamed(program, optax.sgd(0.1))
    step.load(program.params)
    run(step, program, 1)
    # Half of what the plan takes, beside what the store's buffers do.
    too_little = step.store._engine.opened.limit_memory(0) + step.plan.peak_bytes // 2
    step.close()
    less = jaxinf.stream(
        program.loss, optax.sgd(0.1), open_store(**CHUNKS), memory_bytes=too_little
    )
    less.load(program.params)
    message = r'memory_bytes="\d+MiB" works, or pass replan=True'
    with pytest.raises(StreamError, match=message):
        less(program.batch)
    assert less.store.step == 1


@pytest.mark.long
def test_a_refused_budget_names_one_that_works(open_store):
    program = ZOO["l2_penalty"](depth=2)
    store = open_store(**CHUNKS)

    def start(memory_bytes):
        step = jaxinf.stream(
            program.loss, optax.sgd(0.1), store, memory_bytes=memory_bytes
        )
        if store.exists:
            step.load(program.params, batch=program.batch)
        else:
            step.init(lambda: program.params, batch=program.batch)
        return step

    for message in ("memory_bytes: it leaves", "trained with, .* or pass replan=True"):
        with pytest.raises(BudgetError, match=message) as refused:
            start("32KiB")
        assert store.exists is ("replan" in message)
        assert store.path.exists() is store.exists
        (works,) = re.findall(r'memory_bytes="(\d+MiB)" works', str(refused.value))
        assert parse_bytes(works) < 64 << 20
        step = start(works)
        assert "segments" in str(step.plan)
        assert step.metrics is None
        run(step, program, 1)


@pytest.mark.parametrize(
    ("few", "policy"), [(1 << 20, "recompute"), (64 << 20, "offload")]
)
def test_the_budget_that_is_named_works(few, policy):
    def loss(params, batch):
        for weight in params:
            batch = jnp.tanh(batch @ weight)
        return jnp.sum(batch)

    weight = jax.ShapeDtypeStruct((2048, 2048), np.float32)
    ready = prepare(loss, [weight] * 4, jax.ShapeDtypeStruct((64, 2048), np.float32))
    budgets = []

    def plan(limits):
        budgets.append(limits["memory_bytes"])
        division = divide(limits["memory_bytes"], 8 << 20, 16 << 20)
        return cut_to_fit(ready, division.programs, policy)

    with pytest.raises(BudgetError) as refused:
        within(StepOptions(few), plan)
    assert len(budgets) <= 4
    works = parse_bytes(refused.value.works["memory_bytes"])
    assert plan({"memory_bytes": works})
    with pytest.raises(BudgetError):  # nor is it far from the smallest
        plan({"memory_bytes": works * 2 // 3})
