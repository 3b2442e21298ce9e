"""BLOOM (Scao et al. 2022): positions by ALiBi, a norm of the embeddings.

ALiBi (Press et al. 2021): a query's score for a key falls linearly with the distance,
in each head with another slope. There are no position embeddings, and sequences have no
maximum length.

Invariant: `qkv` holds a head's query, key and value features side by side, as the
published weights do.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .blocks import MLP, Decoder, FusedAttention
from .layers import (
    Key,
    ModelConfig,
    dropout,
    embedding,
    layer_norm,
    look_up,
    split_heads,
    split_key,
)


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


class Attention(FusedAttention):
    """Causal multi-head self-attention with ALiBi as its bias."""

    def divide(self, qkv: jax.Array) -> Sequence[jax.Array]:
        """Returns q, k and v of [batch, seq, 3 * features], side by side in a head."""
        return jnp.split(split_heads(qkv, self.num_heads), 3, axis=-1)


class Bloom(Decoder):
    """BLOOM language model with the token embedding as its output head."""

    def __init__(self, config: BloomConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.wte = embedding(config, config.vocab_size, rngs=rngs)
        self.ln_0 = layer_norm(config, rngs=rngs)
        self.add_blocks((layer_norm, Attention, MLP), rngs=rngs)

    def _embed(
        self, tokens: jax.Array, segments: jax.Array | None, key: Key
    ) -> tuple[jax.Array, Key, dict[str, Any]]:
        key_0, key = split_key(key, 2)
        x = self.ln_0(look_up(self.config, self.wte, tokens))
        x = dropout(x, self.config.dropout, key_0)
        return x, key, {"bias": alibi(self.config.num_heads, tokens.shape[-1])}
