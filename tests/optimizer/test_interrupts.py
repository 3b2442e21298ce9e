"""Ctrl-C in a program's own loop: a KeyboardInterrupt, and nothing lost."""

import os
import subprocess
import sys

import pytest

BEGIN = """
import os, random, signal, sys, threading, time
import jax, jax.numpy as jnp, numpy as np, optax
import jaxinf
from jaxinf.interrupts import interrupts

# A process in the background of a shell ignores SIGINT, and hands that down.
signal.signal(signal.SIGINT, signal.default_int_handler)
PARAMS = {name: jnp.linspace(-1, 1, 3000).reshape(60, 50) for name in "abc"}

def training(path):
    store = jaxinf.open_store(path)
    tx = jaxinf.smart_update(optax.adam(1e-2), store)

    @jax.jit
    def step(params, state):
        gradients = jax.tree.map(jnp.sin, params)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    return store, step, PARAMS, tx.init(PARAMS)
"""

STORM = """
store, step, params, state = training(sys.argv[1] + "/interrupted")
params, state = step(params, state)
moments, num_interrupts = random.Random(int(sys.argv[2])), 0

def interrupt(after_s):
    time.sleep(after_s)
    os.kill(os.getpid(), signal.SIGINT)

for _ in range(60):
    sender = threading.Thread(target=interrupt, args=(moments.uniform(0, 0.008),))
    try:
        sender.start()
        while True:
            params, state = step(params, state)
    except KeyboardInterrupt:
        num_interrupts += 1
    sender.join()
params, state = step(params, state)
print("steps", int(state.step), "interrupts", num_interrupts)
assert store.step == int(state.step)
found = jax.tree.leaves((params, store.params(PARAMS)))

_, step, expected, other = training(sys.argv[1] + "/reference")
while int(other.step) < int(state.step):
    expected, other = step(expected, other)
for one, wanted in zip(found, jax.tree.leaves((expected, expected))):
    np.testing.assert_array_equal(one, wanted)
"""

INSIDE = """
num_calls = 0

def interrupting(handler, times):
    def commit(*arguments):
        global num_calls
        num_calls += 1
        for _ in range(times if num_calls == 2 else 0):
            signal.raise_signal(signal.SIGINT)
        return commit_it(*arguments)

    from jaxinf.optimizer.host_side import HostSide
    commit_it, HostSide.commit = HostSide.commit, commit
    store, step, params, state = training(sys.argv[1] + "/store")
    if handler is not None:
        signal.signal(signal.SIGINT, handler)
    params, state = step(params, state)
    return store, step, params, state
"""

FIRST_WAITS = """
store, step, params, state = interrupting(None, 1)
try:
    step(params, state)
    while True:
        pass
except KeyboardInterrupt:
    pass
assert num_calls == 2
params, state = step(params, state)
assert int(state.step) == store.step == 2
"""

SECOND_ENDS_IT = """
from jaxinf import interrupts as module
module._PATIENCE_S = 0.0
store, step, params, state = interrupting(None, 2)
try:
    step(params, state)
except jax.errors.JaxRuntimeError as error:
    assert "KeyboardInterrupt" in str(error)
else:
    raise AssertionError
try:
    store.check()
except KeyboardInterrupt:
    pass
else:
    raise AssertionError
"""

OWN_HANDLER = """
thread = threading.Thread(target=training, args=(sys.argv[1] + "/other",))
thread.start()
thread.join()
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
received = []
store, step, params, state = interrupting(lambda *one: received.append(one), 1)
params, state = step(params, state)
assert len(received) == 1
assert signal.getsignal(signal.SIGINT) != interrupts.handle
assert store.step == 2
"""


def run(program, *arguments, **environment):
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + program, *map(str, arguments)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("way", ["", pytest.param("io", marks=pytest.mark.long)])
def test_every_interrupt_is_a_keyboard_interrupt_and_the_run_goes_on(tmp_path, way):
    said = run(STORM, tmp_path, 7, JAXINF_CALLBACK=way)
    assert said.split()[2:] == ["interrupts", "60"]


def test_an_interrupt_in_a_callback_waits_for_its_end(tmp_path):
    run(INSIDE + FIRST_WAITS, tmp_path)


def test_a_second_interrupt_ends_a_callback(tmp_path):
    run(INSIDE + SECOND_ENDS_IT, tmp_path)


def test_a_programs_own_handler_and_other_threads_are_left_alone(tmp_path):
    run(INSIDE + OWN_HANDLER, tmp_path)
