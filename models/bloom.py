"""BLOOM (Scao et al. 2022): positions by ALiBi, a norm of the embeddings.

ALiBi (Press et al. 2021): a query's score for a key falls linearly with the distance,
in each head with another slope. There are no position embeddings, and sequences have no
maximum length.

Invariant: `qkv` holds a head's query, key and value features side by side, as the
published weights do.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from .layers import (
    INIT_STDDEV,
    Key,
    ModelConfig,
    Past,
    Remat,
    attention_mask,
    dropout,
    embedding,
    join_heads,
    layer_norm,
    linear,
    look_up,
    output_logits,
    run_blocks,
    split_heads,
    split_key,
)

__all__ = ["PRESETS", "Bloom", "BloomConfig"]


@dataclasses.dataclass(frozen=True)
class BloomConfig(ModelConfig):
    """Shape and precision of a BLOOM."""

    vocab_size: int
    num_layers: int
    num_heads: int
    num_features: int
    norm_epsilon: float = 1e-5

    def __post_init__(self):
        super().__post_init__()
        self.check_divides("num_heads", "num_features")


# Vocabulary, layers, heads, features.
PRESETS: Mapping[str, BloomConfig] = {
    "nano": BloomConfig(256, 4, 4, 128),
    "560m": BloomConfig(250880, 24, 16, 1024),
    "1b1": BloomConfig(250880, 24, 16, 1536),
    "1b7": BloomConfig(250880, 24, 16, 2048),
    "3b": BloomConfig(250880, 30, 32, 2560),
    "7b1": BloomConfig(250880, 30, 32, 4096),
    "176b": BloomConfig(250880, 70, 112, 14336),
}


def alibi_slopes(num_heads: int) -> list[float]:
    """Returns each head's slope: a geometric series from below 1 to 2^-8.

    If the number of heads is not a power of two, the series is that of the next lower
    power. The other heads take every second slope of the series for twice that power.
    """
    whole = 1 << (num_heads.bit_length() - 1)
    slopes = [2 ** (-8 * n / whole) for n in range(1, whole + 1)]
    between = [2 ** (-4 * n / whole) for n in range(1, 2 * whole, 2)]
    return slopes + between[: num_heads - whole]


def alibi(num_heads: int, seq: int) -> jax.Array:
    """Returns the bias of the scores: float32 [1, heads, 1, keys].

    It grows with the key's position instead of falling with its distance. For one query
    the two differ by a constant, which does not change the softmax.
    """
    slopes = jnp.asarray(alibi_slopes(num_heads), jnp.float32)
    return (slopes[:, None] * jnp.arange(seq))[None, :, None]


def _projection(config: BloomConfig, num_in: int, *, rngs: nnx.Rngs) -> nnx.Linear:
    """A linear layer onto the skip path; as 2 per layer add up, the init is smaller."""
    stddev = INIT_STDDEV / math.sqrt(2 * config.num_layers)
    return linear(config, num_in, config.num_features, rngs=rngs, stddev=stddev)


def _norm(config: BloomConfig, *, rngs: nnx.Rngs) -> nnx.LayerNorm:
    return layer_norm(config, config.num_features, config.norm_epsilon, rngs=rngs)


class Attention(nnx.Module):
    """Causal multi-head self-attention with ALiBi."""

    def __init__(self, config: BloomConfig, *, rngs: nnx.Rngs):
        self.num_heads = config.num_heads
        num_features = config.num_features
        self.qkv = linear(config, num_features, 3 * num_features, rngs=rngs)
        self.proj = _projection(config, num_features, rngs=rngs)

    def __call__(
        self,
        x: jax.Array,
        bias: jax.Array,
        mask: jax.Array | None = None,
        past: Past | None = None,
    ) -> jax.Array:
        """Maps [batch, seq, features] to the same shape and dtype."""
        heads = split_heads(self.qkv(x), self.num_heads)
        q, k, v = jnp.split(heads, 3, axis=-1)
        if past is not None:
            seen = past.extend(k, v)
            mixed = jax.nn.dot_product_attention(
                q, past.keys, past.values, bias, mask=seen
            )
            return self.proj(join_heads(mixed))
        mixed = jax.nn.dot_product_attention(q, k, v, bias, mask, is_causal=True)
        return self.proj(join_heads(mixed))


class MLP(nnx.Module):
    """Two linear layers around a tanh-approximated GELU."""

    def __init__(self, config: BloomConfig, *, rngs: nnx.Rngs):
        hidden = 4 * config.num_features
        self.up = linear(config, config.num_features, hidden, rngs=rngs)
        self.down = _projection(config, hidden, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [batch, seq, features] to the same shape and dtype."""
        return self.down(jax.nn.gelu(self.up(x), approximate=True))


class Block(nnx.Module):
    """One pre-norm transformer layer; all blocks of a model have the same structure."""

    def __init__(self, config: BloomConfig, *, rngs: nnx.Rngs):
        self.dropout = config.dropout
        self.ln_1 = _norm(config, rngs=rngs)
        self.attn = Attention(config, rngs=rngs)
        self.ln_2 = _norm(config, rngs=rngs)
        self.mlp = MLP(config, rngs=rngs)

    def __call__(
        self,
        x: jax.Array,
        bias: jax.Array,
        mask: jax.Array | None = None,
        key: Key = None,
        past: Past | None = None,
    ) -> jax.Array:
        """Maps [batch, seq, features] to the same shape and dtype."""
        key_1, key_2 = split_key(key, 2)
        x = x + dropout(self.attn(self.ln_1(x), bias, mask, past), self.dropout, key_1)
        return x + dropout(self.mlp(self.ln_2(x)), self.dropout, key_2)


class Bloom(nnx.Module):
    """BLOOM language model with the token embedding as its output head."""

    def __init__(self, config: BloomConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.wte = embedding(config, config.vocab_size, config.num_features, rngs=rngs)
        self.ln_0 = _norm(config, rngs=rngs)
        for i in range(config.num_layers):
            setattr(self, f"h{i}", Block(config, rngs=rngs))
        self.ln_f = _norm(config, rngs=rngs)

    @property
    def blocks(self) -> list[Block]:
        """The layers in order."""
        return [getattr(self, f"h{i}") for i in range(self.config.num_layers)]

    def hidden(
        self,
        tokens: jax.Array,
        *,
        segments: jax.Array | None = None,
        key: Key = None,
        remat: Remat = None,
    ) -> jax.Array:
        """Last layer's normed output, [batch, seq, features] in the compute dtype.

        Args:
          tokens: int [batch, seq].
          segments: int [batch, seq], the number of each token's document; documents do
            not see each other.
          key: key of the dropout; None for no dropout.
          remat: wrapper of each block's function, such as `jax.checkpoint`.
        """
        key_0, key = split_key(key, 2)
        x = self.ln_0(look_up(self.config, self.wte, tokens))
        x = run_blocks(
            self.blocks,
            dropout(x, self.config.dropout, key_0),
            key=key,
            remat=remat,
            bias=alibi(self.config.num_heads, tokens.shape[-1]),
            mask=attention_mask(segments, segments),
        )
        return self.ln_f(x)

    def __call__(
        self, tokens: jax.Array, *, segments: jax.Array | None = None
    ) -> jax.Array:
        """Next-token logits: int [batch, seq] to float32 [batch, seq, vocab]."""
        return self.head(self.hidden(tokens, segments=segments))

    def continued(self, tokens: jax.Array, pasts: Sequence[Past]) -> jax.Array:
        """`hidden` of tokens that follow others, whose keys and values are known.

        Args:
          tokens: int [batch, seq].
          pasts: for each layer, the tokens before; it gets these.
        """
        x = self.ln_0(look_up(self.config, self.wte, tokens))
        length = pasts[0].keys.shape[1]
        bias = alibi(self.config.num_heads, length)
        x = run_blocks(self.blocks, x, key=None, remat=None, pasts=pasts, bias=bias)
        return self.ln_f(x)

    def output(self) -> tuple[jax.Array, None]:
        """The output head: a table of [vocab, features], and no bias."""
        return self.wte[...], None

    def head(self, x: jax.Array) -> jax.Array:
        """Logits of `hidden`'s output: [..., features] to float32 [..., vocab]."""
        return output_logits(x, *self.output())
