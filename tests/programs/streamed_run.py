"""A streamed run of a few steps; in a process of its own, it is killed on the way.

    python streamed_run.py STORE NAME DURABILITY

It trains a program of the zoo, and is killed after an update of the last step.
"""

import builtins
import sys

import jax
import numpy as np
import optax
import small_stores
from inject import at_each_call, die
from zoo import ZOO

import jaxinf
from jaxinf.engine.step_runner import StepRunner

CHUNKS = {"chunk_elements": 4096, "memory_bytes": 16 << 20}
TX = optax.adam(1e-2)
NUM_STEPS = 4


def open_step(open_store, name, program, tx=TX, durability="step", **options):
    store = open_store(name, durability=durability, **CHUNKS)
    step = jaxinf.stream(program.loss, tx, store, memory_bytes=256 << 20, **options)
    step.load(program.params, batch=program.batch)
    return step


def batches(program):
    keys = [np.random.default_rng(i) for i in range(NUM_STEPS)]
    return [
        jax.tree.map(
            lambda x, rng=rng: (
                x if x.dtype.kind == "i" else x + rng.random(x.shape, x.dtype)
            ),
            program.batch,
        )
        for rng in keys
    ]


def train(step, program, until=NUM_STEPS):
    first = finished(step)
    return [float(step(batch)[0]) for batch in batches(program)[first:until]]


def finished(step):
    step.store._engine.steps.join()
    return step.store._engine.files.finished.step


def kill_in_the_last_step():
    """Kills this process after an update of the last step."""
    update = StepRunner.update

    def last(steps, step, *requests):
        if step == NUM_STEPS - 1:
            update(steps, step, requests[0])
            die()

    at_each_call(builtins, StepRunner, "update", last)


def main(path, name, durability):
    program = ZOO[name]()
    kill_in_the_last_step()
    step = open_step(
        lambda _, **options: small_stores.open_store(path, **options),
        name,
        program,
        durability=int(durability) if durability.isdigit() else durability,
    )
    train(step, program)


if __name__ == "__main__":
    main(*sys.argv[1:])
