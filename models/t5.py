"""T5 (Raffel et al. 2020): encoder and decoder; positions are biases of distances.

Scores are not divided by the root of the head's features; the init makes up for it. The
first version has ReLU, and the token embedding as its output head. Version 1.1 has a
gated GELU and a separate head.

Invariant: one table of distances serves all layers of the encoder, another one all
self-attention of the decoder. Attention from decoder to encoder has none.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from .blocks import Block, LanguageModel
from .layers import (
    Key,
    ModelConfig,
    Remat,
    attention_mask,
    blocks_of,
    dropout,
    embedding,
    join_heads,
    linear,
    look_up,
    normal_param,
    rms_norm,
    run_blocks,
    split_heads,
    split_key,
)


@dataclasses.dataclass(frozen=True)
class T5Config(ModelConfig):
    """Shape and precision of a T5."""

    vocab_size: int
    num_layers: int  # layers of the encoder
    num_decoder_layers: int
    num_heads: int
    num_features: int
    head_features: int  # features of a head; all heads may have more than num_features
    num_hidden: int  # features between the MLP's layers
    num_buckets: int = 32  # buckets of distances
    max_distance: int = 128  # distances from here on share a bucket
    mlp: Literal["relu", "gated-gelu"] = "relu"
    tied_embeddings: bool = True
    norm_epsilon: ClassVar[float] = 1e-6

    def __post_init__(self):
        super().__post_init__()
        if self.num_buckets < 4 or self.num_buckets % 2:
            raise ValueError(
                f"T5Config.num_buckets: expected an even number of at least 4, got "
                f"{self.num_buckets}"
            )
        if self.max_distance <= self.num_buckets // 2:
            raise ValueError(
                "T5Config.max_distance: expected more than the distances with a bucket "
                f"each, num_buckets / 2 = {self.num_buckets // 2}, got "
                f"{self.max_distance}"
            )


def _version_1_1(*sizes: int) -> T5Config:
    return T5Config(32128, *sizes, mlp="gated-gelu", tied_embeddings=False)


# Vocabulary, layers of encoder and decoder, heads, features, features a head, hidden.
PRESETS: Mapping[str, T5Config] = {
    # The vocabulary is all bytes and a token that begins an answer.
    "nano": T5Config(257, 2, 2, 4, 128, 32, 512),
    "small": T5Config(32128, 6, 6, 8, 512, 64, 2048),
    "base": T5Config(32128, 12, 12, 12, 768, 64, 3072),
    "large": T5Config(32128, 24, 24, 16, 1024, 64, 4096),
    "3b": T5Config(32128, 24, 24, 32, 1024, 128, 16384),
    "11b": T5Config(32128, 24, 24, 128, 1024, 128, 65536),
    "v1.1-small": _version_1_1(8, 8, 6, 512, 64, 1024),
    "v1.1-base": _version_1_1(12, 12, 12, 768, 64, 2048),
    "v1.1-large": _version_1_1(24, 24, 16, 1024, 64, 2816),
    "v1.1-xl": _version_1_1(24, 24, 32, 2048, 64, 5120),
    "v1.1-xxl": _version_1_1(24, 24, 64, 4096, 64, 10240),
}


def distance_buckets(
    num_queries: int, num_keys: int, *, config: T5Config, is_causal: bool
) -> np.ndarray:
    """Returns the bucket of each distance: int32 [queries, keys].

    Half of the buckets are for one distance each; the others grow by a constant factor
    up to `max_distance`. If not causal, keys before and after the query have half of
    the buckets each.
    """
    ahead = np.arange(num_keys)[None] - np.arange(num_queries)[:, None]
    num_buckets = config.num_buckets
    first = np.zeros_like(ahead)
    if is_causal:
        distance = np.maximum(-ahead, 0)
    else:
        num_buckets //= 2
        first = np.where(ahead > 0, num_buckets, 0)
        distance = np.abs(ahead)
    num_exact = num_buckets // 2
    ratio = np.log(np.maximum(distance, num_exact).astype(np.float32) / num_exact)
    ratio = ratio / math.log(config.max_distance / num_exact)
    large = num_exact + (ratio * (num_buckets - num_exact)).astype(np.int32)
    large = np.minimum(large, num_buckets - 1)
    return (first + np.where(distance < num_exact, distance, large)).astype(np.int32)


class DistanceBias(nnx.Module):
    """The bias that each distance adds to each head's scores."""

    def __init__(self, config: T5Config, *, is_causal: bool, rngs: nnx.Rngs):
        self.config, self.is_causal = config, is_causal
        shape, stddev = (
            (config.num_buckets, config.num_heads),
            config.num_features**-0.5,
        )
        self.table = normal_param(config, shape, rngs=rngs, stddev=stddev)

    def __call__(self, seq: int) -> jax.Array:
        """Returns biases of self-attention: float32 [1, heads, queries, keys]."""
        buckets = distance_buckets(
            seq, seq, config=self.config, is_causal=self.is_causal
        )
        by_distance = self.table[...].astype(jnp.float32)[jnp.asarray(buckets)]
        return by_distance.transpose(2, 0, 1)[None]


def _linear(
    config: T5Config, num_in: int, num_out: int, stddev: float, *, rngs: nnx.Rngs
) -> nnx.Linear:
    return linear(config, num_in, num_out, rngs=rngs, stddev=stddev, use_bias=False)


class Attention(nnx.Module):
    """Multi-head attention with unscaled scores."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        self.num_heads = config.num_heads
        num_in, num = config.num_features, config.num_heads * config.head_features
        scaled = (num_in * config.head_features) ** -0.5
        self.q = _linear(config, num_in, num, scaled, rngs=rngs)
        self.k = _linear(config, num_in, num, num_in**-0.5, rngs=rngs)
        self.v = _linear(config, num_in, num, num_in**-0.5, rngs=rngs)
        self.proj = _linear(config, num, num_in, num**-0.5, rngs=rngs)

    def __call__(
        self,
        x: jax.Array,
        seen: jax.Array | None = None,
        *,
        bias: jax.Array | None = None,
        mask: jax.Array | None = None,
        is_causal: bool = False,
    ) -> jax.Array:
        """Maps [batch, queries, features] to the same, over [batch, keys, features]."""
        seen = x if seen is None else seen
        q, k, v = (
            split_heads(part, self.num_heads)
            for part in (self.q(x), self.k(seen), self.v(seen))
        )
        mixed = jax.nn.dot_product_attention(
            q, k, v, bias, mask, scale=1.0, is_causal=is_causal
        )
        return self.proj(join_heads(mixed))


class MLP(nnx.Module):
    """Two linear layers around a ReLU, or around a GELU gated by a third."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        num_in, num = config.num_features, config.num_hidden
        self.is_gated = config.mlp == "gated-gelu"
        if self.is_gated:
            self.gate = _linear(config, num_in, num, num_in**-0.5, rngs=rngs)
        self.up = _linear(config, num_in, num, num_in**-0.5, rngs=rngs)
        self.down = _linear(config, num, num_in, num**-0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [batch, seq, features] to the same shape and dtype."""
        if not self.is_gated:
            return self.down(jax.nn.relu(self.up(x)))
        return self.down(jax.nn.gelu(self.gate(x), approximate=True) * self.up(x))


_PARTS = (rms_norm, Attention, MLP)


class DecoderBlock(nnx.Module):
    """One pre-norm layer of the decoder, which also sees the encoder's output."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        self.dropout = config.dropout
        self.ln_1 = rms_norm(config, rngs=rngs)
        self.attn = Attention(config, rngs=rngs)
        self.ln_2 = rms_norm(config, rngs=rngs)
        self.cross = Attention(config, rngs=rngs)
        self.ln_3 = rms_norm(config, rngs=rngs)
        self.mlp = MLP(config, rngs=rngs)

    def __call__(
        self,
        x: jax.Array,
        encoded: jax.Array,
        bias: jax.Array,
        mask: jax.Array | None = None,
        cross_mask: jax.Array | None = None,
        key: Key = None,
    ) -> jax.Array:
        """Maps [batch, targets, features] to the same shape and dtype."""
        key_1, key_2, key_3 = split_key(key, 3)
        mixed = self.attn(self.ln_1(x), bias=bias, mask=mask, is_causal=True)
        x = x + dropout(mixed, self.dropout, key_1)
        mixed = self.cross(self.ln_2(x), encoded, mask=cross_mask)
        x = x + dropout(mixed, self.dropout, key_2)
        return x + dropout(self.mlp(self.ln_3(x)), self.dropout, key_3)


class T5(LanguageModel):
    """T5: `hidden(tokens, decoder_tokens)` and the output head."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        self.config = config
        self.wte = embedding(config, config.vocab_size, rngs=rngs, stddev=1.0)
        self.encoder_bias = DistanceBias(config, is_causal=False, rngs=rngs)
        for i in range(config.num_layers):
            setattr(self, f"e{i}", Block(config, _PARTS, rngs=rngs))
        self.encoder_ln_f = rms_norm(config, rngs=rngs)
        self.decoder_bias = DistanceBias(config, is_causal=True, rngs=rngs)
        for i in range(config.num_decoder_layers):
            setattr(self, f"d{i}", DecoderBlock(config, rngs=rngs))
        self.decoder_ln_f = rms_norm(config, rngs=rngs)
        if not config.tied_embeddings:
            num_rows, stddev = config.vocab_size, config.num_features**-0.5
            self.lm_head = embedding(config, num_rows, rngs=rngs, stddev=stddev)

    def encode(
        self,
        tokens: jax.Array,
        *,
        segments: jax.Array | None = None,
        key: Key = None,
        remat: Remat = None,
    ) -> jax.Array:
        """Returns the encoder's normed output, [batch, seq, features]."""
        key_0, key, key_1 = split_key(key, 3)
        rate = self.config.dropout
        x = run_blocks(
            blocks_of(self, self.config.num_layers, "e"),
            dropout(look_up(self.config, self.wte, tokens), rate, key_0),
            key=key,
            remat=remat,
            bias=self.encoder_bias(tokens.shape[-1]),
            mask=attention_mask(segments, segments),
        )
        return dropout(self.encoder_ln_f(x), rate, key_1)

    def decode(
        self,
        encoded: jax.Array,
        decoder_tokens: jax.Array,
        *,
        segments: jax.Array | None = None,
        decoder_segments: jax.Array | None = None,
        key: Key = None,
        remat: Remat = None,
    ) -> jax.Array:
        """Returns the input of `output`'s table: [batch, targets, features]."""
        key_0, key, key_1 = split_key(key, 3)
        rate = self.config.dropout
        if decoder_segments is None and segments is not None:
            decoder_segments = jnp.ones_like(decoder_tokens)
        x = run_blocks(
            blocks_of(self, self.config.num_decoder_layers, "d"),
            dropout(look_up(self.config, self.wte, decoder_tokens), rate, key_0),
            key=key,
            remat=remat,
            encoded=encoded,
            bias=self.decoder_bias(decoder_tokens.shape[-1]),
            mask=attention_mask(decoder_segments, decoder_segments),
            cross_mask=attention_mask(decoder_segments, segments),
        )
        x = dropout(self.decoder_ln_f(x), rate, key_1)
        return x * self.config.num_features**-0.5 if self.config.tied_embeddings else x

    def hidden(
        self,
        tokens: jax.Array,
        decoder_tokens: jax.Array,
        *,
        segments: jax.Array | None = None,
        decoder_segments: jax.Array | None = None,
        key: Key = None,
        remat: Remat = None,
    ) -> jax.Array:
        """Returns the input of `output`'s table: [batch, targets, features].

        Args:
          tokens: int [batch, seq], the encoder's input.
          decoder_tokens: int [batch, targets], the answer, shifted by one.
          segments: int [batch, seq], the number of each token's document, 0 for
            padding; documents do not see each other.
          decoder_segments: int [batch, targets], the document that each token answers;
            document 1 by default.
        """
        key_1, key_2 = split_key(key, 2)
        encoded = self.encode(tokens, segments=segments, key=key_1, remat=remat)
        documents = {"segments": segments, "decoder_segments": decoder_segments}
        return self.decode(encoded, decoder_tokens, key=key_2, remat=remat, **documents)

    def __call__(
        self,
        tokens: jax.Array,
        decoder_tokens: jax.Array,
        *,
        segments: jax.Array | None = None,
        decoder_segments: jax.Array | None = None,
    ) -> jax.Array:
        """Returns logits of the answer: float32 [batch, targets, vocab]."""
        documents: Any = {"segments": segments, "decoder_segments": decoder_segments}
        return self.head(self.hidden(tokens, decoder_tokens, **documents))
