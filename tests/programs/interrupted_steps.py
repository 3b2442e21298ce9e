"""Ctrl-C in a loop of steps: `optimizer/test_interrupts.py`.

python interrupted_steps.py FOLDER storm SEED
python interrupted_steps.py FOLDER CHECK...

Says after each check that it is done.
"""

import faulthandler
import os
import random
import signal
import sys
import threading
import time
from collections import Counter

import callback_form
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxinf
from jaxinf import interrupts
from jaxinf.optimizer.host_side import HostFunctions

PARAMS = {name: jnp.linspace(-1, 1, 3000).reshape(60, 50) for name in "abc"}
COMMIT = HostFunctions.commit


def training(path):
    store = jaxinf.open_store(path)
    tx = jaxinf.smart_update(optax.adam(1e-2), store)

    @jax.jit
    def step(params, state):
        gradients = jax.tree.map(jnp.sin, params)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    params = store.params(like=PARAMS) if store.step else PARAMS
    return store, step, params, tx.init(params)


class Updates:
    """A loop of `smart_update` in a jit."""

    def __init__(self, path):
        self._path = path
        self.store, self._step, self.params, self.state = training(path)

    def step(self):
        self.params, self.state = self._step(self.params, self.state)

    def go_on(self):
        self.close()
        self.store, self._step, self.params, self.state = training(self._path)

    def close(self):
        self.store.close()


NUM_INTERRUPTS, HANGS_S = 60, 30
LOST_S = 10  # where Python ignores exceptions, as JAX's callback at a collection


def storm(place, seed):
    """Is interrupted at random moments; goes on, or says why not; has the bits."""
    print("seed", seed)
    run = Updates(place + "/interrupted")
    run.step()
    moments, told = random.Random(seed), Counter()

    def interrupt(after_s):
        time.sleep(after_s)
        os.kill(os.getpid(), signal.SIGINT)

    for _ in range(NUM_INTERRUPTS):
        faulthandler.dump_traceback_later(HANGS_S, exit=True)
        sender = threading.Thread(target=interrupt, args=(moments.uniform(0, 0.02),))
        try:
            sender.start()
            until_s = time.monotonic() + LOST_S
            while time.monotonic() < until_s:
                run.step()
            told["lost"] += 1
        except KeyboardInterrupt:
            told["interrupt"] += 1
        except jax.errors.JaxRuntimeError as error:  # in JAX's part of a callback
            if "KeyboardInterrupt" not in str(error):
                raise
            told["interrupt"] += 1
        sender.join()
        try:
            run.step()
        except (jaxinf.JaxinfError, jax.errors.JaxRuntimeError) as error:
            if "store.params(like=params)" not in str(error):
                raise
            told["refused"] += 1
            run.go_on()
            run.step()
    faulthandler.cancel_dump_traceback_later()
    run.store.wait()
    num_steps, found = run.store.step, run.store.params(PARAMS)
    print("steps", num_steps, "interrupts", told["interrupt"] + told["lost"], told)
    assert told["lost"] < 6
    run.close()

    whole = Updates(place + "/reference")
    for _ in range(num_steps):
        whole.step()
    whole.store.wait()
    expected = whole.store.params(PARAMS)
    whole.close()
    jax.tree.map(np.testing.assert_array_equal, found, expected)


class Interrupted:
    """A step is done; the commit of the next is interrupted, and waits until that is
    kept."""

    def __init__(self, path):
        self.num_calls = 0

        def commit(*arguments, **options):
            self.num_calls += 1
            if self.num_calls == 2:
                for _ in range(2):  # two at once, as of a terminal and a launcher
                    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
                    while not interrupts._KEPT:
                        time.sleep(0.001)
                time.sleep(0.3)  # until the second is taken, too
            return COMMIT(*arguments, **options)

        HostFunctions.commit = commit
        self.store, self.step, params, state = training(path)
        self.params, self.state = self.step(params, state)


def first_waits(place):
    """An interrupt in a callback comes with the next call, and no result is lost."""
    run = Interrupted(place + "/first")
    params, state = run.step(run.params, run.state)
    jax.block_until_ready(params)
    with pytest.raises(KeyboardInterrupt):
        run.step(params, state)
    assert run.num_calls == 2
    params, state = run.step(params, state)
    run.store.wait(state)
    assert int(state.step) == run.store.step == 3
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


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
