"""Small programs in common styles, which streaming must accept unchanged.

Each is a function that returns a `Program`. Programs with repeated equal blocks take
their depth as an argument, so that tests can count the programs of deeper models.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxinf_models import abstract_params, gpt2
from jaxinf_models import loss as model_loss

WIDTH = 32
ROWS = 8


@dataclass(frozen=True)
class Program:
    """A loss function and its arguments."""

    loss: Callable[..., Any]
    params: Any
    batch: Any
    has_aux: bool = False


ZOO: dict[str, Callable[..., Program]] = {}


def program(make: Callable[..., Program]) -> Callable[..., Program]:
    ZOO[make.__name__] = make
    return make


def normal(seed: int, *shape: int, scale: float = 1.0) -> Any:
    numbers = np.random.default_rng(seed).standard_normal(shape)
    return (scale * numbers).astype(np.float32)


def dense(seed: int, *shape: int) -> Any:
    return normal(seed, *shape, scale=0.5 / np.sqrt(shape[-2]))


def filled(tree: Any) -> Any:
    """Fills abstract arrays; an init function would have to be compiled."""
    leaves, structure = jax.tree.flatten(tree)
    arrays = [
        dense(i, *leaf.shape) if leaf.ndim > 1 else 0.5 + normal(i, *leaf.shape) / 10
        for i, leaf in enumerate(leaves)
    ]
    return structure.unflatten(arrays)


def rows() -> dict[str, Any]:
    return {"x": normal(100, ROWS, WIDTH), "y": normal(101, ROWS, WIDTH)}


def mean_square(out: jax.Array, target: jax.Array) -> jax.Array:
    return jnp.mean((out - target) ** 2)


# GPT-2 in NNX: tied weights.


@program
def gpt2_nano(depth: int = 4) -> Program:
    config = gpt2.GPT2Config(64, 16, depth, num_heads=2, num_features=WIDTH)
    graphdef, shapes = abstract_params(config)
    params = filled(shapes)
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, (2, 17))

    def loss(params: Any, batch: Any) -> jax.Array:
        model = nnx.merge(graphdef, params)
        return model_loss(model, batch[:, :-1], batch[:, 1:])

    return Program(loss, params, tokens.astype(np.int32))


# Linen: plain, with dropout, with remat, scanned.


class Block(nn.Module):
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x: jax.Array, deterministic: bool) -> jax.Array:
        h = nn.LayerNorm()(x)
        h = nn.MultiHeadDotProductAttention(num_heads=2)(h[None])[0]
        h = nn.Dropout(self.dropout, deterministic=deterministic)(h)
        return x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(2 * WIDTH)(h)))


class Blocks(nn.Module):
    depth: int
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(self.depth):
            x = Block(self.dropout)(x, self.dropout == 0)
        return nn.Dense(WIDTH)(x)


class Scanned(nn.Module):
    depth: int
    dropout: float = 0.0
    remat: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        block = nn.remat(Block, static_argnums=(2,)) if self.remat else Block
        scan = nn.scan(
            lambda module, x, _: (module(x, self.dropout == 0), None),
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            length=self.depth,
        )
        x, _ = scan(block(self.dropout), x, None)
        return nn.Dense(WIDTH)(x)


def _linen(model: nn.Module) -> Program:
    batch = {**rows(), "key": jax.random.key(7)}
    keys = {"params": batch["key"], "dropout": batch["key"]}
    params = filled(jax.eval_shape(model.init, keys, batch["x"])["params"])

    def loss(params: Any, batch: Any) -> jax.Array:
        rngs = {"dropout": batch["key"]}
        out = model.apply({"params": params}, batch["x"], rngs=rngs)
        return mean_square(out, batch["y"])

    return Program(loss, params, batch)


@program
def linen(depth: int = 4) -> Program:
    return _linen(Blocks(depth))


@program
def linen_dropout(depth: int = 4) -> Program:
    return _linen(Blocks(depth, dropout=0.1))


@program
def linen_scan(depth: int = 4) -> Program:
    return _linen(Scanned(depth))


@program
def linen_scan_remat_dropout(depth: int = 4) -> Program:
    return _linen(Scanned(depth, dropout=0.1, remat=True))


# Equinox, Haiku.


@program
def equinox_mlp(depth: int = 4) -> Program:
    make = partial(eqx.nn.MLP, WIDTH, WIDTH, WIDTH, depth)
    model = eqx.filter_eval_shape(make, key=jax.random.key(0))
    shapes, static = eqx.partition(model, lambda leaf: hasattr(leaf, "shape"))
    params = filled(shapes)

    def loss(params: Any, batch: Any) -> jax.Array:
        return mean_square(
            jax.vmap(eqx.combine(params, static))(batch["x"]), batch["y"]
        )

    return Program(loss, params, rows())


@program
def equinox_cast_first(depth: int = 4) -> Program:
    """All params become bfloat16 before anything else happens."""
    given = equinox_mlp(depth)

    def loss(params: Any, batch: Any) -> jax.Array:
        half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
        return given.loss(half, batch).astype(jnp.float32)

    return replace(given, loss=loss)


@program
def haiku(depth: int = 4) -> Program:
    def forward(x: jax.Array) -> jax.Array:
        for _ in range(depth):
            h = hk.LayerNorm(-1, create_scale=True, create_offset=True)(x)
            x = x + hk.Linear(WIDTH)(jax.nn.silu(hk.Linear(2 * WIDTH)(h)))
        return x

    model = hk.without_apply_rng(hk.transform(forward))
    batch = rows()

    def loss(params: Any, batch: Any) -> jax.Array:
        return mean_square(model.apply(params, batch["x"]), batch["y"])

    shapes = jax.eval_shape(model.init, jax.random.key(0), batch["x"])
    return Program(loss, filled(shapes), batch)


# Convolutions with batch norm.


class Residual(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for stride, width in ((1, 8), (2, 16)):
            h = nn.Conv(width, (3, 3), strides=stride, use_bias=False)(x)
            h = nn.relu(nn.BatchNorm(use_running_average=False)(h))
            h = nn.Conv(width, (3, 3), use_bias=False)(h)
            short = nn.Conv(width, (1, 1), strides=stride, use_bias=False)(x)
            x = nn.relu(short + nn.BatchNorm(use_running_average=False)(h))
        return nn.Dense(10)(x.mean((1, 2)))


@program
def conv_batch_norm() -> Program:
    model = Residual()
    batch = {"x": normal(100, 4, 8, 8, 3), "y": jnp.arange(4)}
    shapes = jax.eval_shape(model.init, jax.random.key(0), batch["x"])
    variables = filled(shapes)

    def loss(params: Any, batch: Any) -> Any:
        out, new = model.apply(
            {"params": params, "batch_stats": batch["stats"]},
            batch["x"],
            mutable=["batch_stats"],
        )
        picked = jnp.take_along_axis(jax.nn.log_softmax(out), batch["y"][:, None], 1)
        return -picked.mean(), new["batch_stats"]

    batch = {**batch, "stats": variables["batch_stats"]}
    return Program(loss, variables["params"], batch, has_aux=True)


# Mixtures of experts.


def _experts(depth: int = 2, num_experts: int = 3) -> dict[str, Any]:
    return {
        f"layer{i}": {
            "router": dense(10 * i, WIDTH, num_experts),
            "experts": dense(10 * i + 1, num_experts, WIDTH, WIDTH),
        }
        for i in range(depth)
    }


@program
def moe_map() -> Program:
    """One expert after another, by lax.map."""

    def loss(params: Any, batch: Any) -> jax.Array:
        x = batch["x"]
        for layer in params.values():
            weights = jax.nn.softmax(x @ layer["router"])
            parts = lax.map(lambda w, x=x: jnp.tanh(x @ w), layer["experts"])
            x = x + jnp.einsum("re,ero->ro", weights, parts)
        return mean_square(x, batch["y"])

    return Program(loss, _experts(), rows())


@program
def moe_cond() -> Program:
    """The expert that the batch chooses, by lax.switch."""

    def loss(params: Any, batch: Any) -> jax.Array:
        x = batch["x"]
        for layer in params.values():
            chosen = jnp.argmax((x @ layer["router"]).sum(0))
            branches = [
                lambda x, w: jnp.tanh(x @ w[0]),
                lambda x, w: jnp.sin(x @ w[1]),
                lambda x, w: x @ w[2],
            ]
            x = x + lax.switch(chosen, branches, x, layer["experts"])
        return mean_square(x, batch["y"])

    return Program(loss, _experts(), rows())


# Plain JAX: scans of all sorts, tied and unused params, penalties, custom rules.


def _stack(depth: int) -> dict[str, jax.Array]:
    return {"w": dense(1, depth, WIDTH, WIDTH), "b": normal(2, depth, WIDTH) * 0.1}


@program
def scan_remat_reverse(depth: int = 4) -> Program:
    def layer(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
        return x + jnp.tanh(x @ p["w"] + p["b"]), None

    def loss(params: Any, batch: Any) -> jax.Array:
        x, _ = lax.scan(jax.checkpoint(layer), batch["x"], params, reverse=True)
        return mean_square(x, batch["y"])

    return Program(loss, _stack(depth), rows())


@program
def scan_nested() -> Program:
    def inner(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = jnp.tanh(x @ w)
        return x, x.mean()

    def loss(params: Any, batch: Any) -> Any:
        x, means = lax.scan(lambda x, w: lax.scan(inner, x, w), batch["x"], params)
        return mean_square(x, batch["y"]), means

    return Program(loss, dense(1, 3, 2, WIDTH, WIDTH), rows(), has_aux=True)


@program
def scan_twice_cast(depth: int = 3) -> Program:
    """A stack that is cast, scanned twice, and read by index besides."""

    def loss(params: Any, batch: Any) -> jax.Array:
        half = params.astype(jnp.bfloat16)
        x = batch["x"].astype(jnp.bfloat16)

        def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return x + jnp.tanh(x @ w), None

        x, _ = lax.scan(layer, x, half)
        x, _ = lax.scan(layer, x, half)
        x = x.astype(jnp.float32) @ params[1]
        return mean_square(x, batch["y"])

    return Program(loss, dense(1, depth, WIDTH, WIDTH), rows())


@program
def stack_by_index(depth: int = 4) -> Program:
    def loss(params: Any, batch: Any) -> jax.Array:
        x = batch["x"]
        for i in range(depth):
            x = x + jnp.tanh(x @ params["w"][i] + params["b"][i])
        return mean_square(x, batch["y"])

    return Program(loss, _stack(depth), rows())


@program
def fori_loop() -> Program:
    """A stack indexed by a loop's counter; it is fetched whole."""

    def loss(params: Any, batch: Any) -> jax.Array:
        def body(i: jax.Array, x: jax.Array) -> jax.Array:
            return x + jnp.tanh(x @ params["w"][i] + params["b"][i])

        return mean_square(lax.fori_loop(0, 3, body, batch["x"]), batch["y"])

    return Program(loss, _stack(3), rows())


@program
def recurrent() -> Program:
    """A scan over time, whose params are the same in every step."""

    def loss(params: Any, batch: Any) -> jax.Array:
        def step(h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            h = jnp.tanh(x @ params["in"] + h @ params["own"])
            return h, h @ params["out"]

        _, out = lax.scan(step, jnp.zeros(WIDTH), batch["x"])
        return mean_square(out, batch["y"])

    names = ("in", "own", "out")
    params = {name: dense(i, WIDTH, WIDTH) for i, name in enumerate(names)}
    return Program(loss, params, rows())


def _mlp(depth: int) -> list[dict[str, jax.Array]]:
    return [
        {"w": dense(2 * i, WIDTH, WIDTH), "b": normal(2 * i + 1, WIDTH) * 0.1}
        for i in range(depth)
    ]


def _mlp_out(params: Any, x: jax.Array) -> jax.Array:
    for layer in params:
        x = x + jnp.tanh(x @ layer["w"] + layer["b"])
    return x


@program
def l2_penalty(depth: int = 6) -> Program:
    def loss(params: Any, batch: Any) -> jax.Array:
        penalty = sum(jnp.sum(p**2) for p in jax.tree.leaves(params))
        return mean_square(_mlp_out(params, batch["x"]), batch["y"]) + 1e-3 * penalty

    return Program(loss, _mlp(depth), rows())


@program
def tied_and_unused(depth: int = 4) -> Program:
    """A table read at both ends, a leaf that nothing reads, one without axes."""

    def loss(params: Any, batch: Any) -> jax.Array:
        x = _mlp_out(params["layers"], params["table"][batch])
        logits = params["scale"] * x @ params["table"].T
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), batch[:, None], 1)
        return -picked.mean()

    params = {
        "layers": _mlp(depth),
        "table": dense(50, 24, WIDTH),
        "unused": jnp.ones(5),
        "scale": jnp.float32(1.5),
    }
    return Program(loss, params, jnp.arange(ROWS) * 3)


@jax.custom_vjp
def _clipped(x: jax.Array) -> jax.Array:
    return x


_clipped.defvjp(lambda x: (x, None), lambda _, ct: (jnp.clip(ct, -1e-3, 1e-3),))


@program
def custom_rules(depth: int = 4) -> Program:
    """A custom gradient, a jit of the user's own, and a rule for the forward mode."""

    @jax.jit
    def block(x: jax.Array, layer: Any) -> jax.Array:
        return _clipped(x + jax.nn.relu(x @ layer["w"] + layer["b"]))

    def loss(params: Any, batch: Any) -> jax.Array:
        x = batch["x"]
        for layer in params:
            x = block(x, layer)
        return mean_square(x, batch["y"])

    return Program(loss, _mlp(depth), rows())


@program
def micro_batches() -> Program:
    """A scan over parts of the batch, with the params as constants."""

    def loss(params: Any, batch: Any) -> jax.Array:
        def part(total: jax.Array, xy: Any) -> tuple[jax.Array, None]:
            x, y = xy
            return total + mean_square(_mlp_out(params, x), y), None

        parts = jax.tree.map(lambda a: a.reshape(2, ROWS // 2, WIDTH), batch)
        total, _ = lax.scan(part, jnp.float32(0), (parts["x"], parts["y"]))
        return total / 2

    return Program(loss, _mlp(3), rows())


@program
def half_precision_loss(depth: int = 3) -> Program:
    """Params, activations and the loss itself in bfloat16."""

    def loss(params: Any, batch: Any) -> jax.Array:
        return mean_square(_mlp_out(params, batch["x"]), batch["y"])

    half = partial(jax.tree.map, lambda x: x.astype(jnp.bfloat16))
    return Program(loss, half(_mlp(depth)), half(rows()))


ONLY_PLANNED = {"gpt2_nano", "linen", "linen_scan_remat_dropout", "fori_loop"}
ONLY_PLANNED |= {"equinox_cast_first", "conv_batch_norm", "moe_cond", "scan_twice_cast"}
"""Half of the others: `make test-long` plans them, and has the rest offload."""
