"""The programs of docs/checkpoints.md run as they are printed."""

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

import jaxinf
from jaxinf.exchange import StepFiles, export_orbax, import_checkpoint

PAGE = Path(__file__).parents[2] / "docs" / "checkpoints.md"


def programs(**places):
    """Returns the page's Python blocks by their heading, with other paths."""
    text = PAGE.read_text()
    for old, new in places.items():
        text = text.replace(f'"/{old}', f'"{new}')
    sections = re.split(r"^### (.*)$", text, flags=re.M)[1:]
    return {
        heading: [
            textwrap.dedent(block)
            for block in re.findall(r"```python\n(.*?)```", body, flags=re.S)
        ]
        for heading, body in zip(sections[::2], sections[1::2], strict=True)
    }


def train(tx, params, state, num_steps):
    update, apply = jax.jit(tx.update), jax.jit(optax.apply_updates)
    for _ in range(num_steps):
        updates, state = update(jax.tree.map(jnp.sin, params), state, params)
        params = apply(params, updates)
    return params, state


def test_the_page(tmp_path):
    plain = optax.adamw(1e-2)
    fresh = {"out": jnp.arange(7.0), "h": {"kernel": jnp.ones((3, 5))}}
    params, state = train(plain, fresh, plain.init(fresh), 6)
    saved = tmp_path / "plain" / "6"
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(saved, {"params": params, "opt_state": state})
    expected, expected_state = train(plain, params, state, 4)

    page = programs(mnt=f"{tmp_path}/mnt", exports=f"{tmp_path}/exports")
    make, go_on = page["Bring a plain optax run into a store"]
    run = tmp_path / "mnt" / "nvme0" / "run"
    exec(make, {"tx": plain, "params": fresh})
    import_checkpoint(saved, run)
    scope = {"jaxinf": jaxinf, "tx": plain, "params": fresh}
    exec(go_on, scope)
    store = scope["store"]
    assert store.checkpoint() == "6"
    train(scope["tx"], scope["params"], scope["state"], 4)
    found = store.params(like=fresh)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    with store.snapshot() as path:
        export_orbax(StepFiles(path, store.manifest), tmp_path / "exports" / "run")
    store.close()

    (back,) = page["Back to plain optax"]
    scope = {"plain": plain, "step": 10}
    exec(back, scope)
    jax.tree.map(np.testing.assert_array_equal, scope["params"], expected)
    jax.tree.map(np.testing.assert_array_equal, scope["state"], expected_state)

    (stock,) = page["Restore with stock Orbax"]
    command = [sys.executable, "-c", stock]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    for array in (params["out"], state[0].mu["out"], state[0].nu["out"]):
        assert str(np.asarray(array)) in done.stdout
