"""Llama and its relatives: Mistral, Qwen 2, Qwen 3.

Rotary positions (Su et al. 2021), grouped-query attention (Ainslie et al. 2023), SwiGLU
(Shazeer 2020) and RMS norm, no biases (Touvron et al. 2023). Mistral adds a sliding
window, Qwen 2 biases of q, k and v, Qwen 3 a norm of each query and key.

Invariant: all differences between these models are fields of the config.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from .blocks import Decoder, causal_attention
from .layers import (
    Key,
    ModelConfig,
    check_length,
    embedding,
    linear,
    look_up,
    positions_in,
    projection,
    rms_norm,
    split_heads,
)


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """A reduction of rotary frequencies, for more positions than were trained.

    Attributes:
      kind: "linear" divides all frequencies by the factor (Chen et al. 2023). "llama3"
        divides those that turn fewer than `low_turns` times within the original
        positions, keeps those that turn more than `high_turns` times, and blends in
        between.
      original_positions: for "llama3": the longest sequence before the scaling.
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_turns: float = 1.0
    high_turns: float = 4.0
    original_positions: int = 8192

    def __post_init__(self):
        if self.kind not in ("linear", "llama3"):
            raise ValueError(
                f"RopeScaling.kind: expected 'linear' or 'llama3', got {self.kind!r}"
            )
        if self.factor < 1 or not 0 < self.low_turns < self.high_turns:
            raise ValueError(
                "RopeScaling: expected a factor of at least 1 and 0 < low_turns < "
                f"high_turns, got {self}"
            )


@dataclasses.dataclass(frozen=True)
class LlamaConfig(ModelConfig):
    """Shape and precision of a Llama."""

    vocab_size: int
    num_positions: int  # the longest sequence
    num_layers: int
    num_heads: int
    num_kv_heads: int  # heads of keys and values, each for some heads of queries
    num_features: int
    num_hidden: int  # features between the MLP's layers
    head_features: int | None = None  # features of a head; num_features / num_heads
    rope_base: float = 10000.0
    rope_scaling: RopeScaling | None = None
    norm_epsilon: float = 1e-5
    qkv_bias: bool = False
    qk_norm: bool = False
    window: int | None = None  # number of tokens that one sees, itself included
    tied_embeddings: bool = False
    head: Literal["causal-lm", "classification"] = "causal-lm"
    num_labels: int = 2  # classes of a classification

    def __post_init__(self):
        super().__post_init__()
        self.check_divides("num_kv_heads", "num_heads")
        if self.head_features is None:
            self.check_divides("num_heads", "num_features")
        if self.features_a_head % 2:
            raise ValueError(
                "LlamaConfig: rotary positions turn pairs, expected an even number of "
                f"features a head, got {self.features_a_head}"
            )

    @property
    def features_a_head(self) -> int:
        return self.head_features or self.num_features // self.num_heads


_LLAMA3 = RopeScaling("llama3", 8.0)

# Vocabulary, positions, layers, heads, heads of keys and values, features, hidden.
PRESETS: Mapping[str, LlamaConfig] = {
    "nano": LlamaConfig(256, 256, 4, 4, 2, 128, 352),
    "tinyllama-1.1b": LlamaConfig(32000, 2048, 22, 32, 4, 2048, 5632),
    "llama2-7b": LlamaConfig(32000, 4096, 32, 32, 32, 4096, 11008),
    "llama2-13b": LlamaConfig(32000, 4096, 40, 40, 40, 5120, 13824),
    "llama3.1-8b": LlamaConfig(
        *(128256, 131072, 32, 32, 8, 4096, 14336),
        rope_base=500000.0,
        rope_scaling=_LLAMA3,
    ),
    "llama3.2-1b": LlamaConfig(
        *(128256, 131072, 16, 32, 8, 2048, 8192),
        rope_base=500000.0,
        rope_scaling=dataclasses.replace(_LLAMA3, factor=32.0),
        tied_embeddings=True,
    ),
    "mistral-7b": LlamaConfig(32000, 32768, 32, 32, 8, 4096, 14336, window=4096),
    "qwen2.5-0.5b": LlamaConfig(
        *(151936, 32768, 24, 14, 2, 896, 4864),
        rope_base=1e6,
        norm_epsilon=1e-6,
        qkv_bias=True,
        tied_embeddings=True,
    ),
    "qwen3-0.6b": LlamaConfig(
        *(151936, 40960, 28, 16, 8, 1024, 3072),
        head_features=128,
        rope_base=1e6,
        norm_epsilon=1e-6,
        qk_norm=True,
        tied_embeddings=True,
    ),
}


def rope_frequencies(config: LlamaConfig) -> jax.Array:
    """Returns the radians that each pair of features turns per position.

    The result is float32 [features of a head / 2].
    """
    num = config.features_a_head
    turns = config.rope_base ** (-jnp.arange(0, num, 2, dtype=jnp.float32) / num)
    scaling = config.rope_scaling
    if scaling is None:
        return turns
    slow = turns / scaling.factor
    if scaling.kind == "linear":
        return slow
    in_original = scaling.original_positions * turns / (2 * math.pi)
    low, high = scaling.low_turns, scaling.high_turns
    share = jnp.clip((in_original - low) / (high - low), 0, 1)
    return (1 - share) * slow + share * turns


def rotate(x: jax.Array, angles: jax.Array) -> jax.Array:
    """Turns the pairs (i, i + half) of each head's features.

    Args:
      x: [batch, seq, heads, features].
      angles: float32 [batch or 1, seq, features / 2].
    """
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None]
    turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return turned.astype(x.dtype)


class Attention(nnx.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        self.config = config
        num_q = config.num_heads * config.features_a_head
        num_kv = config.num_kv_heads * config.features_a_head

        def into(num_out: int) -> nnx.Linear:
            num_in, bias = config.num_features, config.qkv_bias
            return linear(config, num_in, num_out, rngs=rngs, use_bias=bias)

        self.q, self.k, self.v = into(num_q), into(num_kv), into(num_kv)
        self.proj = projection(config, num_q, rngs=rngs, use_bias=False)
        if config.qk_norm:
            self.q_norm = rms_norm(config, config.features_a_head, rngs=rngs)
            self.k_norm = rms_norm(config, config.features_a_head, rngs=rngs)

    def __call__(self, x: jax.Array, angles: jax.Array, **options: Any) -> jax.Array:
        """Maps [batch, seq, features] to the same; options of `causal_attention`."""
        config = self.config
        q = split_heads(self.q(x), config.num_heads)
        k = split_heads(self.k(x), config.num_kv_heads)
        v = split_heads(self.v(x), config.num_kv_heads)
        if config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, angles), rotate(k, angles)
        return self.proj(causal_attention(q, k, v, window=config.window, **options))


class MLP(nnx.Module):
    """SwiGLU: a linear layer, gated by another through a SiLU, and one back."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        def into() -> nnx.Linear:
            num_in, num_out = config.num_features, config.num_hidden
            return linear(config, num_in, num_out, rngs=rngs, use_bias=False)

        self.gate, self.up = into(), into()
        num_hidden = config.num_hidden
        self.down = projection(config, num_hidden, rngs=rngs, use_bias=False)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [batch, seq, features] to the same shape and dtype."""
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Llama(Decoder):
    """Llama: a language model, `head(hidden(tokens))`, or one of classes."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.wte = embedding(config, config.vocab_size, rngs=rngs)
        self.add_blocks((rms_norm, Attention, MLP), rngs=rngs)

    def _embed(
        self, tokens: jax.Array, segments: jax.Array | None, key: Key
    ) -> tuple[jax.Array, Key, dict[str, Any]]:
        seq = tokens.shape[-1]
        if segments is not None:
            positions = positions_in(segments)
        else:
            positions = jnp.arange(seq)[None]
        check_length("Llama.hidden", seq, self.config.num_positions)
        x = look_up(self.config, self.wte, tokens)
        angles = positions[..., None] * rope_frequencies(self.config)
        return x, key, {"angles": angles}
