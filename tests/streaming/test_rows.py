"""Tables that are read and updated in blocks of rows."""

import json
import re
import shutil
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import rows_run
from rows_run import (
    AVERAGE,
    LITTLE,
    NUM_FEATURES,
    NUM_ROWS,
    OPTIONS,
    TOKENS,
    TX,
    WIDTH,
    loss_fn,
    params_of,
)
from streaming import assert_same_bits, states

import jaxinf
from jaxinf.engine.steps import StepEngine
from jaxinf.errors import BudgetError, StreamError
from jaxinf.streaming.plan.plan import prepare_function
from jaxinf.streaming.program.tables import find_tables

pytestmark = pytest.mark.optimized

MUCH = "96MiB"
KILLS = [("init", 2), ("update", 3), ("update", 9)]


@pytest.fixture
def trained(tmp_path):
    """Trains steps on a store; returns losses, the plan and all state."""

    def train(name, memory, num_steps, params, loss_fn=loss_fn, tx=TX, **options):
        store = jaxinf.open_store(tmp_path / name, **OPTIONS)
        step = jaxinf.stream(loss_fn, tx, store, memory_bytes=memory, **options)
        with step:
            step.load(params, batch=TOKENS)
            losses = [float(step(TOKENS)[0]) for _ in range(num_steps)]
            return losses, step.plan, states(store)

    return train


def expected(params, num_steps):
    """Losses of steps that have all in memory."""

    @jax.jit
    def step(params, state):
        loss, gradients = jax.value_and_grad(loss_fn)(params, TOKENS)
        updates, state = TX.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    state, losses = TX.init(params), []
    for _ in range(num_steps):
        params, state, loss = step(params, state)
        losses.append(float(loss))
    return losses


@pytest.mark.parametrize(
    "tied", [True, pytest.param(False, marks=pytest.mark.long)], ids=["tied", "own"]
)
def test_a_table_that_does_not_fit_is_in_rows(tied, trained):
    params = params_of(tied=tied)
    losses, plan, _ = trained("store", LITTLE, 1, params)
    names = ["table"] if tied else ["head", "table"]
    assert [said.split(" in ")[0] for said in plan.tables] == names
    assert plan.tables[-1] == "table in 8 blocks of 2048 rows"
    assert plan.tables[-1] in str(plan)
    # The plan is kept: steps go on with it in more memory, too.
    more, plan, _ = trained("store", MUCH, 2, params)
    assert plan.tables
    np.testing.assert_allclose(losses + more, expected(params, 3), rtol=1e-5)


HALF = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params_of())


@pytest.mark.long
@pytest.mark.parametrize(
    ("params", "options"),
    [
        (params_of(), {}),
        (params_of(), {"policy": "keep"}),
        (params_of(), {"policy": "offload"}),
        (params_of(), {"resident": "params"}),
        (HALF, {}),
        (HALF, {"policy": "offload", "resident": "params"}),
    ],
    ids=[
        *("memory", "keep", "offload", "resident"),
        *("half", "half-offload"),
    ],
)
def test_steps_have_the_same_bits_however_they_run(params, options, trained):
    losses, plan, held = trained("plain", LITTLE, 3, params)
    assert plan.tables == ("table in 8 blocks of 2048 rows",)
    first, _, _ = trained("store", LITTLE, 1, params)
    more, plan, other = trained("store", MUCH, 2, params, **options)
    assert plan.tables
    assert first + more == losses
    assert_same_bits(other, held)


@pytest.mark.long
def test_a_device_that_updates_blocks_has_the_bits_of_the_host(trained, tmp_path):
    """With equal cuts: the device's room is taken off the memory that they are for."""
    params = params_of()
    losses, plan, held = trained("device", "40MiB", 2, params, device_updates=2)
    assert plan.tables
    trained("plain", MUCH, 0, params)
    plans = (tmp_path / name / "stream" for name in ("device", "plain"))
    shutil.copytree(*plans, dirs_exist_ok=True)
    found, plan, other = trained("plain", MUCH, 2, params)
    assert plan.tables
    assert found == losses
    assert_same_bits(other, held)


@pytest.mark.long
def test_rows_of_micro_batches(trained):
    """Blocks' gradients are summed over the parts."""
    params = params_of()
    losses, plan, _ = trained(
        "store", LITTLE, 3, params, loss_fn=of_rows, micro_batches=2
    )
    assert plan.tables
    whole, plan, _ = trained("whole", MUCH, 3, params, loss_fn=of_rows)
    assert not plan.tables
    np.testing.assert_allclose(losses, whole, rtol=1e-5, atol=1e-6)


def of_rows(params, tokens):
    """The mean over the batch's rows of a loss."""
    return jnp.mean(jax.vmap(lambda one: loss_fn(params, one[None]))(tokens))


@pytest.mark.long
def test_a_step_that_fails_in_a_table_is_made_again(trained, monkeypatch):
    params = params_of()
    losses, _, held = trained("plain", LITTLE, 2, params)
    trained("store", LITTLE, 1, params)
    update, calls = StepEngine.update, []

    def failing(self, step, *requests):
        calls.append(requests)
        if len(calls) == 3:
            raise OSError("the drive is gone")
        return update(self, step, *requests)

    with monkeypatch.context() as patch:
        patch.setattr(StepEngine, "update", failing)
        with pytest.raises(OSError, match="the drive is gone"):
            trained("store", LITTLE, 1, params)
    again, _, other = trained("store", LITTLE, 1, params)
    assert again == losses[1:]
    assert_same_bits(other, held)


@pytest.mark.long
@pytest.mark.parametrize(("where", "number"), KILLS)
def test_a_run_that_is_killed_in_a_table_goes_on_with_the_same_bits(
    where, number, trained, tmp_path
):
    params, options = params_of(), {"average": AVERAGE}
    losses, _, held = trained("plain", LITTLE, 2, params, **options)
    command = [sys.executable, rows_run.__file__, tmp_path / "store", where, number]
    killed = subprocess.run([*map(str, command)], capture_output=True, check=False)
    assert killed.returncode == -9, killed.stderr.decode()
    num_left = 2 if where == "init" else 1
    again, plan, other = trained("store", LITTLE, num_left, params, **options)
    assert plan.tables
    assert any("average" in name for name in map(str, held))
    assert again == losses[-num_left:]
    assert_same_bits(other, held)


@pytest.mark.long
def test_a_kept_plan_without_rows_stays(trained, tmp_path):
    params = params_of()
    trained("store", MUCH, 1, params)
    (kept,) = (tmp_path / "store" / "stream").iterdir()
    assert "rows" not in json.loads(kept.read_text())
    with pytest.raises(BudgetError, match=r"store was trained with.*replan=True"):
        trained("store", LITTLE, 1, params)
    _, plan, _ = trained("store", LITTLE, 1, params, replan=True)
    assert plan.tables
    assert json.loads(kept.read_text())["rows"] == {"table": 2048}

    def other(params, tokens):
        return 2 * loss_fn(params, tokens)

    with pytest.raises(StreamError, match="another loss function"):
        trained("store", LITTLE, 1, params, loss_fn=other)


@pytest.mark.long
def test_what_needs_a_table_whole_is_said(trained):
    def penalised(params, tokens, name="up"):
        return loss_fn(params, tokens) + 1e-3 * jnp.sum(params[name] ** 2)

    params = params_of()
    _, plan, _ = trained("penalised", LITTLE, 0, params, loss_fn=penalised)
    assert plan.tables == (
        "table in 8 blocks of 2048 rows",
        "up whole: mul reads it",
    )
    other = partial(penalised, name="table")
    with pytest.raises(BudgetError, match="table"):
        trained("other", LITTLE, 0, params, loss_fn=other)
    with pytest.raises(BudgetError, match="numbers of its gradients"):
        trained("ratios", LITTLE, 0, params, tx=optax.lamb(1e-2))


@pytest.mark.parametrize("mode", ["clip", "fill", "promise_in_bounds"])
@pytest.mark.parametrize(
    "dtype",
    [
        "int32",
        *(pytest.param(one, marks=pytest.mark.long) for one in ("uint32", "int16")),
    ],
)
def test_rows_have_the_bits_of_a_whole_look_up(mode, dtype, tmp_path):
    table = np.array(params_of()["table"])
    table[5000], table[0, ::2] = -0.0, np.nan
    rows = np.array(
        [0, 5000, -1, NUM_ROWS - 1, NUM_ROWS, 31000, 2**31, 4095, 4096, -31000]
    )
    rows = rows.astype(np.int64).astype(dtype).reshape(2, 5)

    def look_up(params, rows):
        held = params["table"].astype(jnp.bfloat16).T
        found = params["table"].at[rows].get(mode=mode)
        return found, held.at[:, rows].get(mode=mode)

    store = jaxinf.open_store(tmp_path / "store", **OPTIONS)
    params = {"table": table, "up": np.ones((NUM_FEATURES, WIDTH), np.float32)}
    step = jaxinf.stream(loss_fn, optax.sgd(0.1), store, memory_bytes=MUCH)
    with step:
        step.load(params)
        fn = jaxinf.stream_function(look_up, store, memory_bytes="3MiB")
        found = fn(rows)
        assert re.match("table in [0-9]+ blocks", fn.plan.tables[0])
        for one, expected in zip(found, jax.jit(look_up)(params, rows), strict=True):
            assert np.asarray(one).tobytes() == np.asarray(expected).tobytes()
        fn.close()


@pytest.mark.parametrize(
    "fn",
    [
        lambda p, rows: p["table"][rows] + jnp.sum(p["table"] @ p["other"].T),
        lambda p, rows: p["table"][rows] + jnp.sum(p["table"].T @ (2 * p["table"])),
        lambda p, rows: p["table"].astype(jnp.int32)[rows],
    ],
    ids=["tables", "itself", "integers"],
)
def test_what_is_needed_whole(fn):
    params = {"other": jnp.ones((32, 8)), "table": jnp.ones((64, 8))}
    found = find_tables(prepare_function(fn, params, jnp.arange(4)).lifetimes.graph)
    assert found
    assert all(table.why for table in found)
