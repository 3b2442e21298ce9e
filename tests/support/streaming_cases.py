"""Runs a plan of a program of the zoo, without a store."""

import contextlib
import errno
import gc
import os
import sys
import time

import jax
import numpy as np
import optax
import pytest
from inject import at_each_call
from zoo import ZOO

from jaxinf.store import StoreDirectory
from jaxinf.streaming.move.params import ParamReader
from jaxinf.streaming.move.spill import beyond_memory
from jaxinf.streaming.move.work_queues import WorkQueues
from jaxinf.streaming.plan.order import make_plan
from jaxinf.streaming.plan.reads import ReadPlan
from jaxinf.streaming.program.cut import cuts_of, segment_limits
from jaxinf.streaming.program.lifetimes import order_program
from jaxinf.streaming.program.units import ParamUnit, units_of
from jaxinf.streaming.run import Runner
from jaxinf.streaming.update import update_plan

SGD, SMALL = optax.sgd(0.1), ZOO["l2_penalty"](depth=2)
CHUNKS = {"chunk_elements": 4096, "memory_bytes": 16 << 20}
"""Options of a store of small chunks."""


def prepared(program):
    return order_program(
        program.loss, program.params, program.batch, has_aux=program.has_aux
    )


def smallest_bytes(ready, policy="recompute", num_parts=1):
    """Returns the smallest budget that `cut_to_fit` accepts by estimates."""
    cuts = {cuts_of(ready, limit) for limit in segment_limits(ready)}
    return min(make_plan(ready, one, policy, num_parts).peak_bytes for one in cuts)


def in_memory(leaves):
    """Returns what gives a run params that are these."""
    return lambda number, piece: piece.of(leaves[piece.leaf])


def bytes_held():
    """Returns the memory of each params source that has some for reading."""
    sources = (one for one in gc.get_objects() if isinstance(one, ParamReader))
    pools = [source.buffers for source in sources]
    return [n for pool in pools if (n := pool.used_bytes + pool._idle_bytes)]


def read_ahead(fetches, room_bytes, host_bytes=None, read_leaves=None, jobs=None):
    """Returns the params source of whole leaves, filled with their numbers.

    It notes in `read_leaves` what was read.
    """

    @contextlib.contextmanager
    def reads(num_first):
        def read(unit, shards):
            shards[0][...] = unit.leaf
            if read_leaves is not None:
                read_leaves.append(unit.leaf)

        yield read

    units = sorted({fetch.unit for fetch in fetches}, key=lambda unit: unit.leaf)
    leaves = [
        jax.ShapeDtypeStruct(unit.shape, unit.dtype, sharding=unit.sharding)
        for unit in units
    ]
    return ParamReader(
        units_of(leaves, lambda *_: True),
        reads,
        ReadPlan(tuple(fetches), room_bytes, host_bytes),
        jobs or WorkQueues(),
    )


def streamed(program, plan, executables, spill=None, values=None):
    """Computes the same by a plan's programs; each gradient piece comes only once.

    With a spill, gradients go through it; with `values`, values between calls.
    """
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(program.params)]
    gradients = [np.full(leaf.shape, np.nan, leaf.dtype) for leaf in leaves]
    seen = []

    def hand_out(piece, gradient):
        seen.append(piece)
        if spill is not None:
            spill.put(piece, gradient)
            ((_, gradient),) = spill.read(removes=True)
        gradients[piece.leaf][piece.index] = np.asarray(gradient)

    loss, aux = Runner(plan, executables, values=values)(
        program.batch, in_memory(leaves), hand_out
    )
    assert len(seen) == len(set(seen))
    return loss, aux, gradients


def run(step, program, num_steps):
    return [float(step(program.batch)[0]) for _ in range(num_steps)]


def by_optax(program, tx, batches):
    """Losses and params by optax in memory: gradients, update and sum a jit each."""
    vg = jax.jit(jax.value_and_grad(program.loss, has_aux=program.has_aux))
    update, add = jax.jit(tx.update), jax.jit(optax.apply_updates)
    params, losses = program.params, []
    state = jax.jit(tx.init)(params)
    for batch in batches:
        value, gradients = vg(params, batch)
        updates, state = update(gradients, state, params)
        params = add(params, updates)
        losses.append(float(value[0] if program.has_aux else value))
    return losses, params


def states(store):
    """All that the committed step of a store holds, by names of state and leaf."""
    return {
        (state.name, leaf.name): store.read(state.name, leaf.name)
        for leaf in StoreDirectory.open(store.path).manifest.leaves
        for state in leaf.states
        if not state.is_companion
    }


def spill_beyond(monkeypatch, num_bytes):
    """Lets gradients that wait have so much memory, and beyond it the drive."""

    def own(sizes, *_):
        return beyond_memory(sizes, num_bytes)

    monkeypatch.setattr(update_plan, "beyond_memory", own)


@contextlib.contextmanager
def no_room_for_gradients():
    """Has the drive refuse what is written to files without names."""

    def full(fd, *_):
        if "(deleted)" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        at_each_call(patch, os, "pwritev", full)
        yield


def numbers(tree):
    """Returns the leaves as NumPy arrays; random keys as their data."""
    leaves = jax.tree.leaves(tree)
    is_key = [jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) for x in leaves]
    return [
        np.asarray(jax.random.key_data(x) if key else x)
        for x, key in zip(leaves, is_key, strict=True)
    ]


def assert_same_bits(found, expected):
    for one, other in zip(numbers(found), numbers(expected), strict=True):
        assert one.tobytes() == other.tobytes()


def assert_near(found, expected, atol):
    for one, other in zip(numbers(found), numbers(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=atol)


def until_it_waits(thread):
    """Returns once a thread stands still in a wait for another one."""
    place, count, until_s = None, 0, time.monotonic() + 60
    while count < 10:
        assert time.monotonic() < until_s, "it does not wait"
        time.sleep(0.005)
        frame = sys._current_frames()[thread.ident]
        waits = frame.f_code.co_name == "wait"
        before, place = place, (id(frame), frame.f_lasti) if waits else None
        count = count + 1 if waits and place == before else 0


def unit(leaf):
    return ParamUnit(leaf, (), (1024,), np.dtype(np.float32))


def planned_bytes(step):
    """Returns the bytes that the steps of the last batch's shape move on drives."""
    return step._last._updates.traffic(step.plan)


def moved_as_planned(step, *names):
    """Waits for a step's store, whose drives moved what was planned; returns that."""
    step.store.wait()
    moved, planned = step.store.metrics.traffic, planned_bytes(step)
    for name in names or ("drive_read_bytes", "drive_write_bytes"):
        assert getattr(moved, name) == getattr(planned, name), (moved, planned)
    return planned


def assert_same_states(found, expected):
    """Compares what `states` returns, to the bit."""
    assert found.keys() == expected.keys()
    for key, array in expected.items():
        one, other = np.asarray(found[key]), np.asarray(array)
        assert (one.dtype, one.tobytes()) == (other.dtype, other.tobytes()), key


def trained(step, program, num_steps=3):
    """Loads a program's params and runs steps, whose drives move what is planned.

    Returns their losses, and all states.
    """
    step.load(program.params, batch=program.batch)
    losses = run(step, program, num_steps)
    moved_as_planned(step)
    return losses, states(step.store)
