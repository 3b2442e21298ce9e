"""A policy of two towers with shared attention, in the sizes of public robot policies.

    images ─ vision tower ─┐
    text ─── table ────────┴─ wide tower ──┐ attention over both
    noisy actions ─────────── narrow tower ┘
    loss: the actions' flow, and the text's next tokens by the same table

Invariant: layers of a tower have equal shapes, so they share programs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["CONFIGS", "Config", "init", "loss_fn", "new_batch", "num_params"]

_MAX_PERIOD = 10_000.0


@dataclass(frozen=True)
class Config:
    """Sizes of a model; those of 3.2 billion params by default.

    Attributes:
      vocab_size: Rows of the table.
      width, mlp: Of the wide tower.
      action_width, action_mlp: Of the narrow tower.
      depth: Layers of both.
      num_heads, head_dim: Of their attention, with one head of keys and values.
      vision_width, vision_mlp, vision_depth, vision_heads: Of the vision tower.
      num_images, num_patches, patch_dim: Images, their patches, and numbers of a patch.
      num_tokens: Tokens of text.
      num_actions, action_dim: Actions, and numbers of an action.
    """

    vocab_size: int = 257_152
    width: int = 2048
    mlp: int = 16_384
    action_width: int = 1024
    action_mlp: int = 4096
    depth: int = 18
    num_heads: int = 8
    head_dim: int = 256
    vision_width: int = 1152
    vision_mlp: int = 4304
    vision_depth: int = 27
    vision_heads: int = 16
    num_images: int = 3
    num_patches: int = 256
    patch_dim: int = 588
    num_tokens: int = 48
    num_actions: int = 50
    action_dim: int = 32


_SMALL = Config(
    vocab_size=16_384,
    width=128,
    mlp=512,
    action_width=64,
    action_mlp=256,
    depth=2,
    num_heads=2,
    head_dim=64,
    vision_width=64,
    vision_mlp=128,
    vision_depth=1,
    vision_heads=2,
    num_patches=16,
    patch_dim=48,
    num_tokens=12,
    num_actions=8,
)
CONFIGS = {"full": Config(), "small": _SMALL}


def init(config: Config, key: jax.Array) -> dict[str, Any]:
    """Returns random params in bfloat16.

    Keys differ in the number that they are folded with alone, so leaves of one shape
    are made by one program.
    """
    count = iter(range(1 << 20))

    def matrix(*shape: int) -> jax.Array:
        own = jax.random.fold_in(key, next(count))
        scale = 1 / math.sqrt(shape[0])
        return (scale * jax.random.normal(own, shape)).astype(jnp.bfloat16)

    def spread(value: float, *shape: int) -> jax.Array:
        return jnp.full(shape, value, jnp.bfloat16)

    def tower(width: int, mlp: int) -> dict[str, jax.Array]:
        return {
            "norm": spread(1, width),
            "q": matrix(width, config.num_heads * config.head_dim),
            "kv": matrix(width, 2 * config.head_dim),
            "out": matrix(config.num_heads * config.head_dim, width),
            "mlp_norm": spread(1, width),
            "gate": matrix(width, mlp),
            "up": matrix(width, mlp),
            "down": matrix(mlp, width),
        }

    def vision() -> dict[str, jax.Array]:
        width, mlp = config.vision_width, config.vision_mlp
        return {
            "norm": spread(1, width),
            "qkv": matrix(width, 3 * width),
            "out": matrix(width, width),
            "mlp_norm": spread(1, width),
            "up": matrix(width, mlp),
            "up_bias": spread(0, mlp),
            "down": matrix(mlp, width),
        }

    width, action_width = config.width, config.action_width
    return {
        "table": matrix(config.vocab_size, width),
        "patches": matrix(config.patch_dim, config.vision_width),
        "positions": matrix(config.num_patches, config.vision_width),
        "vision": [vision() for _ in range(config.vision_depth)],
        "vision_norm": spread(1, config.vision_width),
        "vision_out": matrix(config.vision_width, width),
        "wide": [tower(width, config.mlp) for _ in range(config.depth)],
        "narrow": [tower(action_width, config.action_mlp) for _ in range(config.depth)],
        "norm": spread(1, width),
        "actions_in": matrix(config.action_dim, action_width),
        "time": matrix(action_width, action_width),
        "actions_norm": spread(1, action_width),
        "actions_out": matrix(action_width, config.action_dim),
    }


def num_params(config: Config) -> int:
    """Counts params."""
    leaves = jax.tree.leaves(jax.eval_shape(lambda key: init(config, key), _key()))
    return sum(math.prod(leaf.shape) for leaf in leaves)


def new_batch(config: Config, seed: int = 0) -> dict[str, np.ndarray]:
    """Returns a batch of one example: random images, text, actions, noise and time."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32)

    actions = config.num_actions, config.action_dim
    return {
        "images": normal(1, config.num_images, config.num_patches, config.patch_dim),
        "tokens": rng.integers(config.vocab_size, size=(1, config.num_tokens)).astype(
            np.int32
        ),
        "actions": normal(1, *actions),
        "noise": normal(1, *actions),
        "time": rng.random(1, dtype=np.float32),
    }


def loss_fn(config: Config, params: Any, batch: Any) -> jax.Array:
    """The mean square error of the actions' flow, and the text's cross entropy."""
    seen = _see(config, params, batch["images"])
    table = params["table"]
    read = table[batch["tokens"]] * math.sqrt(config.width)
    wide = jnp.concatenate([seen, read.astype(seen.dtype)], axis=1)
    time = batch["time"][:, None, None]
    noisy = time * batch["noise"] + (1 - time) * batch["actions"]
    narrow = noisy.astype(wide.dtype) @ params["actions_in"]
    when = _waves(batch["time"], config.action_width).astype(wide.dtype)
    narrow = narrow + jax.nn.silu(when @ params["time"])[:, None]
    mask = _mask(config)
    for own in zip(params["wide"], params["narrow"], strict=True):
        wide, narrow = _layer(config, own, (wide, narrow), mask)
    narrow = _normed(narrow, params["actions_norm"]) @ params["actions_out"]
    flow = jnp.mean((narrow - (batch["noise"] - batch["actions"])) ** 2)
    text = _normed(wide[:, -config.num_tokens : -1], params["norm"])
    logits = _product(text, table.T).astype(jnp.float32)
    scores = jax.nn.log_softmax(logits)
    found = jnp.take_along_axis(scores, batch["tokens"][:, 1:, None], axis=-1)
    return flow - jnp.mean(found)


def _see(config: Config, params: Any, images: jax.Array) -> jax.Array:
    """Returns images as tokens of the wide tower, [batch, images x patches, width]."""
    x = images.astype(params["patches"].dtype) @ params["patches"] + params["positions"]
    x = x.reshape(-1, *x.shape[2:])
    for own in params["vision"]:
        qkv = _product(_normed(x, own["norm"]), own["qkv"])
        q, k, v = (
            part.reshape(*part.shape[:-1], config.vision_heads, -1)
            for part in jnp.split(qkv, 3, axis=-1)
        )
        x = x + _product(_attend(q, k, v, None), own["out"])
        hidden = _product(_normed(x, own["mlp_norm"]), own["up"]) + own["up_bias"]
        x = x + _product(jax.nn.gelu(hidden), own["down"])
    x = _product(_normed(x, params["vision_norm"]), params["vision_out"])
    return x.reshape(images.shape[0], -1, config.width)


def _layer(
    config: Config, towers: Any, both: tuple[jax.Array, jax.Array], mask: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One layer of both towers; attention is over the tokens of both."""
    heads = config.num_heads, config.head_dim
    parts = []
    for own, x in zip(towers, both, strict=True):
        normed = _normed(x, own["norm"])
        q = _product(normed, own["q"]).reshape(*x.shape[:2], *heads)
        k, v = jnp.split(_product(normed, own["kv"])[:, :, None], 2, axis=-1)
        parts.append((q, k, v))
    q, k, v = (jnp.concatenate(part, axis=1) for part in zip(*parts, strict=True))
    found = _attend(_turned(q), _turned(k), v, mask)
    place, made = both[0].shape[1], []
    split = found[:, :place], found[:, place:]
    for own, x, own_found in zip(towers, both, split, strict=True):
        x = x + _product(own_found, own["out"])
        normed = _normed(x, own["mlp_norm"])
        gate, up = (_product(normed, own[name]) for name in ("gate", "up"))
        made.append(x + _product(jax.nn.gelu(gate) * up, own["down"]))
    return made[0], made[1]


def _attend(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None
) -> jax.Array:
    """Attention, [batch, queries, heads x head_dim]; one head of keys serves all."""
    k, v = (jnp.broadcast_to(x, (*x.shape[:2], q.shape[2], x.shape[3])) for x in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32)
    scores = scores / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = jnp.where(mask, scores, -1e9)
    weights = jax.nn.softmax(scores).astype(v.dtype)
    found = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
    return found.reshape(*found.shape[:2], -1)


def _mask(config: Config) -> jax.Array:
    """Images see images, text the text before it as well, actions everything."""
    num_seen = config.num_images * config.num_patches
    order = np.concatenate(
        [
            np.zeros(num_seen, np.int32),
            np.arange(1, config.num_tokens + 1, dtype=np.int32),
            np.full(config.num_actions, config.num_tokens + 1, np.int32),
        ]
    )
    return jnp.asarray(order[:, None] >= order)


@jax.custom_vjp
def _product(x: jax.Array, matrix: jax.Array) -> jax.Array:
    """``x @ matrix``, with sums in float32.

    Said so, no operand is converted as a whole first, as a CPU would do.
    """
    return _dot(x, matrix, [x.ndim - 1], [0])


def _dot(
    x: jax.Array, y: jax.Array, x_axes: Sequence[int], y_axes: Sequence[int]
) -> jax.Array:
    axes = ((x_axes, y_axes), ((), ()))
    found = jax.lax.dot_general(x, y, axes, preferred_element_type=jnp.float32)
    return found.astype(x.dtype)


def _product_forward(x: jax.Array, matrix: jax.Array) -> tuple[jax.Array, Any]:
    return _product(x, matrix), (x, matrix)


def _product_backward(kept: Any, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, matrix = kept
    rows = range(x.ndim - 1)
    of_x = _dot(gradient, matrix, [x.ndim - 1], [1])
    return of_x, _dot(x, gradient, rows, rows)


_product.defvjp(_product_forward, _product_backward)


def _normed(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Root mean square norm, computed in float32."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-6)
    return (wide * scale).astype(x.dtype)


def _turned(x: jax.Array) -> jax.Array:
    """Rotary embedding of positions, [batch, seq, heads, head_dim]."""
    positions = jnp.arange(x.shape[1], dtype=jnp.float32)
    waves = _angles(positions, x.shape[-1])[None, :, None]
    sin, cos = jnp.sin(waves), jnp.cos(waves)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=-1
    )
    return turned.astype(x.dtype)


def _waves(time: jax.Array, width: int) -> jax.Array:
    angles = _angles(1000 * time, width)
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


def _angles(positions: jax.Array, width: int) -> jax.Array:
    powers = jnp.arange(width // 2, dtype=jnp.float32) / (width // 2)
    return positions[:, None] * _MAX_PERIOD**-powers


def _key() -> Any:
    return jax.eval_shape(lambda: jax.random.key(0))
