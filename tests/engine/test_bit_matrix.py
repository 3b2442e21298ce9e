"""The same bits for every memory, durability, kind of CSD and state, despite crashes.

Each run is cut off twice, in the middle of a step: it goes on in a copy of the files as
they are at that moment, as after a kill. One of its gradients is NaN.
"""

import shutil
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small_stores
from families import family
from inject import at_call
from streaming_cases import states

import jaxinf
from jaxinf.engine import engine_of

NUM_STEPS, NAN_STEP, CRASHES = 9, 4, (3, 7)
SHAPES = {"a": (5, 4096), "b": (3, 16384), "c": (129,)}
STATE_BYTES = 12 * sum(int(np.prod(shape)) for shape in SHAPES.values())
LEAST_BYTES = 3 * 12 * 4096 + 4 * 4096
MEMORY = {"least": LEAST_BYTES, "0.4": 0.4 * STATE_BYTES, "all": 3 * STATE_BYTES}


def gradients(params, step):
    rng = np.random.default_rng(step)
    held = {n: rng.standard_normal(x.shape, np.float32) for n, x in params.items()}
    if step == NAN_STEP:
        held["b"][1, 7] = np.nan
    return held


class Run:
    """Training with a store, whose directory can be exchanged for a copy."""

    def __init__(self, path, params=None, state=None, **options):
        options = {"chunk_elements": 4096, "num_workers": 1} | options
        self.store = small_stores.open_store(path, **options)
        tx = optax.adamw(1e-2)
        self.tx = jaxinf.smart_update(tx, self.store, nonfinite="skip")
        self.params = {n: jnp.full(s, 0.5) for n, s in SHAPES.items()}
        if params is not None:
            self.params = params
        self.state = self.tx.init(self.params)
        if params is not None:
            self.params = self.store.params(like=self.params)
        self._update = jax.jit(self.tx.update)

    def step(self, step):
        update = self._update(gradients(self.params, step), self.state, self.params)
        updates, self.state = update
        self.params = optax.apply_updates(self.params, updates)

    def crash(self, copy):
        """Begins a step, copies the files, and gives the run up."""
        jax.block_until_ready(self.params)
        engine = engine_of(self.store)
        engine.steps.join()

        def copy_files():
            engine.files.mover.drain()
            shutil.copytree(self.store.path, copy, symlinks=True)

        at_call(engine.steps, "finish", 1, copy_files)
        self.step(1000)
        jax.block_until_ready(self.params)
        self.store.close()


_references = {}


def reference(place, state):
    """State and params of an uninterrupted run; only steps that are not NaN count."""
    if state not in _references:
        run = Run(place / "reference", state=state, csd="host")
        for step in range(NUM_STEPS):
            run.step(step)
        run.store.wait(run.state)
        assert run.store.skipped_steps == 1
        _references[state] = states(run.store), run.params
        run.store.close()
    return _references[state]


AXES = [MEMORY, [1, 8], ["host", "emulated"], ["fp32", "int8"]]


@pytest.mark.parametrize(
    ("memory", "durability", "csd", "state"),
    family(
        product(*AXES),
        short=[("least", 8, "host", "int8"), ("0.4", 1, "emulated", "fp32"),
               ("all", 8, "host", "fp32")],
    ),
)  # fmt: skip
def test_bits(place, memory, durability, csd, state):
    wanted, wanted_params = reference(place, state)
    options = {"memory_bytes": int(MEMORY[memory]), "durability": durability}
    options |= {"csd": csd, "state": state}
    run, step, held = Run(place / "0", **options), 0, []
    for number, crash in enumerate((*CRASHES, None)):
        while step < (NUM_STEPS if crash is None else crash):
            run.step(step)
            held.append((run.params, jax.tree.map(np.array, run.params)))
            step += 1
        if crash is None:
            break
        last = engine_of(run.store)
        run.crash(place / str(number + 1))
        run = Run(place / str(number + 1), run.params, **options)
        committed = run.store.step
        assert 0 <= last.files.commit.step - committed <= durability + 1
        # A step of NaN is none of the store's.
        step = committed + (committed >= NAN_STEP)
    run.store.wait(run.state)
    for name, array in states(run.store).items():
        np.testing.assert_array_equal(array, wanted[name], err_msg=str(name))
    for name, array in run.params.items():
        np.testing.assert_array_equal(array, wanted_params[name], err_msg=name)
    for params, then in held:  # what a caller holds is not written over
        jax.tree.map(np.testing.assert_array_equal, params, then)
    run.store.close()
