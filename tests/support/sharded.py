"""Programs on a mesh of four CPU devices, in each way in which JAX is told of it.

Import it in a process whose `XLA_FLAGS` make that many devices.
"""

import contextlib
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

ROWS, WIDTH, DEPTH = 8, 32, 3
SPECS = {
    "first": P(None, "model"),
    "up": P(None, None, "model"),
    "down": P(None, "model", None),
    "shift": P(None, "model"),
    "out": P("data", "model"),
}
BATCH = {"x": P("data"), "y": P("data")}


@dataclass(frozen=True)
class OnMesh:
    mesh: Any
    loss: Any
    plain_loss: Any
    params: Any
    batch: Any
    on_host: tuple[Any, Any]
    sets_mesh: bool = False

    def entered(self):
        return jax.set_mesh(self.mesh) if self.sets_mesh else contextlib.nullcontext()


def _numbers(depth):
    draw = np.random.default_rng(0).standard_normal

    def normal(*shape):
        return (draw(shape) / np.sqrt(shape[-2])).astype(np.float32)

    params = {
        "first": normal(WIDTH, WIDTH),
        "up": normal(depth, WIDTH, 4 * WIDTH),
        "down": normal(depth, 4 * WIDTH, WIDTH),
        "shift": 0.1 * normal(depth, WIDTH),
        "out": normal(WIDTH, WIDTH),
    }
    return params, {"x": normal(ROWS, WIDTH), "y": normal(ROWS, WIDTH)}


def _loss(params, batch, constrained, block):
    x = constrained(batch["x"] @ params["first"])

    def layer(x, own):
        return constrained(block(x, *own)), None

    x, _ = lax.scan(layer, x, (params["up"], params["down"], params["shift"]))
    return jnp.mean((x @ params["out"] - batch["y"]) ** 2)


def _dense(x, up, down, shift):
    return x + jax.nn.gelu(x @ up) @ down + shift


def _shard(x, up, down, shift):
    return x + lax.psum(jax.nn.gelu(x @ up) @ down, "model") + shift


def _typed(x, up, down, shift):
    hidden = jax.nn.gelu(jnp.matmul(x, up, out_sharding=P("data", "model")))
    shift = jax.sharding.reshard(shift, P(None))
    return x + jnp.matmul(hidden, down, out_sharding=P("data", None)) + shift


def _typed_loss(params, batch):
    x = jnp.matmul(batch["x"], params["first"], out_sharding=P("data", None))

    def layer(x, own):
        return _typed(x, *own), None

    x, _ = lax.scan(layer, x, (params["up"], params["down"], params["shift"]))
    out = jax.sharding.reshard(params["out"], P(None, "model"))
    found = jnp.matmul(x, out, out_sharding=P("data", None))
    return jnp.mean((found - batch["y"]) ** 2)


def _same(x):
    return x


def make(kind, depth=DEPTH):
    """Makes a program that is told of the mesh by "named", "specs", …: see `losses`."""
    axis = AxisType.Explicit if kind == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(axis, axis))
    losses = {
        "named": partial(
            _loss,
            constrained=lambda x: lax.with_sharding_constraint(
                x, NamedSharding(mesh, P("data"))
            ),
            block=_dense,
        ),
        "specs": partial(
            _loss,
            constrained=lambda x: lax.with_sharding_constraint(x, P("data")),
            block=_dense,
        ),
        "shard_map": partial(
            _loss,
            constrained=_same,
            block=jax.shard_map(
                _shard,
                mesh=mesh,
                in_specs=(P("data"), P(None, "model"), P("model"), P()),
                out_specs=P("data"),
            ),
        ),
        "explicit": _typed_loss,
    }
    params, batch = _numbers(depth)

    def put(array, spec):
        return jax.device_put(array, NamedSharding(mesh, spec))

    return OnMesh(
        mesh,
        losses[kind],
        partial(_loss, constrained=_same, block=_dense),
        {name: put(array, SPECS[name]) for name, array in params.items()},
        {name: put(array, BATCH[name]) for name, array in batch.items()},
        (params, batch),
        sets_mesh=kind in ("specs", "explicit"),
    )


def trained(step, one, num_steps):
    with one.entered():
        return [float(step(one.batch)[0]) for _ in range(num_steps)]
