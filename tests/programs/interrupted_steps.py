"""Ctrl-C in a loop of steps: `optimizer/test_interrupts.py`.

python interrupted_steps.py FOLDER storm SEED
python interrupted_steps.py FOLDER own_handler first_waits second_ends_it

Says after each check that it is done.
"""

import os
import random
import signal
import sys
import threading
import time

import callback_form
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxinf
from jaxinf import interrupts
from jaxinf.optimizer.host_side import HostSide

PARAMS = {name: jnp.linspace(-1, 1, 3000).reshape(60, 50) for name in "abc"}
COMMIT = HostSide.commit


def training(path):
    store = jaxinf.open_store(path)
    tx = jaxinf.smart_update(optax.adam(1e-2), store)

    @jax.jit
    def step(params, state):
        gradients = jax.tree.map(jnp.sin, params)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    return store, step, PARAMS, tx.init(PARAMS)


def storm(place, seed):
    """Is interrupted 30 times at random moments, and goes on with optax's bits."""
    store, step, params, state = training(place + "/interrupted")
    params, state = step(params, state)
    moments, num_interrupts = random.Random(seed), 0

    def interrupt(after_s):
        time.sleep(after_s)
        os.kill(os.getpid(), signal.SIGINT)

    for _ in range(30):
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

    _, step, expected, other = training(place + "/reference")
    while int(other.step) < int(state.step):
        expected, other = step(expected, other)
    for one, wanted in zip(found, jax.tree.leaves((expected, expected)), strict=True):
        np.testing.assert_array_equal(one, wanted)


class Interrupted:
    """A step is done; the commit of the next gets a number of interrupts."""

    def __init__(self, path, times, handler=None):
        self.num_calls = 0

        def commit(*arguments):
            self.num_calls += 1
            for _ in range(times if self.num_calls == 2 else 0):
                signal.raise_signal(signal.SIGINT)
            return COMMIT(*arguments)

        HostSide.commit = commit
        self.store, self.step, params, state = training(path)
        if handler is not None:
            signal.signal(signal.SIGINT, handler)
        self.params, self.state = self.step(params, state)


def own_handler(place):
    """A program's handler stays, and a thread installs none."""
    thread = threading.Thread(target=training, args=(place + "/other",))
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    received = []
    run = Interrupted(place + "/own", 1, lambda *one: received.append(one))
    run.step(run.params, run.state)
    run.store.wait()
    assert len(received) == 1
    assert signal.getsignal(signal.SIGINT) != interrupts.interrupts.handle
    assert run.store.step == 2
    signal.signal(signal.SIGINT, signal.default_int_handler)


def first_waits(place):
    """An interrupt in a callback comes at its end."""
    run = Interrupted(place + "/first", 1)
    try:
        run.step(run.params, run.state)
        while True:
            pass
    except KeyboardInterrupt:
        pass
    assert run.num_calls == 2
    _, state = run.step(run.params, run.state)
    assert int(state.step) == run.store.step == 2


def second_ends_it(place):
    """A second one in the same callback fails it."""
    interrupts.PATIENCE_S = 0.0
    run = Interrupted(place + "/second", 2)
    with pytest.raises(jax.errors.JaxRuntimeError, match="KeyboardInterrupt"):
        run.step(run.params, run.state)
    with pytest.raises(KeyboardInterrupt):
        run.store.check()


def main(place, *checks):
    # A process in the background of a shell ignores SIGINT, and hands that down.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if checks[0] == "storm":
        storm(place, int(checks[1]))
        return
    for check in checks:
        globals()[check](place)
        print(check, flush=True)


if __name__ == "__main__":
    callback_form.use_given()
    main(*sys.argv[1:])
