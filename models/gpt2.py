"""GPT-2 in Flax NNX: the published architecture, small enough to read in one sitting.

Invariant: this module knows nothing of jaxinf. A `GPT2` holds only `nnx.Param`s, with
string keys all the way down (`h0/attn/qkv/kernel`), so that `split` gives a plain
nested dict that any optimizer or store can take.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx

__all__ = [
    "GPT2",
    "PRESETS",
    "DTypeName",
    "GPT2Config",
    "abstract_params",
    "loss",
    "num_params",
    "split",
]

DTypeName: TypeAlias = Literal["float32", "bfloat16"]
Params: TypeAlias = dict[str, Any]

INIT_STDDEV = 0.02
LAYER_NORM_EPSILON = 1e-5
MAX_LOGITS_BYTES = 256 << 20  # fp32 logits that `loss` holds at once


@dataclasses.dataclass(frozen=True)
class GPT2Config:
    """Shape and precision of a GPT-2; hashable, so it can be a static jit argument.

    Raises:
        ValueError: a size is below one, the heads do not divide the features, or a
            dtype is not one of those named here.
    """

    vocab_size: int
    num_positions: int  # the longest sequence
    num_layers: int
    num_heads: int
    num_features: int
    dtype: DTypeName = "float32"  # of activations and matrix products
    param_dtype: DTypeName = "float32"

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is int and value < 1:
                raise ValueError(
                    f"GPT2Config.{field.name}: expected at least 1, got {value}"
                )
            if field.type is DTypeName and value not in ("float32", "bfloat16"):
                raise ValueError(
                    f"GPT2Config.{field.name}: expected 'float32' or 'bfloat16', "
                    f"got {value!r}"
                )
        if self.num_features % self.num_heads:
            raise ValueError(
                f"GPT2Config: num_heads={self.num_heads} must divide "
                f"num_features={self.num_features}"
            )


PRESETS: Mapping[str, GPT2Config] = {
    # Bytes, not tokens: learns source code in a minute or two on two CPU cores.
    "nano": GPT2Config(256, 256, num_layers=4, num_heads=4, num_features=128),
    # The four published sizes (Radford et al. 2019, table 2).
    "small": GPT2Config(50257, 1024, num_layers=12, num_heads=12, num_features=768),
    "medium": GPT2Config(50257, 1024, num_layers=24, num_heads=16, num_features=1024),
    "large": GPT2Config(50257, 1024, num_layers=36, num_heads=20, num_features=1280),
    "xl": GPT2Config(50257, 1024, num_layers=48, num_heads=25, num_features=1600),
}


def num_params(config: GPT2Config) -> int:
    """Number of parameters, by arithmetic; the tied output head counts once."""
    f = config.num_features
    norms = 4 * f
    attention = (3 * f * f + 3 * f) + (f * f + f)
    mlp = (4 * f * f + 4 * f) + (4 * f * f + f)
    embeddings = (config.vocab_size + config.num_positions) * f
    return embeddings + config.num_layers * (norms + attention + mlp) + 2 * f


def _linear(
    config: GPT2Config,
    num_in: int,
    num_out: int,
    *,
    rngs: nnx.Rngs,
    stddev: float = INIT_STDDEV,
) -> nnx.Linear:
    return nnx.Linear(
        num_in,
        num_out,
        kernel_init=nnx.initializers.normal(stddev),
        dtype=jnp.dtype(config.dtype),
        param_dtype=jnp.dtype(config.param_dtype),
        rngs=rngs,
    )


def _projection(config: GPT2Config, num_in: int, *, rngs: nnx.Rngs) -> nnx.Linear:
    """Linear back onto the skip path: 2 per layer add up, hence the smaller init."""
    stddev = INIT_STDDEV / math.sqrt(2 * config.num_layers)
    return _linear(config, num_in, config.num_features, rngs=rngs, stddev=stddev)


def _layer_norm(config: GPT2Config, *, rngs: nnx.Rngs) -> nnx.LayerNorm:
    return nnx.LayerNorm(
        config.num_features,
        epsilon=LAYER_NORM_EPSILON,
        use_fast_variance=False,  # E[x^2] - E[x]^2 would cancel
        dtype=jnp.dtype(config.dtype),
        param_dtype=jnp.dtype(config.param_dtype),
        rngs=rngs,
    )


class Attention(nnx.Module):
    """Causal multi-head self-attention."""

    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs):
        self.num_heads = config.num_heads
        self.qkv = _linear(
            config, config.num_features, 3 * config.num_features, rngs=rngs
        )
        self.proj = _projection(config, config.num_features, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map [batch, seq, features] to the same shape and dtype."""
        batch, seq, features = x.shape
        qkv = self.qkv(x).reshape(
            batch, seq, 3, self.num_heads, features // self.num_heads
        )
        q, k, v = (qkv[:, :, i] for i in range(3))
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)  # fp32 softmax
        return self.proj(mixed.reshape(batch, seq, features))


class MLP(nnx.Module):
    """Two linear layers around a tanh-approximated GELU ("gelu_new")."""

    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs):
        hidden = 4 * config.num_features
        self.up = _linear(config, config.num_features, hidden, rngs=rngs)
        self.down = _projection(config, hidden, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map [batch, seq, features] to the same shape and dtype."""
        return self.down(jax.nn.gelu(self.up(x), approximate=True))


class Block(nnx.Module):
    """One pre-norm transformer layer; all blocks of a model have the same structure."""

    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs):
        self.ln_1 = _layer_norm(config, rngs=rngs)
        self.attn = Attention(config, rngs=rngs)
        self.ln_2 = _layer_norm(config, rngs=rngs)
        self.mlp = MLP(config, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map [batch, seq, features] to the same shape and dtype."""
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT2(nnx.Module):
    """GPT-2 language model with the token embedding as its output head.

    The whole is `head(ln_f(block(... block(embed(tokens)))))`; each stage can be called
    on its own, for instance by a trainer that streams layers.
    """

    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs):
        self.config = config
        init = nnx.initializers.normal(INIT_STDDEV)
        dtype, f = jnp.dtype(config.param_dtype), config.num_features
        self.wte = nnx.Param(init(rngs.params(), (config.vocab_size, f), dtype))
        self.wpe = nnx.Param(init(rngs.params(), (config.num_positions, f), dtype))
        for i in range(
            config.num_layers
        ):  # h0, h1, ...: string keys, not a list's ints
            setattr(self, f"h{i}", Block(config, rngs=rngs))
        self.ln_f = _layer_norm(config, rngs=rngs)

    @property
    def blocks(self) -> list[Block]:
        """The layers in order."""
        return [getattr(self, f"h{i}") for i in range(self.config.num_layers)]

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Token plus position embeddings: int [batch, seq] to [batch, seq, features].

        Raises:
            ValueError: `seq` is above the config's `num_positions`.
        """
        seq = tokens.shape[-1]
        if seq > self.config.num_positions:
            raise ValueError(
                f"GPT2.embed: expected at most num_positions="
                f"{self.config.num_positions} tokens a sequence, got {seq}"
            )
        # Looked up before the cast, so that gradients add up in the param dtype.
        x = jnp.take(self.wte[...], tokens, axis=0).astype(self.config.dtype)
        return x + self.wpe[...][:seq].astype(self.config.dtype)

    def hidden(self, tokens: jax.Array) -> jax.Array:
        """Last layer's normed output, [batch, seq, features] in the compute dtype."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.ln_f(x)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Next-token logits: int [batch, seq] to float32 [batch, seq, vocab]."""
        return self.head(self.hidden(tokens))

    def head(self, x: jax.Array) -> jax.Array:
        """Logits of `hidden`'s output: [..., features] to float32 [..., vocab]."""
        return _logits(x, self.wte[...])


def _logits(x: jax.Array, table: jax.Array) -> jax.Array:
    return jnp.einsum(
        "...f,vf->...v", x, table.astype(x.dtype), preferred_element_type=jnp.float32
    )


def split(model: GPT2) -> tuple[nnx.GraphDef[GPT2], Params]:
    """Split into a static, hashable graphdef and params as a plain nested dict.

    `nnx.merge(graphdef, params)` is the way back, also inside jit and grad::

        graphdef, params = split(GPT2(config, rngs=nnx.Rngs(0)))
        grads = jax.grad(lambda p: loss(nnx.merge(graphdef, p), x, y))(params)
    """
    graphdef, state = nnx.split(model)
    return graphdef, nnx.to_pure_dict(state)


def abstract_params(config: GPT2Config) -> tuple[nnx.GraphDef[GPT2], Params]:
    """Like `split`, but of `jax.ShapeDtypeStruct`s: no memory, whatever the size."""
    return split(nnx.eval_shape(lambda: GPT2(config, rngs=nnx.Rngs(0))))


def loss(model: GPT2, tokens: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean cross entropy of the next token, in nats, as a float32 scalar.

    Where the logits would be large (vocabulary 50257), they are computed for a slice of
    the sequence at a time and again in the backward pass, never kept whole.

    Args:
        model: the language model.
        tokens: int [batch, seq].
        targets: int [batch, seq], the token after each of `tokens`.
    """
    x = model.hidden(tokens)
    # fp32, so that the gradients of the slices add up in fp32.
    table = model.wte[...].astype(jnp.float32)
    num_logits = tokens.size * model.config.vocab_size
    num_slices = _num_slices(tokens.shape[1], num_logits * 4)
    if num_slices == 1:
        return _sum_cross_entropy(x, targets, table) / targets.size

    def sliced(a: jax.Array) -> jax.Array:
        return jnp.stack(jnp.split(a, num_slices, axis=1))

    @jax.checkpoint
    def add(total: jax.Array, part: tuple[jax.Array, jax.Array]):
        return total + _sum_cross_entropy(*part, table), None

    total, _ = jax.lax.scan(add, jnp.float32(0), (sliced(x), sliced(targets)))
    return total / targets.size


def _num_slices(seq: int, logits_bytes: int) -> int:
    """Fewest equal slices of the sequence whose logits fit in MAX_LOGITS_BYTES."""
    fewest = max(1, math.ceil(logits_bytes / MAX_LOGITS_BYTES))
    return next((n for n in range(fewest, seq) if seq % n == 0), seq)


def _sum_cross_entropy(x: jax.Array, targets: jax.Array, table: jax.Array) -> jax.Array:
    logits = _logits(x, table)
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jnp.sum(jax.nn.logsumexp(logits, axis=-1) - picked)
