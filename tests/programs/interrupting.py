"""Interrupts steps of `jaxinf.stream` at their lines, in this process.

    python interrupting.py FOLDER POLICY PARTS EVERY

Ctrl-C comes at every EVERY-th line that threads reach in a step, one a step.
Each step that was interrupted counts or does not, and the next one has its bits.
Invariant: a step that hangs ends the process with the stacks of all threads.
"""

import contextlib
import faulthandler
import os
import random
import signal
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import small_stores

import jaxinf
from jaxinf.streaming.plan import offload

ROOT = Path(jaxinf.__file__).parent
FILES = tuple(f"{ROOT / name}{os.sep}" for name in ("streaming", "engine"))
HANGS_S = 60
NUM_ROWS = 1024
TX = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-3))
PARAMS = {
    "layers": [
        np.random.default_rng(i).standard_normal((32, 32), np.float32) / 6
        for i in range(6)
    ]
}


class Tracer:
    """Tells of each line of the package that a thread reaches while a step runs."""

    def __init__(self):
        self.at_line, self.handled = None, threading.Event()
        signal.signal(signal.SIGINT, self._handle)
        threading.settrace(self._trace)

    def _trace(self, frame, event, _):
        file = frame.f_code.co_filename
        if not file.startswith(FILES):
            return None
        if event == "line" and self.at_line is not None:
            self.at_line(f"{file[len(str(ROOT)) + 1 :]}:{frame.f_lineno}")
        return self._trace

    def _handle(self, *_):
        self.handled.set()
        raise KeyboardInterrupt

    def interrupt(self):
        """Raises in the main thread; another one sends that Ctrl-C."""
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        self.handled.clear()
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        self.handled.wait(0.2)

    def run(self, at_line, step, number):
        self.at_line = at_line
        sys.settrace(self._trace)
        try:
            return run(step, number)
        finally:
            self.at_line = None
            sys.settrace(None)


def loss_fn(params, batch):
    x = batch
    for w in params["layers"]:
        x = jnp.tanh(x @ w) + jnp.sin(x)
    return jnp.mean(x**2)


def batch_of(number):
    return np.random.default_rng(number % 5).standard_normal((NUM_ROWS, 32), np.float32)


def opened(path, policy, parts):
    memory = {"memory_bytes": 27 << 20}
    if policy in ("keep", "recompute"):  # with little room to read ahead
        device_bytes = 2 << 20 if parts == 1 else 10 << 20  # values of parts leave
        memory = {"memory_bytes": 40 << 20, "device_memory_bytes": device_bytes}
    store = small_stores.open_store(path, chunk_elements=4096)
    options = {**memory, "policy": policy, "micro_batches": parts}
    step = jaxinf.stream(loss_fn, TX, store, **options)
    step.load(PARAMS, batch=batch_of(0))
    return step


def run(step, number):
    return float(step(batch_of(number))[0])


def main(folder, policy, parts, every):
    global NUM_ROWS
    if policy == "offload":  # values are too large for its memory
        offload.SMALL_BYTES, NUM_ROWS = 1, 8192
    tracer = Tracer()
    step = opened(Path(folder) / "store", policy, int(parts))
    expected = opened(Path(folder) / "expected", policy, int(parts))
    for number in range(3):
        assert run(step, number) == run(expected, number)
    lines, number = {}, 3
    assert tracer.run(lines.setdefault, step, number) == run(expected, number)
    first = random.Random(f"{policy} {parts}").randrange(int(every))
    num_counted, chosen = 0, list(lines)[first :: int(every)]
    for line in chosen:
        number += 1
        faulthandler.dump_traceback_later(HANGS_S, exit=True)
        left = [line]

        def interrupt(reached, left=left):
            if reached in left:
                left.clear()
                tracer.interrupt()

        with contextlib.suppress(KeyboardInterrupt):
            tracer.run(interrupt, step, number)
        step.compile(batch_of(0))  # waits for a step that was given up
        step.store._engine.steps.join()
        after = step.store._engine.files.finished.step
        assert after in (number, number + 1), (line, number, after)
        if after > number:
            num_counted += 1
            run(expected, number)
            number += 1
        found, right = run(step, number), run(expected, number)
        assert found == right, (line, number, found, right)
    faulthandler.cancel_dump_traceback_later()
    for one in (step, expected):
        one.store.wait()
    found, right = (one.store.params(like=PARAMS) for one in (step, expected))
    jax.tree.map(np.testing.assert_array_equal, found, right)
    print(f"{policy} {parts}: {len(chosen)} lines, {num_counted} counted")
    step.close()
    expected.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
