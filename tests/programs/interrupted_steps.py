"""Ctrl-C in a callback of a step: `optimizer/test_transform.py`.

An interrupt in a callback comes with the next call, and no result is lost.

python interrupted_steps.py FOLDER
"""

import signal
import sys
import threading
import time

import callback_form
import jax
import jax.numpy as jnp
import optax
import pytest

import jaxinf
from jaxinf.optimizer.host_side import HostFunctions
from jaxinf.processes import interrupts

PARAMS = {name: jnp.linspace(-1, 1, 3000).reshape(60, 50) for name in "abc"}


def main(place):
    """Interrupts the commit of the second step, which waits until that is kept."""
    # A process in the background of a shell ignores SIGINT, and hands that down.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    num_calls, real = 0, HostFunctions.commit

    def commit(*arguments, **options):
        nonlocal num_calls
        num_calls += 1
        if num_calls == 2:
            for _ in range(2):  # two at once, as of a terminal and a launcher
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
                while not interrupts._kept_interrupts:
                    time.sleep(0.001)
            time.sleep(0.3)  # until the second is taken, too
        return real(*arguments, **options)

    HostFunctions.commit = commit
    store = jaxinf.open_store(place + "/store")
    tx = jaxinf.smart_update(optax.adam(1e-2), store)

    @jax.jit
    def step(params, state):
        gradients = jax.tree.map(jnp.sin, params)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    params, state = step(PARAMS, tx.init(PARAMS))
    params, state = step(params, state)
    jax.block_until_ready(params)
    with pytest.raises(KeyboardInterrupt):
        step(params, state)
    assert num_calls == 2
    params, state = step(params, state)
    store.wait(state)
    assert int(state.step) == store.step == 3
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    print("done")


if __name__ == "__main__":
    callback_form.use_given()
    main(sys.argv[1])
