"""Streamed steps are planned and compiled for CUDA and TPU as they would be there.

A step is that of `jaxinf.stream`, up to the first array on the device: its programs,
its passes over gradients, the selection of elements, the division of the memory.
"""

import dataclasses

import hlo_order
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from ahead_of_time import Target, compiling_for
from flax import nnx
from jaxinf_models import MODELS, abstract_params
from jaxinf_models.losses import task_loss
from streaming_cases import smallest_bytes
from zoo import ZOO, Program

import jaxinf
from jaxinf.kernels.compiled import standard_kernels
from jaxinf.program import aval_bytes
from jaxinf.streaming.in_memory import MemoryHome
from jaxinf.streaming.plan import memory
from jaxinf.streaming.plan.compiled import Executables, compile_plan, measure_memory
from jaxinf.streaming.plan.cut_to_fit import cut_to_fit
from jaxinf.streaming.plan.offload import least_peak_bytes
from jaxinf.streaming.plan.options import Options
from jaxinf.streaming.program.lifetimes import order_program
from jaxinf.streaming.update.device_updates import DeviceUpdater

every = pytest.mark.every
DEVICES = ["h100", "v5e"]
OTHERS = [pytest.param(name, marks=every) for name in ("a100", "rtx4090")]
ADAMW = optax.adamw(1e-3)
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), ADAMW)


def of_shape(*shape, dtype=jnp.int32):
    return jax.ShapeDtypeStruct(shape, dtype)


TOKENS, WEIGHTS = of_shape(4, 128), of_shape(4, 128, dtype=jnp.float32)
TEXT = {"tokens": TOKENS, "targets": TOKENS}
BATCHES = {
    "gpt2": TEXT,
    "bert": {**TEXT, "weights": WEIGHTS},
    "t5": {**TEXT, "decoder_tokens": TOKENS},
    "vit": {
        "images": of_shape(4, 32, 32, 3, dtype=jnp.float32),
        "labels": of_shape(4),
    },
}
PROGRAMS = ["gpt2", "conv_batch_norm", "moe_map"]
PROGRAMS += [pytest.param(name, marks=every) for name in ("bert", "t5", "vit")]


def program_of(name):
    """A program of the zoo, or two layers of a model, of nano's width."""
    if name in ZOO:
        return ZOO[name]()
    family = MODELS[name]
    config = dataclasses.replace(family.presets["nano"], num_layers=2)
    if name == "t5":
        config = dataclasses.replace(config, num_decoder_layers=2)
    graphdef, params = abstract_params(config)

    def loss(params, batch):
        return task_loss(nnx.merge(graphdef, params), family.tasks[0], batch)

    return Program(loss, params, BATCHES[name])


def shapes_of(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def traced(program):
    return order_program(
        program.loss, program.params, program.batch, has_aux=program.has_aux
    )


@pytest.fixture
def plan_step(place, monkeypatch):
    def make(name, device, tx=CLIPPED, share=4, **options):
        program, target = program_of(name), Target(device)
        monkeypatch.setattr(memory, "default_device", lambda: target.devices[0])
        step = jaxinf.stream(
            program.loss,
            tx,
            place / "store",
            memory_bytes="256MiB",
            device_memory_bytes=int(share * smallest_bytes(traced(program))),
            has_aux=program.has_aux,
            **options,
        )
        with step:
            params = shapes_of(program.params)
            step.load(jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), params))
            with compiling_for(target) as built, jax.default_device(target.devices[0]):
                ready = step._trace(program.batch, params)
                backend = step._home.make_backend(ready)
                fitted = step._plan_step(backend, step._budget(ready))
        return fitted, built

    return make


def check_built(built, device):
    """Values that a program may overwrite are overwritten; the host does not wait."""
    for one in built:
        num_arrays, num_bytes = one.donated
        assert one.num_aliased == num_arrays
        if device != "v5e":  # a TPU pads arrays to tiles
            assert one.memory.alias_size_in_bytes == num_bytes
        assert not one.callbacks
        assert not one.float_atomics


def taken_bytes(memory):
    """What XLA has in memory while a program runs."""
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes
    return held - memory.alias_size_in_bytes + memory.temp_size_in_bytes


def given_bytes(step):
    return sum(map(aval_bytes, (*step.batch, *step.consts)))


@pytest.mark.parametrize("device", DEVICES + OTHERS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_streamed_step(plan_step, name, device):
    """Its passes come first, then its programs, which fit in what is planned."""
    # A TPU pads the zoo's short arrays to many times their size.
    share = 64 if name in ZOO and device == "v5e" else 4
    if name == "gpt2":  # in several programs
        share = 2.5
    fitted, built = plan_step(name, device, share=share)
    limit_bytes = share * smallest_bytes(traced(program_of(name)))
    check_built(built, device)
    assert name != "gpt2" or any(one.donated[0] for one in built)
    calls = len(fitted.programs)
    assert len(built) > calls, "there are passes over the gradients"
    planned_bytes = fitted.peak_bytes + given_bytes(fitted.traced)
    assert planned_bytes <= limit_bytes
    for one in built[-calls:]:
        assert taken_bytes(one.memory) <= planned_bytes
        assert hlo_order.synchronising(one.entry) == []


def test_bits_may_differ_between_runs_without_determinism(plan_step):
    _, built = plan_step("gpt2", "h100", share=2.5, deterministic=False)
    assert sum(bool(one.float_atomics) for one in built) == 2  # logits, embedding


@pytest.mark.parametrize("device", DEVICES)
def test_compressed_gradients(plan_step, device):
    _, built = plan_step("moe_map", device, ADAMW, 32, compress=jaxinf.top_k(0.1))
    check_built(built, device)


@pytest.mark.parametrize("device", DEVICES)
def test_an_update_in_memory(device):
    """State and params take the memory of the old ones, and updates of gradients."""
    target = Target(device)
    params = shapes_of(program_of("gpt2").params)
    state = jax.eval_shape(CLIPPED.init, params)
    with compiling_for(target) as built, jax.default_device(target.devices[0]):
        home = MemoryHome(CLIPPED, Options(1 << 30), ".")
        home.update.lower(params, state, params).compile()
        home.add.lower(params, params).compile()
    check_built(built, device)
    num_leaves = len(jax.tree.leaves(params))
    assert [one.donated[0] for one in built] == [3 * num_leaves + 1, num_leaves]


@pytest.mark.parametrize("device", DEVICES + OTHERS)
def test_updates_on_the_device(device):
    """State takes the memory of the old one, and params that are not split."""
    target = Target(device)
    jit = Options(1 << 30).jit
    own = DeviceUpdater(jax.devices()[0], jit)
    kernel = standard_kernels()["adamw"]
    wide = of_shape(1 << 20, dtype=jnp.float32)
    halves = tuple(of_shape(1 << 20, dtype=d) for d in (jnp.bfloat16, jnp.int16))
    scalars = [of_shape(dtype=dtype) for dtype in kernel.scalar_dtypes]
    with compiling_for(target) as built, jax.default_device(target.devices[0]):
        for params, add in (((wide,), own.add), (halves, own.add_split)):
            own.widen.lower(wide, params).compile()
            add.lower(wide, wide).compile()
        own.compute.lower(kernel, wide, wide, [wide, wide], scalars).compile()
    check_built(built, device)
    assert [one.donated[0] for one in built][:5] == [0, 1, 0, 0, 2]
    room = 2 * 12 + 16  # bytes a param, as `needs_of_assignment`
    assert all(taken_bytes(one.memory) <= room << 20 for one in built)


@pytest.mark.parametrize("device", DEVICES)
def test_a_function(device):
    program, target = program_of("gpt2"), Target(device)
    ready = order_program(program.loss, program.params, program.batch, has_loss=False)
    with compiling_for(target) as built, jax.default_device(target.devices[0]):
        plan = cut_to_fit(ready, 3 * smallest_bytes(ready) // 2)
        executables = Executables()
        compile_plan(plan, executables)
        peak_bytes = least_peak_bytes(measure_memory(plan, executables))
    check_built(built, device)
    planned_bytes = peak_bytes + given_bytes(ready.traced)
    assert max(taken_bytes(one.memory) for one in built) <= planned_bytes
