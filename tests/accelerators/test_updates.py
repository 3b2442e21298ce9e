"""Steps of `smart_update` compile for CUDA and TPU, and start their updates early.

A step is the user's: loss, gradients and updates in one jit, with params and state
donated.
"""

import dataclasses

import callback_form
import hlo_order
import jax
import jax.numpy as jnp
import optax
import pytest
from ahead_of_time import Target, compiled
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jaxinf_models import abstract_params, gpt2
from jaxinf_models import loss as model_loss

import jaxinf

pytestmark = pytest.mark.optimized

every = pytest.mark.every
NANO = dataclasses.replace(gpt2.PRESETS["nano"], num_layers=2)
WIDE = dataclasses.replace(NANO, num_features=512)  # a call for each kernel

ADAMW = optax.adamw(1e-3)
VARIANTS = {
    "adamw": (ADAMW, {}),
    "clipped": (optax.chain(optax.clip_by_global_norm(1.0), ADAMW), {}),
    "schedule": (optax.adamw(optax.cosine_decay_schedule(1e-3, 100)), {}),
    "top_k": (ADAMW, {"compress": jaxinf.top_k(0.02)}),
    "multi_steps": (optax.MultiSteps(ADAMW, 4), {}),
    "skip": (ADAMW, {"nonfinite": "skip"}),
    "sgd": (optax.sgd(1e-2), {}),
    "lion": (optax.lion(1e-4), {}),
    "adagrad": (optax.adagrad(1e-2), {}),
}
DEVICES = ["h100", "v5e"]
OTHERS = [pytest.param(name, marks=every) for name in ("a100", "rtx4090")]


def loss_of(graphdef):
    def loss(params, batch):
        return model_loss(nnx.merge(graphdef, params), batch[:, :-1], batch[:, 1:])

    return loss


def step_of(tx, loss):
    def step(params, state, batch):
        value, gradients = jax.value_and_grad(loss)(params, batch)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


@pytest.fixture
def build(tmp_path, monkeypatch):
    def make(variant, device, config=NANO, dtype=jnp.float32):
        callback_form.use("start", monkeypatch)
        graphdef, shapes = abstract_params(config)
        params = jax.tree.map(lambda x: jnp.zeros(x.shape, dtype), shapes)
        inner, options = VARIANTS[variant]
        tx = jaxinf.smart_update(inner, tmp_path / "store", **options)
        state = tx.init(params)
        batch = jax.ShapeDtypeStruct((4, 129), jnp.int32)
        step = step_of(tx, loss_of(graphdef))
        try:
            built = compiled(Target(device), step, params, state, batch, donate=(0, 1))
        finally:
            jaxinf.close(tmp_path / "store")
        return built

    return make


def check_donated(built, target):
    """Every donated byte is a result's; on a TPU arrays are padded to tiles."""
    num_arrays, num_bytes = built.donated
    assert built.num_aliased == num_arrays > 0
    if target != "v5e":
        assert built.memory.alias_size_in_bytes == num_bytes


@pytest.mark.parametrize("device", DEVICES + OTHERS)
def test_a_step_takes_its_params_memory(build, device):
    built = build("adamw", device)
    check_donated(built, device)
    if device != "v5e":
        # The comparison of the first step's params with the store's; and the calls.
        assert hlo_order.synchronising(built.entry) == ["conditional jit(step)/cond"]
        assert len(built.callbacks) == 6


@every
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "adamw"])
def test_every_variant_compiles(build, variant, device):
    check_donated(build(variant, device), device)


@every
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_params(build, device, dtype):
    check_donated(build("adamw", device, dtype=dtype), device)


def test_updates_start_before_products_that_do_not_need_them(build):
    """Of each kernel; leaves that are short share a call, which waits for the last.

    A callback waits for the stream twice.
    """
    built = build("adamw", "h100", config=WIDE)
    check_donated(built, "h100")
    entry, needed = built.entry, hlo_order.all_operands(built.entry)
    products = hlo_order.numbers(entry, r"%gemm_fusion\S* = |__cublas|cutlass")
    found = hlo_order.numbers(entry, r" = s32\[1\]\S* custom-call.*_gpu_callback")
    _, *starts, _ = found  # the others begin and end the step
    assert len(starts) == 4 * WIDE.num_layers
    for start in starts:
        others = [number for number in products if number not in needed[start]]
        assert start < others[-1]
    assert 2 * len(hlo_order.numbers(entry, "_gpu_callback")) == 40
    assert hlo_order.synchronising(entry) == ["conditional jit(step)/cond"]


MESHES = [
    (("h100", 4), {"data": 2, "model": 2}),
    (("v5e", 4), {"data": 2, "model": 2}),
]


@pytest.mark.parametrize(("target", "axes"), MESHES)
def test_a_mesh_of_two_by_two(place, monkeypatch, target, axes):
    """Of a leaf with one axis, one with two, and one that is replicated."""
    callback_form.use("start", monkeypatch)
    target = Target(*target)
    mesh = target.mesh(**axes)
    shapes = {"kernel": (512, 512), "bias": (512,), "shift": (512,), "scale": ()}
    specs = {"kernel": ("data", "model"), "bias": ("model",), "shift": (), "scale": ()}

    def loss(params, batch):
        out = batch @ params["kernel"] + params["bias"]
        return jnp.mean((out * params["scale"] + params["shift"]) ** 2)

    shardings = {k: NamedSharding(mesh, PartitionSpec(*v)) for k, v in specs.items()}
    params = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=shardings[name])
        for name, shape in shapes.items()
    }
    tx = jaxinf.smart_update(ADAMW, place / "store", shardings=shardings)
    state = jax.eval_shape(tx.init, params)
    rows = NamedSharding(mesh, PartitionSpec("data"))
    batch = jax.ShapeDtypeStruct((8, 512), jnp.float32, sharding=rows)
    try:
        built = compiled(target, step_of(tx, loss), params, state, batch, donate=(0, 1))
    finally:
        jaxinf.close(place / "store")
    assert built.num_aliased >= len(shapes)
