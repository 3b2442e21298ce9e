"""A streamed run of a few steps; in a process of its own, it is killed on the way.

    python streamed_run.py STORE NAME DURABILITY

It trains a program of the zoo, and is killed after an update of the last step.
"""

import sys
from typing import Any

import jax
import numpy as np
import optax
import small_stores
from inject import die
from zoo import ZOO

import jaxinf
from jaxinf.engine.opened import OpenStore

CHUNKS: dict[str, Any] = {"chunk_elements": 4096, "memory_bytes": 16 << 20}
TX = optax.adam(1e-2)
NUM_STEPS = 4


def open_step(open_store, name, program, tx=TX, durability="step", **options):
    """Opens a step on a store of small chunks."""
    store = open_store(name, durability=durability, **CHUNKS)
    step = jaxinf.stream(program.loss, tx, store, memory_bytes=256 << 20, **options)
    step.load(program.params, batch=program.batch)
    return step


def batches(program):
    """A batch for each step; all differ."""
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
    """Runs steps from the last finished one on; returns their losses."""
    first = finished(step)
    return [float(step(batch)[0]) for batch in batches(program)[first:until]]


def finished(step):
    """The last finished step, committed or not."""
    step.store._engine.join()
    return step.store._engine.opened.finished.step


def kill_in_the_last_step():
    """Kills this process after an update of the last step."""
    update = OpenStore.update

    def updating(self, step, *requests):
        finite = []
        for request in requests:
            finite += update(self, step, request)
            if step == NUM_STEPS - 1:
                die()
        return finite

    OpenStore.update = updating


def main(path, name, durability):
    """Trains until it is killed."""
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
