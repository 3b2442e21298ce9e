"""Processes of one run that differ; errors that come once."""

import json
import re

import pytest
from processes import running

TRAINER = ("-m", "jaxinf.train")
GPT2 = {"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 16}
GPT2 |= {"n_positions": 16, "vocab_size": 256}
OWN = {"learning-rate": "0.5", "seed": "1"}


def words(place):
    (place / "config.json").write_text(json.dumps(GPT2))
    text = "hello world, this is text\n"
    (place / "text.txt").write_text(text * 100)
    (place / "other.txt").write_text(text.upper() * 100)
    found = ("--preset", place / "config.json", "--data", place / "text.txt")
    found += ("--seq-len", 8, "--batch-size", 4, "--steps", 2)
    return (*found, "--store", place / "store", "--log-dir", place / "logs")


@pytest.mark.long
@pytest.mark.parametrize("field", [*OWN, "data"])
def test_processes_that_differ_are_refused_before_the_first_step(place, field):
    own = OWN.get(field, str(place / "other.txt"))
    options = {"program": TRAINER, "own": {1: [f"--{field}", own]}}
    with running(place, *words(place), **options) as processes:
        statuses = processes.wait()
        outputs = processes.outputs()
    assert all(statuses), outputs
    assert not (place / "logs" / "metrics.jsonl").exists()
    for output in outputs:
        assert f"--{field}" in output
        assert re.search("process [01]", output)


CHUNKS_VANISH = """
import shutil, sys, jax, jax.numpy as jnp, optax, jaxinf

@jax.jit
def slow(params):
    def turn(_, p):
        return jax.tree.map(lambda x: x + 1e-6 * jnp.sin(x), p)
    return jax.lax.fori_loop(0, 2000, turn, params)

params = {f"l{n}": jnp.ones((200, 200)) for n in range(4)}
store = jaxinf.open_store(sys.argv[1])
tx = jaxinf.smart_update(optax.adam(1e-2), store)
state, update = tx.init(params), jax.jit(tx.update)
for n in range(9):
    gradients = slow(params) if n > 1 else params
    updates, state = update(gradients, state, params)
    params = optax.apply_updates(params, updates)
    if n == 1:
        store.wait(state)
        for slot in (store.path / "slots").iterdir():
            shutil.rmtree(slot / "mu.l2" / "c")
jax.block_until_ready(params)
"""


@pytest.mark.long
def test_an_error_of_a_background_step_comes_once_and_last(place, run_python):
    done = run_python(CHUNKS_VANISH, place / "store", check=False)
    assert done.returncode != 0
    assert "mu.l2" in done.stderr
    assert done.stderr.count("StoreIOError") == 1
    assert done.stderr.count("Traceback") == 2  # the program's, and what JAX quotes
    assert "mu.l2" in done.stderr.strip().splitlines()[-1]
