"""The estimate of a program's memory against what XLA's CPU compiler reports."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from families import family
from flax import nnx
from jaxinf_models import MODELS, abstract_params, config_for, task_loss
from streaming import smallest_bytes
from zoo import ZOO

from jaxinf.streaming.plan.compiled import Estimates, compiled_bytes
from jaxinf.streaming.plan.fit import prepare
from jaxinf.streaming.program.peak import peak_memory

pytestmark = pytest.mark.optimized

# The same memory, compiled in a fraction of the time.
QUICK = {"xla_backend_optimization_level": 0}


def reported(function, *args, donated=()):
    """Returns what XLA reports for a program."""
    lowered = jax.jit(function, donate_argnums=donated).lower(*args)
    return lowered.compile(QUICK).memory_analysis()


def assert_near(function, *args):
    """Compares the estimate: within 15 % of the report, at most 5 % below it."""
    found = peak_memory(jax.make_jaxpr(function)(*args))
    report = reported(function, *args)
    expected = (
        report.argument_size_in_bytes
        + report.output_size_in_bytes
        + report.temp_size_in_bytes
    )
    assert 0.95 * expected <= found.total <= 1.15 * expected, (found, report)


SHORT = ("custom_rules", "fori_loop", "scan_remat_reverse", "u_net", "vmapped_heads")


@pytest.mark.parametrize("name", family(ZOO, short=SHORT))
def test_whole_programs_of_the_zoo(name):
    program = ZOO[name]()
    step = jax.value_and_grad(program.loss, has_aux=program.has_aux)
    assert_near(step, program.params, program.batch)


def integers(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def floats(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def batch_of(config, task, rows, seq):
    tokens, half = integers(rows, seq), integers(rows, seq // 2)
    if task == "seq2seq":
        weights = floats(rows, seq // 2)
        return {
            "tokens": tokens,
            "decoder_tokens": half,
            "targets": half,
            "weights": weights,
        }
    if task == "classification":
        size = getattr(config, "image_size", None)
        images = {"images": floats(rows, size, size, 3)} if size else {"tokens": tokens}
        return {"labels": integers(rows), **images}
    weights = {"weights": floats(rows, seq)} if task == "masked-lm" else {}
    return {"tokens": tokens, "targets": tokens, **weights}


def assert_step_near(config, task, rows, seq):
    config = config_for(config, task)
    graphdef, params = abstract_params(config)

    def loss(params, batch):
        return task_loss(nnx.merge(graphdef, params), task, batch)

    assert_near(jax.value_and_grad(loss), params, batch_of(config, task, rows, seq))


MEMBERS = [
    (name, task, rows, seq)
    for name, one in MODELS.items()
    for task in one.tasks
    for rows, seq in ((2, 32), (8, 128))
]


@pytest.mark.long
@pytest.mark.parametrize(("name", "task", "rows", "seq"), MEMBERS)
def test_steps_of_small_models(name, task, rows, seq):
    assert_step_near(MODELS[name].presets["nano"], task, rows, seq)


@pytest.mark.long
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_steps_in_16_bits(name):
    config = dataclasses.replace(MODELS[name].presets["nano"], dtype="bfloat16")
    assert_step_near(config, "causal-lm", 8, 128)


PRESETS = {"gpt2": "small", "llama": "tinyllama-1.1b", "bert": "base"}
PRESETS |= {"t5": "small", "vit": "base"}
SIZES = {"num_layers": 3, "num_features": 384, "num_heads": 6}
OWN_SIZES = {"t5": {"num_layers": 2, "num_decoder_layers": 2}}
OWN_SIZES["llama"] = {"num_layers": 3, "num_features": 512, "num_heads": 8}
OWN_SIZES["llama"] |= {"num_kv_heads": 2, "num_hidden": 1408}


@pytest.mark.long
@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize(("rows", "seq"), [(4, 256), (1, 512)])
def test_steps_of_larger_models(name, rows, seq):
    sizes = OWN_SIZES.get(name, SIZES)
    config = dataclasses.replace(MODELS[name].presets[PRESETS[name]], **sizes)
    assert_step_near(config, MODELS[name].tasks[0], rows, seq)


@pytest.mark.long
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_a_streamed_step_of_small_models(name):
    """The peak of all calls, each of which is another program."""
    family, task = MODELS[name], MODELS[name].tasks[0]
    config = config_for(family.presets["nano"], task)
    graphdef, params = abstract_params(config)

    def loss(params, batch):
        return task_loss(nnx.merge(graphdef, params), task, batch)

    ready = prepare(loss, params, batch_of(config, task, 8, 128))
    plan = ready.plan(smallest_bytes(ready) * 3 // 2)
    expected = compiled_bytes(plan, {})
    assert 0.95 * expected < compiled_bytes(plan, Estimates()) < 1.15 * expected


SQUARE = jax.ShapeDtypeStruct((64, 64), jnp.float32)
SQUARE_BYTES = 64 * 64 * 4


def test_elementwise_operations_take_no_memory():
    found = peak_memory(jax.make_jaxpr(lambda x: jnp.tanh(x * 2) + 1)(SQUARE))
    assert found == (SQUARE_BYTES, SQUARE_BYTES, 0, 0)
    assert found.total == 2 * SQUARE_BYTES


def test_products_wait_in_memory_while_they_are_needed():
    def chain(x):
        return x @ x @ x @ x @ x

    found = peak_memory(jax.make_jaxpr(chain)(SQUARE))
    assert found.temporaries == reported(chain, SQUARE).temp_size_in_bytes
    assert found.temporaries == 2 * SQUARE_BYTES  # the last but one, and its operand


def test_a_donated_argument_is_a_result_of_its_shape():
    def step(x, y):
        return x + 1, jnp.sum(y)

    jaxpr = jax.make_jaxpr(step)(SQUARE, SQUARE)
    found = peak_memory(jaxpr, donated=[0, 1])
    assert found.aliases == SQUARE_BYTES
    report = reported(step, SQUARE, SQUARE, donated=(0,))
    assert report.alias_size_in_bytes == SQUARE_BYTES
    assert found.total == peak_memory(jaxpr).total - SQUARE_BYTES
