"""Interrupts steps of `jaxinf.stream` at each of their lines, in this process.

    python interrupting.py FOLDER POLICY PARTS WHAT EVERY [again]

WHAT is "store", "memory" (a step without a store) or "function". A line of the main
thread raises there; a line of another thread sends Ctrl-C to the main thread. With
"again", another one comes some lines later, while the first is handled.

Invariant: a step that hangs ends the process with the stacks of all threads.
"""

import faulthandler
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import small_stores

import jaxinf
from jaxinf.streaming.plan import leaving

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


class Interrupting:
    """Traces lines; interrupts the main thread at one, and perhaps at a later one."""

    def __init__(self):
        self.lines, self.num_raised, self._left = {}, 0, None
        self._line = self._is_on = None
        self._was_handled = threading.Event()

    def install(self):
        signal.signal(signal.SIGINT, self._handle)
        threading.settrace(self._trace)
        sys.settrace(self._trace)

    def record(self, run, *arguments):
        """Notes the lines of a run, in the order in which they are reached."""
        self._line, self._is_on = None, True
        try:
            run(*arguments)
        finally:
            self._is_on = False

    def interrupt(self, line, again, run, *arguments):
        """Interrupts a run at a line, and again so many lines later, unless None."""
        self._line, self._left, self.num_raised, self._is_on = line, again, 0, True
        sys.settrace(self._trace)
        try:
            run(*arguments)
        except KeyboardInterrupt:
            pass
        finally:
            self._is_on = False
            sys.setprofile(None)

    def _trace(self, frame, event, argument):
        if self._is_on and frame.f_code.co_filename.startswith(FILES):
            return self._reach
        return None

    def _reach(self, frame, event, argument):
        if event == "line" and self._is_on:
            self._at(frame.f_code.co_filename, frame.f_lineno)
        return self._reach

    def _at(self, file, number):
        line = f"{file[len(str(ROOT)) + 1 :]}:{number}"
        is_main = threading.current_thread() is threading.main_thread()
        if self._line is None and not self.num_raised:
            self.lines.setdefault(line)
        if line == self._line:
            self._line = None
            self._raise(is_main)
        elif self.num_raised == 1 and self._left is not None and is_main:
            self._left -= 1
            if self._left < 0:
                self._raise(is_main)

    def _raise(self, is_main):
        if is_main:
            self.num_raised += 1
            sys.setprofile(self._resume)  # Python ends a trace that raises
            raise KeyboardInterrupt
        self._was_handled.clear()
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        self._was_handled.wait(0.2)

    def _resume(self, frame, event, argument):
        if not self._is_on:
            return
        sys.settrace(self._trace)
        while frame is not None:
            if frame.f_code.co_filename.startswith(FILES):
                frame.f_trace = self._reach
            frame = frame.f_back

    def _handle(self, number, frame):
        self._was_handled.set()
        self.num_raised += 1
        sys.setprofile(self._resume)
        raise KeyboardInterrupt


def loss_fn(params, batch):
    x = batch
    for w in params["layers"]:
        x = jnp.tanh(x @ w) + jnp.sin(x)
    return jnp.mean(x**2)


def batch_of(number):
    return np.random.default_rng(number % 5).standard_normal((NUM_ROWS, 32), np.float32)


class Stored:
    """A step with a store."""

    def __init__(self, path, policy, parts):
        self.store = small_stores.open_store(path, chunk_elements=4096)
        memory = {"memory_bytes": 27 << 20}
        if policy in ("keep", "recompute"):  # with little room to read ahead
            device_bytes = 2 << 20 if parts == 1 else 10 << 20  # values of parts leave
            memory = {"memory_bytes": 40 << 20, "device_memory_bytes": device_bytes}
        self.step = jaxinf.stream(
            loss_fn,
            TX,
            self.store,
            **memory,
            policy=policy,
            micro_batches=parts,
        )
        self.step.load(PARAMS, batch=batch_of(0))

    def run(self, number):
        return float(self.step(batch_of(number))[0])

    def finished(self, number):
        self.step.compile(batch_of(0))  # waits for a step that was given up
        self.store._engine.join()
        return self.store._engine.opened.finished.step

    def params(self):
        return self.store.params(like=PARAMS)


class InMemory:
    """A step without a store."""

    def __init__(self, path, policy, parts):
        memory_bytes = 64 << 20 if policy in ("keep", "recompute") else 17 << 20
        self.step = jaxinf.stream_in_memory(
            loss_fn,
            TX,
            memory_bytes=memory_bytes,
            policy=policy,
            micro_batches=parts,
            scratch=path.parent,
        )
        self.step.load(PARAMS)

    def run(self, number):
        return float(self.step(batch_of(number))[0])

    def finished(self, number):
        """Tells from the params whether an interrupted step counts."""
        same = [
            np.array_equal(one, two)
            for one, two in zip(
                jax.tree.leaves(self.step.params()), self.before, strict=True
            )
        ]
        return number if all(same) else number + 1

    @property
    def before(self):
        return self._before

    def remember(self):
        self._before = [np.array(x) for x in jax.tree.leaves(self.step.params())]

    def params(self):
        return self.step.params()


class Function(Stored):
    """A function of a store's params."""

    def __init__(self, path, policy, parts):
        super().__init__(path, policy, parts)
        self.call = self.step.function(loss_fn)

    def run(self, number):
        return float(self.call(batch_of(number)))

    def finished(self, number):
        return number


KINDS = {"store": Stored, "memory": InMemory, "function": Function}


def main(folder, policy, parts, what, every, again=""):
    global NUM_ROWS
    if policy == "offload":  # values are too large for its memory
        leaving.SMALL_BYTES, NUM_ROWS = 1, 8192
    seed = f"{policy} {parts} {what} {again}"
    chosen = random.Random(seed)
    interrupting = Interrupting()
    interrupting.install()
    kind, folder = KINDS[what], Path(folder)
    step = kind(folder / "store", policy, int(parts))
    expected = kind(folder / "expected", policy, int(parts))
    losses = []

    def expect(until):
        while len(losses) < until:
            losses.append(expected.run(len(losses)))

    number = 0
    for number in range(12):  # "plan" has measured by then
        expect(number + 1)
        assert step.run(number) == losses[number]
    number += 1
    for _ in range(3):
        interrupting.record(step.run, number)
        number += 1
    lines = list(interrupting.lines)
    leaves = any(line.startswith("streaming/move/scratch.py") for line in lines)
    assert leaves or policy != "offload" or what == "function"
    began_s, num_counted = time.monotonic(), 0
    for line in lines[chosen.randrange(int(every)) :: int(every)]:
        faulthandler.dump_traceback_later(HANGS_S, exit=True)
        left = chosen.choice([0, 1, 2, 3, 5, 8, 13, 40]) if again else None
        if what == "memory":
            step.remember()
        interrupting.interrupt(line, left, step.run, number)
        after = step.finished(number)
        assert after in (number, number + 1), (line, left, number, after)
        num_counted += after > number
        number = after
        expect(number + 1)
        try:
            found = step.run(number)
        except BaseException as error:
            error.add_note(f"after Ctrl-C at {line}, again after {left} lines")
            raise
        assert found == losses[number], (line, left, number, found, losses[number])
        number += 1
    faulthandler.cancel_dump_traceback_later()
    expect(number)
    for found, right in zip(
        jax.tree.leaves(step.params()), jax.tree.leaves(expected.params()), strict=True
    ):
        np.testing.assert_array_equal(found, right)
    seconds = time.monotonic() - began_s
    print(f"{seed}: {len(lines)} lines, {num_counted} counted, {seconds:.1f} s")
    step.step.close()
    expected.step.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
