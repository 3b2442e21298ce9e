"""This machine's wheel, installed in a bare environment: nothing is compiled."""

import json
from pathlib import Path

STEPS = 20

KERNELS = """
import logging, sys
from jaxinf.kernels.compiled import compile_kernel, standard_kernels
from jaxinf.native import toolchain, transfers
from jaxinf.kernels import rsqrt_estimates
logging.basicConfig()
for kernel in standard_kernels().values():
    for level in toolchain.levels():
        compile_kernel(kernel, level=level)
helpers = transfers.load(), rsqrt_estimates()[0] > 0
print(all(x is not None for x in helpers), len(standard_kernels()))
"""
ANOTHER = """
import logging, sys, numpy as np, jax.numpy as jnp, optax
import jaxinf
logging.basicConfig(format="%(levelname)s %(message)s")
store = jaxinf.open_store(sys.argv[1])
tx = jaxinf.smart_update(optax.chain(optax.clip(3.0), optax.scale(-0.1)), store)
params = dict(w=jnp.ones(999))
state = tx.init(params)
gradient = np.linspace(-9, 9, 999, dtype=np.float32)
updates, state = tx.update(dict(w=jnp.asarray(gradient)), state, params)
expected = -0.1 * np.clip(gradient, -3, 3)
np.testing.assert_allclose(updates["w"], expected, rtol=1e-6)
store.close()
"""


def train(bare, name, **variables):
    """The run of `make train`, for a few steps; returns its losses."""
    place = bare.directory / name
    words = ["--store", place / "store", "--log-dir", place, "--steps", STEPS]
    result = bare.run("-m", "jaxinf.train", *words, **variables)
    lines = (place / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    print(result.stdout[-2000:])
    losses = [record["loss"] for record in records if "loss" in record]
    assert len(losses) >= STEPS
    return losses


def test_the_kernels_are_the_packages(bare):
    result = bare.run("-c", KERNELS)
    has_helpers, num = result.stdout.split()
    assert has_helpers == "True"
    assert int(num) > 30
    assert not bare.called()
    assert not result.stderr


def test_the_first_run_trains_without_a_compiler(bare):
    losses = train(bare, "run")
    assert losses[-1] < losses[0]
    assert not bare.called()


def test_another_optimizer_is_compiled_by_the_extras_compiler(bare, wheels, tmp_path):
    """Without it, the error names it, and no store has been made."""
    path = tmp_path / "store"
    without = bare.run("-c", ANOTHER, path, check=False, PATH="")
    assert without.returncode
    assert "the optimizer's kernel is not in this installation" in without.stderr
    assert "pip install 'jaxinf[compiler]'" in without.stderr
    assert not path.exists()
    link = bare.packages / "ziglang"
    link.symlink_to(Path(wheels.zig).parent)
    try:
        result = bare.run("-c", ANOTHER, path, PATH="")
    finally:
        link.unlink()
    assert path.exists()
    assert "WARNING" not in result.stderr
