"""Small programs in common styles, which streaming must accept unchanged.

Each is a function that returns a `Program`. Programs with repeated equal blocks take
their depth as an argument, so that tests can count the programs of deeper models.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
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


def program(make):
    ZOO[make.__name__] = make
    return make


def normal(seed, *shape, scale=1.0):
    numbers = np.random.default_rng(seed).standard_normal(shape)
    return (scale * numbers).astype(np.float32)


def dense(seed, *shape):
    return normal(seed, *shape, scale=0.5 / np.sqrt(shape[-2]))


def filled(tree):
    """Fills abstract arrays; an init function would have to be compiled."""
    leaves, structure = jax.tree.flatten(tree)
    arrays = [
        dense(i, *leaf.shape) if leaf.ndim > 1 else 0.5 + normal(i, *leaf.shape) / 10
        for i, leaf in enumerate(leaves)
    ]
    return structure.unflatten(arrays)


def rows():
    return {"x": normal(100, ROWS, WIDTH), "y": normal(101, ROWS, WIDTH)}


def mean_square(out, target):
    return jnp.mean((out - target) ** 2)


# GPT-2 in NNX: tied weights.


@program
def gpt2_nano(depth=4):
    config = gpt2.GPT2Config(64, 16, depth, num_heads=2, num_features=WIDTH)
    graphdef, shapes = abstract_params(config)
    params = filled(shapes)
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, (2, 17))

    def loss(params, batch):
        model = nnx.merge(graphdef, params)
        return model_loss(model, batch[:, :-1], batch[:, 1:])

    return Program(loss, params, tokens.astype(np.int32))


# Linen: plain, scanned, with remat and dropout.


class Block(nn.Module):
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x, deterministic):
        h = nn.LayerNorm()(x)
        h = nn.MultiHeadDotProductAttention(num_heads=2)(h[None])[0]
        h = nn.Dropout(self.dropout, deterministic=deterministic)(h)
        return x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(2 * WIDTH)(h)))


class Blocks(nn.Module):
    depth: int

    @nn.compact
    def __call__(self, x):
        for _ in range(self.depth):
            x = Block()(x, True)
        return nn.Dense(WIDTH)(x)


class Scanned(nn.Module):
    depth: int
    dropout: float = 0.0
    remat: bool = False

    @nn.compact
    def __call__(self, x):
        block = nn.remat(Block, static_argnums=(2,)) if self.remat else Block
        scan = nn.scan(
            lambda module, x, _: (module(x, self.dropout == 0), None),
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            length=self.depth,
        )
        x, _ = scan(block(self.dropout), x, None)
        return nn.Dense(WIDTH)(x)


def _linen(model):
    batch = {**rows(), "key": jax.random.key(7)}
    keys = {"params": batch["key"], "dropout": batch["key"]}
    params = filled(jax.eval_shape(model.init, keys, batch["x"])["params"])

    def loss(params, batch):
        rngs = {"dropout": batch["key"]}
        out = model.apply({"params": params}, batch["x"], rngs=rngs)
        return mean_square(out, batch["y"])

    return Program(loss, params, batch)


@program
def linen(depth=4):
    return _linen(Blocks(depth))


@program
def linen_scan(depth=4):
    return _linen(Scanned(depth))


@program
def linen_scan_remat_dropout(depth=4):
    return _linen(Scanned(depth, dropout=0.1, remat=True))


# Convolutions with batch norm.


class Residual(nn.Module):
    @nn.compact
    def __call__(self, x):
        for stride, width in ((1, 8), (2, 16)):
            h = nn.Conv(width, (3, 3), strides=stride, use_bias=False)(x)
            h = nn.relu(nn.BatchNorm(use_running_average=False)(h))
            h = nn.Conv(width, (3, 3), use_bias=False)(h)
            short = nn.Conv(width, (1, 1), strides=stride, use_bias=False)(x)
            x = nn.relu(short + nn.BatchNorm(use_running_average=False)(h))
        return nn.Dense(10)(x.mean((1, 2)))


@program
def conv_batch_norm():
    model = Residual()
    batch = {"x": normal(100, 4, 8, 8, 3), "y": jnp.arange(4)}
    shapes = jax.eval_shape(model.init, jax.random.key(0), batch["x"])
    variables = filled(shapes)

    def loss(params, batch):
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


def of_rows(out, params):
    """A program that compares rows of outputs with their targets."""

    def loss(params, batch):
        return mean_square(out(params, batch["x"]), batch["y"])

    return Program(loss, params, rows())


def _experts(depth=2, num_experts=3):
    return {
        f"layer{i}": {
            "router": dense(10 * i, WIDTH, num_experts),
            "experts": dense(10 * i + 1, num_experts, WIDTH, WIDTH),
        }
        for i in range(depth)
    }


@program
def moe_map():
    """One expert after another, by lax.map."""

    def out(params, x):
        for layer in params.values():
            weights = jax.nn.softmax(x @ layer["router"])
            parts = lax.map(lambda w, x=x: jnp.tanh(x @ w), layer["experts"])
            x = x + jnp.einsum("re,ero->ro", weights, parts)
        return x

    return of_rows(out, _experts())


@program
def moe_cond():
    """The expert that the batch chooses, by lax.switch."""
    functions = jnp.tanh, jnp.sin, jnp.cos
    branches = [lambda x, w, i=i, f=f: f(x @ w[i]) for i, f in enumerate(functions)]

    def out(params, x):
        for layer in params.values():
            chosen = jnp.argmax((x @ layer["router"]).sum(0))
            x = x + lax.switch(chosen, branches, x, layer["experts"])
        return x

    return of_rows(out, _experts())


# Plain JAX: scans of all sorts, tied and unused params, penalties, custom rules.


def _stack(depth):
    return {"w": dense(1, depth, WIDTH, WIDTH), "b": normal(2, depth, WIDTH) * 0.1}


def _added(x, p):
    return x + jnp.tanh(x @ p["w"] + p["b"])


@program
def scan_remat_reverse(depth=4):
    layer = jax.checkpoint(lambda x, p: (_added(x, p), None))

    def out(params, x):
        return lax.scan(layer, x, params, reverse=True)[0]

    return of_rows(out, _stack(depth))


@program
def scan_nested():
    def inner(x, w):
        x = jnp.tanh(x @ w)
        return x, x.mean()

    def loss(params, batch):
        x, means = lax.scan(lambda x, w: lax.scan(inner, x, w), batch["x"], params)
        return mean_square(x, batch["y"]), means

    return Program(loss, dense(1, 3, 2, WIDTH, WIDTH), rows(), has_aux=True)


@program
def scan_twice_cast(depth=3):
    """A stack that is cast, scanned twice, and read by index besides."""

    def layer(x, w):
        return x + jnp.tanh(x @ w), None

    def out(params, x):
        half, x = params.astype(jnp.bfloat16), x.astype(jnp.bfloat16)
        for _ in range(2):
            x, _ = lax.scan(layer, x, half)
        return x.astype(jnp.float32) @ params[1]

    return of_rows(out, dense(1, depth, WIDTH, WIDTH))


@program
def stack_by_index(depth=4):
    def out(params, x):
        for i in range(depth):
            x = x + jnp.tanh(x @ params["w"][i] + params["b"][i])
        return x

    return of_rows(out, _stack(depth))


@program
def fori_loop():
    """A stack indexed by a loop's counter; it is fetched whole."""

    def out(params, x):
        def body(i, x):
            return x + jnp.tanh(x @ params["w"][i] + params["b"][i])

        return lax.fori_loop(0, 3, body, x)

    return of_rows(out, _stack(3))


@program
def recurrent():
    """A scan over time, whose params are the same in every step."""

    def out(params, x):
        def step(h, x):
            h = jnp.tanh(x @ params["in"] + h @ params["own"])
            return h, h @ params["out"]

        return lax.scan(step, jnp.zeros(WIDTH), x)[1]

    names = ("in", "own", "out")
    return of_rows(out, {name: dense(i, WIDTH, WIDTH) for i, name in enumerate(names)})


def _mlp(depth):
    return [
        {"w": dense(2 * i, WIDTH, WIDTH), "b": normal(2 * i + 1, WIDTH) * 0.1}
        for i in range(depth)
    ]


def _mlp_out(params, x):
    for layer in params:
        x = _added(x, layer)
    return x


@program
def l2_penalty(depth=6):
    def loss(params, batch):
        penalty = sum(jnp.sum(p**2) for p in jax.tree.leaves(params))
        return mean_square(_mlp_out(params, batch["x"]), batch["y"]) + 1e-3 * penalty

    return Program(loss, _mlp(depth), rows())


halved = functools.partial(jax.tree.map, lambda x: x.astype(jnp.bfloat16))


@program
def cast_first(depth=4):
    """All params become bfloat16 before anything else happens."""
    return of_rows(lambda params, x: _mlp_out(halved(params), x), _mlp(depth))


@program
def half_precision_loss(depth=3):
    """Params, activations and the loss itself in bfloat16."""
    return Program(of_rows(_mlp_out, ()).loss, halved(_mlp(depth)), halved(rows()))


@program
def tied_and_unused(depth=4):
    """A table read at both ends, a leaf that nothing reads, one without axes."""

    def loss(params, batch):
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
def _clipped(x):
    return x


_clipped.defvjp(lambda x: (x, None), lambda _, ct: (jnp.clip(ct, -1e-3, 1e-3),))


@program
def custom_rules(depth=4):
    """A custom gradient, a jit of the user's own, and a rule for the forward mode."""

    @jax.jit
    def block(x, layer):
        return _clipped(x + jax.nn.relu(x @ layer["w"] + layer["b"]))

    return of_rows(lambda params, x: functools.reduce(block, params, x), _mlp(depth))


ONLY_PLANNED = {"gpt2_nano", "linen", "linen_scan_remat_dropout", "fori_loop"}
ONLY_PLANNED |= {"cast_first", "conv_batch_norm", "moe_cond", "scan_twice_cast"}
"""Half of the others: `make test-long` plans them, and has the rest offload."""
