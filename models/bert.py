"""BERT (Devlin et al. 2019): a post-norm encoder, for masked tokens or for classes.

Invariant: only the head that the config names exists, so that no param lacks a
gradient.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from .blocks import EncoderAttention, EncoderConfig, EncoderMLP
from .layers import (
    Key,
    Remat,
    attention_mask,
    blocks_of,
    check_length,
    dropout,
    embedding,
    layer_norm,
    linear,
    look_up,
    output_logits,
    positions_in,
    run_blocks,
    split_key,
)


@dataclasses.dataclass(frozen=True)
class BertConfig(EncoderConfig):
    """Shape and precision of a BERT."""

    vocab_size: int
    num_positions: int  # the longest sequence
    num_token_types: int = 2
    head: Literal["masked-lm", "classification"] = "masked-lm"
    num_labels: int = 2  # classes of a classification
    norm_epsilon: ClassVar[float] = 1e-12


# Layers, heads, features, hidden, vocabulary, positions.
PRESETS: Mapping[str, BertConfig] = {
    # The vocabulary is all bytes and a token for a masked byte.
    "nano": BertConfig(4, 4, 128, 512, 257, 256),
    "base": BertConfig(12, 12, 768, 3072, 30522, 512),
    "large": BertConfig(24, 16, 1024, 4096, 30522, 512),
}


class Block(nnx.Module):
    """One post-norm transformer layer; all blocks have the same structure."""

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs):
        self.dropout = config.dropout
        self.attn = EncoderAttention(config, rngs=rngs)
        self.ln_1 = layer_norm(config, rngs=rngs)
        self.mlp = EncoderMLP(config, rngs=rngs)
        self.ln_2 = layer_norm(config, rngs=rngs)

    def __call__(
        self, x: jax.Array, mask: jax.Array | None = None, key: Key = None
    ) -> jax.Array:
        """Maps [batch, seq, features] to the same shape and dtype."""
        key_1, key_2 = split_key(key, 2)
        x = self.ln_1(x + dropout(self.attn(x, mask), self.dropout, key_1))
        return self.ln_2(x + dropout(self.mlp(x), self.dropout, key_2))


class MaskedHead(nnx.Module):
    """Maps features to input of the output's table, which is the token embedding."""

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs):
        num, dtype = config.num_features, jnp.dtype(config.param_dtype)
        self.dense = linear(config, num, num, rngs=rngs)
        self.ln = layer_norm(config, rngs=rngs)
        self.bias = nnx.Param(jnp.zeros(config.vocab_size, dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [batch, seq, features] to the same shape."""
        return self.ln(jax.nn.gelu(self.dense(x), approximate=False))


class ClassHead(nnx.Module):
    """Maps the first token's features to logits of classes."""

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs):
        num = config.num_features
        self.pooler = linear(config, num, num, rngs=rngs)
        self.classifier = linear(config, num, config.num_labels, rngs=rngs)
        self.dropout = config.dropout

    def __call__(self, x: jax.Array, key: Key) -> jax.Array:
        """Maps [batch, seq, features] to float32 [batch, labels]."""
        pooled = jnp.tanh(self.pooler(x[:, 0]))
        return self.classifier(dropout(pooled, self.dropout, key)).astype(jnp.float32)


class Bert(nnx.Module):
    """BERT with one head."""

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.wte = embedding(config, config.vocab_size, rngs=rngs)
        self.wpe = embedding(config, config.num_positions, rngs=rngs)
        self.wtt = embedding(config, config.num_token_types, rngs=rngs)
        self.ln_0 = layer_norm(config, rngs=rngs)
        for i in range(config.num_layers):
            setattr(self, f"h{i}", Block(config, rngs=rngs))
        is_masked = config.head == "masked-lm"
        self.head = (MaskedHead if is_masked else ClassHead)(config, rngs=rngs)

    def encode(
        self,
        tokens: jax.Array,
        *,
        segments: jax.Array | None = None,
        token_types: jax.Array | None = None,
        key: Key = None,
        remat: Remat = None,
    ) -> jax.Array:
        """Returns the last layer's output, [batch, seq, features] in the compute dtype.

        Args:
          tokens: int [batch, seq].
          segments: int [batch, seq], the number of each token's document, 0 for
            padding; documents do not see each other, and positions start at 0 in each.
          token_types: int [batch, seq], first or second sentence; zeros by default.

        Raises:
          ValueError: the sequence is above the config's `num_positions`.
        """
        key_0, key = split_key(key, 2)
        config, seq = self.config, tokens.shape[-1]
        check_length("Bert.embed", seq, config.num_positions)
        positions = jnp.arange(seq) if segments is None else positions_in(segments)
        types = jnp.zeros_like(tokens) if token_types is None else token_types
        x = look_up(config, self.wte, tokens) + look_up(config, self.wpe, positions)
        x = self.ln_0(x + look_up(config, self.wtt, types))
        x = dropout(x, config.dropout, key_0)
        mask = attention_mask(segments, segments)
        blocks = blocks_of(self, config.num_layers)
        return run_blocks(blocks, x, key=key, remat=remat, mask=mask)

    def hidden(self, tokens: jax.Array, **options: Any) -> jax.Array:
        """Returns the input of `output`'s table: features behind the masked head."""
        assert isinstance(self.head, MaskedHead)
        return self.head(self.encode(tokens, **options))

    def output(self) -> tuple[jax.Array, jax.Array]:
        """Returns the masked head's table of [vocab, features], and bias of [vocab]."""
        assert isinstance(self.head, MaskedHead)
        return self.wte[...], self.head.bias[...]

    def __call__(
        self, tokens: jax.Array, *, key: Key = None, **options: Any
    ) -> jax.Array:
        """Returns float32 logits: [batch, seq, vocab], or of classes [batch, labels].

        Takes the arguments of `encode`.
        """
        key, last = split_key(key, 2)
        if isinstance(self.head, ClassHead):
            return self.head(self.encode(tokens, key=key, **options), last)
        return output_logits(self.hidden(tokens, key=key, **options), *self.output())
