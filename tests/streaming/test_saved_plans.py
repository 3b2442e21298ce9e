"""Plans that a store keeps: used again, damaged, changed, too large, refused."""

import json
import re
from dataclasses import replace
from functools import partial

import golden_streams
import jax
import numpy as np
import optax
import pytest
from golden_streams import CUTS, PARAMS, streams, unpacked
from raw_stores import edit
from streaming_cases import CHUNKS, run
from zoo import ZOO

import jaxinf
from jaxinf.cli import main
from jaxinf.errors import BudgetError, JaxinfError, StoreFormatError, StreamError
from jaxinf.store import seal
from jaxinf.terminal import parse_bytes

PROGRAM, SGD = ZOO["l2_penalty"](depth=3), optax.sgd(0.1)
OTHER = replace(PROGRAM, loss=lambda p, b: 2 * PROGRAM.loss(p, b))


@pytest.fixture
def opened(streamed):
    def make(program=PROGRAM, **options):
        step = streamed(program, SGD, **options)
        step.load(program.params)
        return step, partial(run, step, program, 1)

    return make


@pytest.fixture
def kept(opened):
    """A store with a step: its path, and the name and the plan that it keeps."""
    step, run_one = opened()
    run_one()
    step.close()
    ((name, plan),) = streams(step.store.path).items()
    assert tuple(plan["cuts"]) == step.plan.cuts
    assert not (step.store.path / "stream").exists()
    return step.store.path, name, plan


def put(path, name, plan, kept_in):
    if kept_in == "file":
        (path / "stream").mkdir()
        (path / f"stream/{name}.json").write_bytes(seal(plan))
    edit(
        path / "current/commit.json", streams={name: plan} if kept_in != "file" else {}
    )


@pytest.mark.parametrize("kept_in", ["record", "file"])
def test_a_kept_plan_is_used_whatever_would_be_chosen_now(kept, opened, kept_in):
    path, name, plan = kept
    cuts = sorted({*plan["cuts"], 1, plan["cuts"][-1] - 1})
    put(path, name, plan | {"cuts": cuts}, kept_in)
    other = "0" * 32  # of another shape of batch
    edit(path / "current/commit.json", streams=streams(path) | {other: plan})
    step, run_one = opened()
    run_one()
    assert list(step.plan.cuts) == cuts != plan["cuts"]
    step.close()
    assert streams(path) == {name: plan | {"cuts": cuts}, other: plan}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"cuts": [0, 10**9]}, "expected cuts of a program of"),
        ({"version": 1}, "another loss function"),
        ({"mesh": {"data": 2}}, r"on 2 devices \(data=2\)"),
    ],
)
def test_a_plan_of_another_program_is_refused(kept, opened, changes, problem):
    path, name, plan = kept
    put(path, name, plan | changes, "record")
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
def test_a_damaged_plan_is_refused(kept, opened, changes, problem):
    path, name, plan = kept
    put(path, name, plan | changes, "file")
    step, run_one = opened()
    with pytest.raises(StoreFormatError, match=rf"{name}.json.*{problem}.*replan=True"):
        run_one()
    step.close()
    put(path, name, plan | changes, "record")
    assert main(["verify", str(path)]) == 1
    with pytest.raises(StoreFormatError, match=rf"commit.json.*{problem}"):
        opened()


def test_a_plan_is_kept_with_the_first_commit_that_depends_on_it(opened, open_store):
    store = open_store(**CHUNKS, durability=2)
    step, run_one = opened(store=store)
    step.compile(PROGRAM.batch)
    run_one()
    assert not streams(store.path)
    run_one()
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


def test_another_loss_function_is_refused_until_replanned(opened):
    step, run_one = opened()
    beside, run_other = opened(OTHER, store=step.store)
    beside.compile(OTHER.batch)
    run_one()
    with pytest.raises(StreamError, match=r"another loss function .* replan=True"):
        run_other()
    assert beside.store.step == 1
    run_one()
    beside.close()
    step, run_one = opened(OTHER, replan=True)
    run_one()
    assert step.store.step == 3


@pytest.mark.long
def test_a_refused_budget_names_one_that_works(open_store):
    program, store = ZOO["l2_penalty"](depth=2), open_store(**CHUNKS)

    def start(memory_bytes):
        step = jaxinf.stream(program.loss, SGD, store, memory_bytes=memory_bytes)
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


# --- stores that an earlier version streamed to ---------------------------------------

# If they were meant to change, say so in the changelog, and write the store anew:
# python tests/support/golden_streams.py


@pytest.mark.long
@pytest.mark.optimized
@pytest.mark.parametrize("kept_in", ["file", "record"])
def test_the_golden_store_goes_on_to_the_bit(tmp_path, kept_in):
    path, record = unpacked(tmp_path)
    (file,) = (path / "stream").iterdir()
    if kept_in == "record":
        plan = json.loads(file.read_text())
        del plan["crc32c"]
        edit(path / "current/commit.json", streams={file.stem: plan})
        file.unlink()
    files = [*(path / "stream").iterdir()]
    step = golden_streams.opened(path)
    assert step.store.step == 2
    if jax.__version__ == record["jax"]:
        assert golden_streams.run(step, 2) == record["losses"][2:]
        assert list(step.plan.cuts) == CUTS
    else:
        # Another version of JAX may trace another program, whose plan is refused.
        step.close()
        step = golden_streams.opened(path, replan=True)
        assert golden_streams.run(step, 2) == record["losses"][2:]
    found = step.store.params(like=PARAMS)
    jax.tree.map(np.testing.assert_array_equal, found, record["params"])
    step.close()
    assert [tuple(one["cuts"]) for one in streams(path).values()] == [step.plan.cuts]
    assert [*(path / "stream").iterdir()] == files


@pytest.mark.optimized
def test_its_losses_are_those_of_a_new_store(tmp_path):
    _, record = unpacked(tmp_path)
    step = golden_streams.opened(tmp_path / "new")
    assert golden_streams.run(step, 4) == record["losses"]
    assert list(step.plan.cuts) != CUTS
    step.close()
