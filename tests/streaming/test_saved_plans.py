"""Plans that a store keeps: used again, damaged, changed, too large, refused."""

import errno
import json
import os
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from streaming import CHUNKS, run
from zoo import ZOO

import jaxinf
from jaxinf.cli import main
from jaxinf.errors import (
    BudgetError,
    StoreFormatError,
    StoreIOError,
    StreamError,
)
from jaxinf.store import plan_damages, seal
from jaxinf.streaming.plan.fit import prepare
from jaxinf.streaming.plan.memory import divide
from jaxinf.streaming.plan.options import Options
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


def test_a_kept_plan_is_used_whatever_would_be_chosen_now(streamed):
    program, tx = ZOO["l2_penalty"](depth=3), optax.sgd(0.1)
    step = streamed(program, tx)
    step.load(program.params)
    cuts = step.compile(program.batch).cuts
    step.close()
    (kept,) = (step.store.path / "stream").iterdir()
    content = json.loads(kept.read_text())
    assert tuple(content["cuts"]) == cuts
    content["cuts"] = sorted({*cuts, cuts[0] + 1, cuts[-1] - 1})
    kept.write_bytes(seal(content))
    again = streamed(program, tx)
    again.load(program.params)
    run(again, program, 1)
    assert list(again.plan.cuts) == content["cuts"] != list(cuts)
    assert kept.read_bytes() == seal(content)


def edited(content, **changes):
    bare = {key: value for key, value in content.items() if key != "crc32c"}
    return bare | changes


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda held: json.dumps(held | {"cuts": [0, held["cuts"][-1]]}), "checksum"),
        (lambda held: seal(edited(held, colour="red")), "expected no key 'colour'"),
        (lambda held: seal(edited(held, cuts=[0, 5, 5])), "numbers that rise from 0"),
        (lambda held: seal(edited(held, cuts=[0, 10**9])), "cuts of a program of"),
        (lambda held: json.dumps(edited(held)), "expected .* its checksum last"),
    ],
)
def test_a_changed_plan_is_refused(change, problem, streamed, capsys):
    program = ZOO["l2_penalty"](depth=3)
    step = streamed(program, optax.sgd(0.1))
    step.load(program.params)
    step.compile(program.batch)
    (kept,) = (step.store.path / "stream").iterdir()
    step.close()
    assert main(["verify", str(step.store.path)]) == 0
    changed = change(json.loads(kept.read_text()))
    kept.write_bytes(changed if isinstance(changed, bytes) else changed.encode())
    again = streamed(program, optax.sgd(0.1))
    again.load(program.params)
    with pytest.raises(StoreFormatError, match=rf"{kept.name}.*{problem}"):
        again(program.batch)
    again.close()
    is_known = "of a program" not in problem  # which verify does not have
    assert main(["verify", str(again.store.path)]) == int(is_known)
    assert (kept.name in capsys.readouterr().out) is is_known


def test_plans_have_a_folder_or_are_refused(streamed, tmp_path, capsys):
    program = ZOO["l2_penalty"](depth=2)
    step = streamed(program, optax.sgd(0.1))
    step.load(program.params)
    folder, target = step.store.path / "stream", tmp_path / "elsewhere"
    target.mkdir()
    folder.symlink_to(target)
    for _ in range(2):
        with pytest.raises(StoreFormatError, match="the folder of streamed programs"):
            step(program.batch)
    assert not any(target.iterdir())
    assert next(plan_damages(step.store.path)).file == folder
    step.close()
    assert main(["verify", str(step.store.path)]) == 1
    assert str(folder) in "".join(capsys.readouterr())
    folder.unlink()
    again = streamed(program, optax.sgd(0.1))
    again.load(program.params)
    run(again, program, 1)


def test_plans_that_cannot_be_written_are_named(streamed, monkeypatch):
    program = ZOO["l2_penalty"](depth=2)
    step = streamed(program, optax.sgd(0.1))
    step.load(program.params)

    def refused(*args, **options):
        raise OSError(errno.EROFS, "")

    for name in ("mkdir", "replace"):
        with monkeypatch.context() as patched:
            patched.setattr(os, name, refused)
            with pytest.raises(StoreIOError, match=r"stream.*EROFS.*mount"):
                step(program.batch)
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

    for message in ("memory_bytes: it leaves", "with .* or pass replan=True"):
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
        return ready.plan(division.programs, policy)

    with pytest.raises(BudgetError) as refused:
        within(Options(few), plan)
    assert len(budgets) <= 4
    works = parse_bytes(refused.value.works["memory_bytes"])
    assert plan({"memory_bytes": works})
    with pytest.raises(BudgetError):  # nor is it far from the smallest
        plan({"memory_bytes": works * 2 // 3})
