"""Training by `jaxinf.stream`: against optax in memory, resumed, killed, refused."""

import errno
import importlib
import json
import math
import os
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from threading import Event

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from streaming import assert_near, assert_same_bits
from zoo import ZOO, normal

import jaxinf
from jaxinf.cli import main
from jaxinf.engine import ParamsReader
from jaxinf.errors import (
    BudgetError,
    StoreFormatError,
    StoreIOError,
    StoreMismatchError,
    StreamError,
)
from jaxinf.io.pages import page_ceil
from jaxinf.schedule.placement import waiting
from jaxinf.store import plan_damages, seal
from jaxinf.streaming.budgets import planned_within
from jaxinf.streaming.plan.memory import divide
from jaxinf.streaming.plan.plan import prepare
from jaxinf.terminal import parse_bytes

BOUND = importlib.import_module("jaxinf.streaming.bound")
CLIP = optax.clip_by_global_norm(0.1)
CLIPPED = optax.chain(CLIP, optax.adamw(1e-3))
MEMORY_BYTES = 256 << 20
CHUNKS = {"chunk_elements": 4096, "memory_bytes": 16 << 20}


@pytest.fixture
def streamed(open_store):
    """Opens streamed steps on stores of small chunks."""

    def make(program, tx, name="store", store=None, **options):
        store = store or open_store(name, **CHUNKS)
        return jaxinf.stream(
            program.loss,
            tx,
            store,
            memory_bytes=MEMORY_BYTES,
            has_aux=program.has_aux,
            **options,
        )

    return make


def in_memory(program, tx, batches):
    """Losses and params by plain optax, gradients, update and sum each a jit."""
    vg = jax.jit(jax.value_and_grad(program.loss, has_aux=program.has_aux))
    update, apply = jax.jit(tx.update), jax.jit(optax.apply_updates)
    params, losses = program.params, []
    state = jax.jit(tx.init)(params)
    for batch in batches:
        value, gradients = vg(params, batch)
        updates, state = update(gradients, state, params)
        params = apply(params, updates)
        losses.append(float(value[0] if program.has_aux else value))
    return losses, params


@pytest.mark.parametrize(
    "name",
    [
        "tied_and_unused",
        pytest.param("l2_penalty", marks=pytest.mark.long),
        pytest.param("scan_twice_cast", marks=pytest.mark.long),
        pytest.param("scan_remat_reverse", marks=pytest.mark.long),
    ],
)
def test_training_is_that_of_optax(name, streamed):
    program = ZOO[name]()
    tx = optax.adamw(1e-3)
    step = streamed(program, tx)
    step.load(program.params, batch=program.batch)
    losses = [float(step(program.batch)[0]) for _ in range(3)]
    expected, params = in_memory(program, tx, [program.batch] * 3)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    assert_near(step.store.params(like=program.params), params, 2e-5)
    assert step.store.step == 3


def test_aux_comes_with_the_loss(streamed):
    program = ZOO["scan_nested"]()
    step = streamed(program, optax.sgd(0.1))
    step.load(program.params, batch=program.batch)
    loss, aux = step(program.batch)
    expected, means = jax.jit(program.loss)(program.params, program.batch)
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    np.testing.assert_allclose(aux, means, rtol=1e-5)


def test_without_aux_there_is_none(streamed):
    program = ZOO["l2_penalty"](depth=2)
    step = streamed(program, optax.sgd(0.1))
    step.load(program.params)
    assert step(program.batch)[1] is None


def run(step, program, num_steps):
    return [float(step(program.batch)[0]) for _ in range(num_steps)]


@pytest.mark.parametrize("policy", ["recompute", "keep"])
def test_resumed_is_uninterrupted(policy, streamed, open_store):
    program, tx = ZOO["stack_by_index"](depth=3), optax.adam(1e-2)
    whole = streamed(program, tx, "whole")
    whole.load(program.params, batch=program.batch)
    expected = run(whole, program, 4)

    first = streamed(program, tx, "parts", policy=policy)
    first.load(program.params, batch=program.batch)
    found = run(first, program, 2)
    first.close()
    second = streamed(program, tx, "parts")
    second.init(lambda: jax.tree.map(jnp.zeros_like, program.params))
    found += run(second, program, 2)
    assert found == expected
    states = [step.store for step in (whole, second)]
    for name in ("params", "mu", "nu"):
        for leaf in states[0]._manifest.leaves:
            held = [store.read(name, "/".join(leaf.path)) for store in states]
            np.testing.assert_array_equal(*held)


def test_a_store_goes_to_smart_update_and_back(streamed, open_store):
    program, tx = ZOO["stack_by_index"](), optax.adam(1e-2)
    step = streamed(program, tx)
    step.load(program.params, batch=program.batch)
    run(step, program, 1)
    step.close()
    store = open_store("store", **CHUNKS)
    params = store.params(like=program.params)
    smart = jaxinf.smart_update(tx, store)
    state = smart.init(params)
    gradients = jax.jit(jax.grad(program.loss))(params, program.batch)
    updates, state = smart.update(gradients, state, params)
    params = optax.apply_updates(params, updates)
    store.wait(state)
    store.close()
    again = streamed(program, tx)
    again.load(params, batch=program.batch)
    run(again, program, 1)
    _, expected = in_memory(program, tx, [program.batch] * 3)
    assert_near(again.store.params(like=params), expected, 2e-5)


def test_slices_of_a_store_made_for_whole_leaves(streamed, open_store):
    """Chunks that no slice is whole in: leaves are read, and gradients gathered."""
    program, tx = ZOO["scan_remat_reverse"](), optax.sgd(0.1)
    store = open_store("whole", memory_bytes=16 << 20)
    smart = jaxinf.smart_update(tx, store)
    smart.init(jax.tree.map(jnp.asarray, program.params))
    step = streamed(program, tx, store=store)
    step.load(program.params, batch=program.batch)
    run(step, program, 2)
    _, expected = in_memory(program, tx, [program.batch] * 2)
    assert_near(store.params(like=program.params), expected, 2e-5)


INITS = {
    "linen": lambda key: jax.tree.map(lambda p: p * 1.0, _linen_init(key)),
    "haiku": lambda key: _haiku_init(key),
    "stack": lambda key: {
        "w": jax.random.normal(key, (3, 64, 64)),
        "b": jnp.zeros(64),
        "c": jax.random.normal(jax.random.fold_in(key, 7), (64, 64)),
        "d": jax.random.normal(jax.random.fold_in(key, 8), (64, 64)),
    },
}


def _linen_init(key):
    import flax.linen as nn

    model = nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(64), nn.LayerNorm()])
    return model.init(key, jnp.ones((2, 64)))["params"]


def _haiku_init(key):
    import haiku as hk

    model = hk.transform(lambda x: hk.Linear(64)(hk.Linear(64)(x)))
    return model.init(key, jnp.ones((2, 64)))


@pytest.mark.parametrize(
    "name",
    [*(pytest.param(n, marks=pytest.mark.long) for n in ("linen", "haiku")), "stack"],
)
def test_leaves_are_made_as_jitted_init_makes_them(name, streamed):
    init, key = INITS[name], jax.random.key(5)
    program = replace(ZOO["l2_penalty"](), loss=lambda p, b: jnp.sum(b))
    step = streamed(program, optax.sgd(0.1), name)
    step.init(init, key)
    expected = jax.jit(init)(key)
    assert_same_bits(step.store.params(like=expected), expected)
    assert step.store.step == 0


def test_a_leaf_too_large_to_be_made_is_named(open_store):
    step = jaxinf.stream(
        lambda p, b: jnp.sum(p["small"]),
        optax.sgd(0.1),
        open_store(**CHUNKS),
        memory_bytes=2 << 20,
    )

    def init(key):
        return {"small": jnp.zeros(8), "vast": jax.random.normal(key, (1 << 20,))}

    with pytest.raises(StreamError, match=r"leaf vast takes \d+ bytes .*step\.load"):
        step.init(init, jax.random.key(0))
    assert not step.store.exists


def test_a_gradient_that_is_not_finite_refuses_the_step(streamed):
    program = ZOO["l2_penalty"](depth=3)
    step = streamed(program, optax.sgd(0.1))
    step.load(program.params)
    run(step, program, 1)
    bad = jax.tree.map(
        lambda x: x.at[0].set(jnp.nan), jax.tree.map(jnp.asarray, program.batch)
    )
    before = step.store.params(like=program.params)
    with pytest.raises(jaxinf.NonFiniteGradientError, match=r"step 2: NaN or Inf"):
        step(bad)
    assert_same_bits(step.store.params(like=program.params), before)
    assert step.store.step == 1


def test_a_skipped_step_changes_nothing_and_is_counted(streamed):
    program = ZOO["l2_penalty"](depth=3)
    step = streamed(program, optax.adam(0.1), nonfinite="skip")
    step.load(program.params)
    bad = jax.tree.map(lambda x: x * np.float32(np.nan), program.batch)
    step(bad)
    run(step, program, 2)
    _, expected = in_memory(program, optax.adam(0.1), [program.batch] * 2)
    assert_near(step.store.params(like=program.params), expected, 2e-5)
    assert (step.store.step, step.store.skipped_steps) == (2, 1)


def test_batches_of_two_shapes_have_a_plan_each(streamed):
    program, tx = ZOO["l2_penalty"](depth=3), optax.sgd(0.1)
    half = jax.tree.map(lambda x: x[:4], program.batch)
    step = streamed(program, tx)
    step.load(program.params)
    pool = step.store._training.opened.fleet._pool
    idle = []
    for batch in (program.batch, half, program.batch):
        step(batch)
        idle.append(sum(b.params.held_bytes > 0 for b in step._bound.values()))
        assert pool.capacity_bytes + step.plan.peak_bytes <= MEMORY_BYTES
    assert idle == [1, 1, 1]  # one plan has the memory at a time
    _, expected = in_memory(program, tx, [program.batch, half, program.batch])
    assert_near(step.store.params(like=program.params), expected, 2e-5)
    assert len(list((step.store.path / "stream").iterdir())) == 2


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


def test_a_damaged_plan_is_named(streamed):
    program = ZOO["l2_penalty"](depth=2)
    step = streamed(program, optax.sgd(0.1))
    step.load(program.params)
    run(step, program, 1)
    (kept,) = (step.store.path / "stream").iterdir()
    kept.write_text('{"version": 1, "cuts": [3, 1]}')
    step.close()
    again = streamed(program, optax.sgd(0.1))
    again.load(program.params)
    with pytest.raises(StoreFormatError, match=kept.name):
        again(program.batch)


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
        (lambda held: seal(edited(held, cuts=[])), "numbers that rise from 0"),
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


@pytest.mark.parametrize("kind", ["file", "link"])
def test_plans_have_a_folder_or_are_refused(kind, streamed, tmp_path, capsys):
    program = ZOO["l2_penalty"](depth=2)
    step = streamed(program, optax.sgd(0.1))
    step.load(program.params)
    folder, target = step.store.path / "stream", tmp_path / "elsewhere"
    target.mkdir()
    folder.write_text("") if kind == "file" else folder.symlink_to(target)
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
    too_little = step.store._training.opened.limit_memory(0) + step.plan.peak_bytes // 2
    step.close()
    less = jaxinf.stream(
        program.loss, optax.sgd(0.1), open_store(**CHUNKS), memory_bytes=too_little
    )
    less.load(program.params)
    message = r'memory_bytes="\d+MiB" works, or pass replan=True'
    with pytest.raises(StreamError, match=message):
        less(program.batch)
    assert less.store.step == 1


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


def test_the_search_for_a_budget_is_bounded():
    program = ZOO["l2_penalty"](depth=2)
    ready = prepare(program.loss, program.params, program.batch)
    budgets = []

    def plan(limits):
        budgets.append(limits["memory_bytes"])
        return ready.plan(0)

    with pytest.raises(BudgetError, match="raise memory_bytes by at least"):
        planned_within({"memory_bytes": 1 << 20}, plan)
    assert budgets == sorted(set(budgets))
    assert 5 < len(budgets) < 20
    assert budgets[-1] > 8 * budgets[0]


@pytest.mark.parametrize("few", [1 << 20, 64 << 20])
@pytest.mark.parametrize("policy", ["recompute", "offload"])
def test_the_budget_that_is_named_is_the_smallest(few, policy):
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
        planned_within({"memory_bytes": few}, plan)
    assert len(budgets) < 8
    works = parse_bytes(refused.value.works["memory_bytes"])
    assert plan({"memory_bytes": works})
    with pytest.raises(BudgetError):  # it is rounded up by 1/32 at most
        plan({"memory_bytes": works * 31 // 32})


def test_a_commit_has_the_payload_of_its_step(streamed):
    program = ZOO["l2_penalty"](depth=2)
    step = streamed(program, optax.sgd(0.1))
    step.load(program.params)
    for number in range(1, 5):
        step.annotate({"batch": number})  # while the step before may still be written
        step(program.batch)
    step.store.wait()
    assert (step.store.step, step.store.payload) == (4, {"batch": 4})


def test_a_step_before_params_is_refused(streamed):
    program = ZOO["l2_penalty"](depth=2)
    with pytest.raises(StreamError, match=r"call step.init or step.load first"):
        streamed(program, optax.sgd(0.1))(program.batch)


def test_params_are_read_as_they_were_given(streamed):
    program = ZOO["l2_penalty"](depth=2)
    step = streamed(program, optax.sgd(0.1))
    with pytest.raises(StreamError, match=r"call step.init or step.load first"):
        step.params()
    with pytest.raises(StreamError, match=r"found a list; .*step.load"):
        step.init(program.params)
    step.load(program.params)
    assert_same_bits(step.params(), program.params)
    step(program.batch)
    with pytest.raises(StoreMismatchError):
        step.params(program.params[:1])
    asked = jax.tree.map(lambda x: x.astype("bfloat16"), program.params)
    assert_same_bits(step.params(asked), step.store.params(like=asked))


def test_another_tree_is_refused(streamed):
    program, tx = ZOO["l2_penalty"](depth=2), optax.sgd(0.1)
    first = streamed(program, tx)
    first.load(program.params)
    first.close()
    other = streamed(program, tx)
    with pytest.raises(StoreMismatchError, match="not in the store"):
        other.load([*program.params, {"w": normal(1, 4, 4), "b": normal(2, 4)}])


def noisy(params, batch):
    jax.debug.print("{}", batch)
    return jnp.sum(params["w"])


def looping(params, batch):
    return jnp.sum(
        jax.lax.while_loop(lambda w: jnp.sum(w) < 9, lambda w: 2 * w, params["w"])
    )


VAST = {"w": jax.ShapeDtypeStruct((4 << 20,), jnp.float32)}


@pytest.mark.parametrize(
    ("loss", "params", "error", "message"),
    [
        (lambda p, b: 0.0, {"n": np.arange(3)}, StreamError, "leaf n: .* int64"),
        (lambda p, b: 0.0, {"f": "text"}, StreamError, "leaf f: .*found str"),
        (lambda p, b: p["w"], None, StreamError, "a floating-point scalar"),
        (lambda p, b: (p["w"][0], b), None, StreamError, "pass has_aux=True"),
        (noisy, None, StreamError, "side effects"),
        (looping, None, ValueError, "Reverse-mode differentiation .*while_loop"),
        (
            lambda p, b: jnp.sum(jnp.sin(p["w"])),
            VAST,
            StreamError,
            r"takes \d+, with w \(16777216 bytes\);.* memory_bytes=\"\d+MiB\" works",
        ),
    ],
)
def test_bad_input_is_refused_before_a_store_is_made(
    loss, params, error, message, open_store
):
    step = jaxinf.stream(
        loss, optax.sgd(0.1), open_store(**CHUNKS), memory_bytes=32 << 20
    )
    given = {"w": np.ones(3, np.float32)} if params is None else params
    with pytest.raises(error, match=message):
        step.load(given, batch=np.ones(3, np.float32))
    assert not step.store.exists
    assert not step.store.path.exists()


@pytest.mark.parametrize("name", ["tied_and_unused", "stack_by_index"])
def test_clipping_is_that_of_optax(name, streamed):
    program = ZOO[name]()
    step = streamed(program, CLIPPED)
    step.load(program.params, batch=program.batch)
    run(step, program, 3)
    _, expected = in_memory(program, CLIPPED, [program.batch] * 3)
    assert_near(step.store.params(like=program.params), expected, 2e-5)


def test_spilled_to_the_drive_has_the_bits_of_memory(streamed, monkeypatch):
    program = ZOO["tied_and_unused"]()
    held = streamed(program, CLIPPED, "held")
    held.load(program.params)
    run(held, program, 2)
    assert not held.metrics.spilled_drive_bytes

    monkeypatch.setattr(BOUND, "waiting", lambda sizes, *_: waiting(sizes, 0))
    spilled = streamed(program, CLIPPED, "spilled")
    spilled.load(program.params)
    run(spilled, program, 2)
    assert spilled.metrics.spilled_drive_bytes == sum(
        page_ceil(leaf.nbytes) for leaf in jax.tree.leaves(program.params)
    )
    assert_same_bits(
        *(step.store.params(like=program.params) for step in (held, spilled))
    )
    plans = {path.suffix for path in (spilled.store.path / "stream").iterdir()}
    assert plans == {".json"}


def test_a_full_drive_refuses_the_step_while_gradients_are_spilled(
    streamed, monkeypatch
):
    program = ZOO["tied_and_unused"]()
    monkeypatch.setattr(BOUND, "waiting", lambda sizes, *_: waiting(sizes, 0))
    step = streamed(program, CLIPPED)
    step.load(program.params)
    run(step, program, 1)

    real = os.pwritev

    def full(fd, *args):
        if "(deleted)" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, *args)

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(jaxinf.StoreSpaceError, match=r"file of gradients.*write"):
        step(program.batch)
    monkeypatch.undo()
    assert step.store.step == 1
    run(step, program, 1)
    assert step.store.step == 2


@pytest.mark.parametrize(
    ("name", "tx"),
    [("stack_by_index", CLIPPED), ("tied_and_unused", optax.adam(1e-2))],
    ids=["clipped", "adam"],
)
def test_drives_move_what_the_plan_says(name, tx, streamed, monkeypatch):
    program = ZOO[name]()
    # Gradients that wait do so in memory up to here, then on the drive.
    few = 8192
    monkeypatch.setattr(BOUND, "waiting", lambda sizes, *_: waiting(sizes, few))
    step = streamed(program, tx)
    step.load(program.params, batch=program.batch)
    run(step, program, 3)
    step.store.wait()
    traffic, planned = step.store.metrics.traffic, step.traffic
    assert traffic.drive_read_bytes == planned.drive_read_bytes
    assert traffic.drive_write_bytes == planned.drive_write_bytes
    # Params, which stay in memory between programs, and two moments; gradients.
    all_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(program.params))
    assert traffic.drive_write_bytes >= 3 * all_bytes
    assert traffic.drive_read_bytes >= 3 * all_bytes
    assert (step.metrics.spilled_drive_bytes > 0) == (tx is CLIPPED)


def test_a_failing_drive_stops_the_step(streamed, monkeypatch):
    program = ZOO["l2_penalty"](depth=3)
    step = streamed(program, optax.sgd(0.1))
    step.load(program.params)
    run(step, program, 1)

    def fail(*args):
        raise OSError("the drive is gone")

    monkeypatch.setattr(ParamsReader, "read", fail)
    with pytest.raises(OSError, match="the drive is gone"):
        step(program.batch)
    monkeypatch.undo()
    run(step, program, 1)
    assert step.store.step == 2


# --- where a step is called ---------------------------------------------------------


def called(step, batch):
    return lambda x: x * step(batch)[0]


@pytest.mark.parametrize(
    "traced",
    [
        lambda step, batch: jax.jit(lambda batch: step(batch)[0])(batch),
        lambda step, batch: jax.jit(called(step, batch))(1.0),
        lambda step, batch: jax.grad(called(step, batch))(1.0),
        lambda step, batch: jax.vmap(called(step, batch))(jnp.ones(2)),
        lambda step, batch: jax.jit(step.function(lambda p, b: b))(batch),
    ],
)
def test_a_call_inside_a_traced_function_is_refused(traced, streamed):
    program = ZOO["l2_penalty"](depth=2)
    step = streamed(program, CLIP)
    step.load(program.params)
    with pytest.raises(StreamError, match=r"found a call inside .* JAX traces"):
        traced(step, program.batch)
    assert step.store.step == 0


def test_a_step_under_way_in_another_thread_is_not_joined(streamed, monkeypatch):
    program, begun, ends = ZOO["l2_penalty"](depth=2), Event(), Event()
    step = streamed(program, optax.adam(1e-3))
    step.load(program.params)
    read = ParamsReader.read

    def waiting(self, *args):
        begun.set()
        ends.wait(60)
        return read(self, *args)

    monkeypatch.setattr(ParamsReader, "read", waiting)
    with ThreadPoolExecutor(1) as other:
        under_way = other.submit(step, program.batch)
        assert begun.wait(60)
        calls = step, step.function(program.loss), lambda batch: step.compile(batch)
        for call in calls:
            with pytest.raises(StreamError, match="found a step under way in another"):
                call(program.batch)
        ends.set()
        under_way.result()
    step(program.batch)
    step.store.wait()
    assert step.store.step == 2


@pytest.mark.parametrize("state", [None, "int8"])
def test_the_stores_own_budget_is_not_used(state, streamed, open_store):
    """What is too little for an update beside JAX is enough to be opened with."""
    program = ZOO["l2_penalty"](depth=2)
    for _ in range(2):  # a new store, and one that is there
        store = open_store("small", memory_bytes=1 << 16, state=state)
        step = streamed(program, optax.adam(1e-3), store=store)
        step.load(program.params)
        step(program.batch)
        step.close()
        store.close()
    store = open_store("small", memory_bytes=1 << 16)
    tx = jaxinf.smart_update(optax.adam(1e-3), store)
    with pytest.raises(ValueError, match="memory_bytes=65536: 4 workers need at least"):
        tx.init(program.params)


@pytest.mark.parametrize("endurance_tbw", [math.nan, math.inf, 0, -1.0])
def test_an_endurance_that_is_no_number_is_refused(endurance_tbw, streamed):
    with pytest.raises(ValueError, match=r"endurance_tbw=\S+: expected a finite"):
        streamed(ZOO["l2_penalty"](depth=2), CLIP, endurance_tbw=endurance_tbw)


@pytest.mark.parametrize("num_steps", [0, 1])
def test_a_store_that_is_renamed_while_it_is_open_is_named(num_steps, streamed):
    program = ZOO["l2_penalty"](depth=2)
    step = streamed(program, CLIPPED)
    step.load(program.params)
    run(step, program, num_steps)
    step.store.wait()
    path = step.store.path
    path.rename(path.with_name("renamed"))
    with pytest.raises(StoreIOError, match=rf"^{path}/.* or undo a rename"):
        step(program.batch)
    with suppress(StoreIOError):  # one that read data has stopped the store
        step.store.check()
