import io
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small_stores
from raw_stores import stored

import jaxinf
from jaxinf.cli import main

WRITER = Path(__file__).parents[1] / "programs" / "running_writer.py"


def _params():
    rng = np.random.default_rng(0)
    return {
        "h": {
            "0": {
                "kernel": jnp.asarray(rng.normal(size=(300, 128)), jnp.float32),
                "bias": jnp.asarray(rng.normal(size=129), jnp.float16),
            }
        },
        "scale": jnp.float32(1.5),
    }


def _gradient(params, seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda p: jnp.asarray(rng.normal(size=p.shape), p.dtype), params
    )


def _make_store(path, csds=(), num_steps=3):
    params = _params()
    options = {"chunk_elements": 8192}
    with small_stores.open_store(path, csds=csds, **options) as store:
        tx = jaxinf.smart_update(optax.adamw(1e-3), store)
        state = tx.init(params)
        for step in range(num_steps):
            store.annotate(step + 1, {"position": step + 1})
            updates, state = tx.update(_gradient(params, step), state, params)
            params = optax.apply_updates(params, updates)
        store.wait(state)
        arrays = {
            (leaf.name, s.name): stored(store, s.name, leaf.name)
            for leaf in store._manifest.leaves
            for s in leaf.states
        }
    return SimpleNamespace(path=path, csds=csds, arrays=arrays, step=num_steps)


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A store at step 3, and its NumPy arrays; only for reading."""
    return _make_store(tmp_path_factory.mktemp("trained") / "store")


@pytest.fixture(scope="session")
def spread(tmp_path_factory):
    """The same over two CSDs."""
    root = tmp_path_factory.mktemp("spread")
    for name in ("one", "two"):
        (root / name).mkdir()
    return _make_store(root / "store", (root / "one", root / "two"))


@pytest.fixture
def make_store(tmp_path):
    """Makes a store that a test may damage."""
    return lambda **kwargs: _make_store(tmp_path / "store", **kwargs)


@pytest.fixture
def run(capsys):
    """Runs a command line; returns its exit status and output."""

    def call(*words):
        capsys.readouterr()
        try:
            status = main([str(word) for word in words])
        except SystemExit as end:
            status = end.code
        captured = capsys.readouterr()
        return SimpleNamespace(status=status, out=captured.out, err=captured.err)

    return call


@pytest.fixture
def run_json(run):
    """Runs a command with --json; returns the document."""

    def call(*words, status=0):
        result = run(*words, "--json")
        assert result.status == status, result.err
        return json.loads(result.out)

    return call


@pytest.fixture
def start_writer():
    """Starts a process that writes steps; every element is minus the step."""
    processes = []

    def start(path, *csds):
        words = [sys.executable, WRITER, str(path), *map(str, csds)]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert isinstance(process.stdout, io.TextIOBase)
        assert process.stdout.readline() == "running\n"
        return process

    yield start
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()
