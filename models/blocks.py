"""Parts that several models have: attention, MLPs, blocks, decoders.

Invariant: params are made in the order of their use, which a seed's values depend on.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx

from .layers import (
    Key,
    ModelConfig,
    Remat,
    attention_mask,
    blocks_of,
    dropout,
    embedding,
    join_heads,
    last_tokens,
    linear,
    output_logits,
    projection,
    run_blocks,
    split_heads,
    split_key,
)


@dataclasses.dataclass(frozen=True)
class EncoderConfig(ModelConfig):
    """The part of a config that `EncoderAttention` and `EncoderMLP` read."""

    num_layers: int
    num_heads: int
    num_features: int
    num_hidden: int  # features between the MLP's layers

    def __post_init__(self):
        super().__post_init__()
        self.check_divides("num_heads", "num_features")


class EncoderAttention(nnx.Module):
    """Bidirectional multi-head self-attention."""

    def __init__(self, config: EncoderConfig, *, rngs: nnx.Rngs):
        self.num_heads = config.num_heads
        num = config.num_features
        self.q, self.k, self.v, self.proj = (
            linear(config, num, num, rngs=rngs) for _ in range(4)
        )

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        """Maps [batch, seq, features] to the same shape and dtype."""
        q, k, v = (
            split_heads(part(x), self.num_heads) for part in (self.q, self.k, self.v)
        )
        return self.proj(join_heads(jax.nn.dot_product_attention(q, k, v, mask=mask)))


class EncoderMLP(nnx.Module):
    """Two linear layers around an exact GELU."""

    def __init__(self, config: EncoderConfig, *, rngs: nnx.Rngs):
        self.up = linear(config, config.num_features, config.num_hidden, rngs=rngs)
        self.down = linear(config, config.num_hidden, config.num_features, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [batch, seq, features] to the same shape and dtype."""
        return self.down(jax.nn.gelu(self.up(x), approximate=False))


def causal_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    window: int | None = None,
) -> jax.Array:
    """Attends to the tokens up to each one; softmax in fp32; [batch, seq, features].

    Args:
      q, k, v: [batch, seq, heads, features of a head].
      window: number of tokens that a token sees, with itself; None for all.
    """
    local = (window - 1, 0) if window else None
    mixed = jax.nn.dot_product_attention(
        q, k, v, bias, mask, is_causal=True, local_window_size=local
    )
    return join_heads(mixed)


class FusedAttention(nnx.Module):
    """Causal multi-head self-attention; one layer makes queries, keys and values."""

    def __init__(self, config: Any, *, rngs: nnx.Rngs):
        self.num_heads = config.num_heads
        num_features = config.num_features
        self.qkv = linear(config, num_features, 3 * num_features, rngs=rngs)
        self.proj = projection(config, num_features, rngs=rngs)

    def divide(self, qkv: jax.Array) -> Sequence[jax.Array]:
        """Returns q, k and v of [batch, seq, 3 * features], which lie side by side."""
        parts = jnp.split(qkv, 3, axis=-1)
        return [split_heads(part, self.num_heads) for part in parts]

    def __call__(self, x: jax.Array, **options: Any) -> jax.Array:
        """Maps [batch, seq, features] to the same; options of `causal_attention`."""
        q, k, v = self.divide(self.qkv(x))
        return self.proj(causal_attention(q, k, v, **options))


class MLP(nnx.Module):
    """Two linear layers around a tanh-approximated GELU ("gelu_new")."""

    def __init__(self, config: Any, *, rngs: nnx.Rngs):
        hidden = 4 * config.num_features
        self.up = linear(config, config.num_features, hidden, rngs=rngs)
        self.down = projection(config, hidden, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [batch, seq, features] to the same shape and dtype."""
        return self.down(jax.nn.gelu(self.up(x), approximate=True))


Parts: TypeAlias = tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]
"""A block's norm, attention and MLP, each called as ``part(config, rngs=rngs)``."""


class Block(nnx.Module):
    """One pre-norm transformer layer; all blocks of a model have the same structure."""

    def __init__(self, config: Any, parts: Parts, *, rngs: nnx.Rngs):
        norm, attention, mlp = parts
        self.dropout = config.dropout
        self.ln_1 = norm(config, rngs=rngs)
        self.attn = attention(config, rngs=rngs)
        self.ln_2 = norm(config, rngs=rngs)
        self.mlp = mlp(config, rngs=rngs)

    def __call__(self, x: jax.Array, key: Key = None, **options: Any) -> jax.Array:
        """Maps [batch, seq, features] to the same; options of the attention."""
        key_1, key_2 = split_key(key, 2)
        mixed = self.attn(self.ln_1(x), **options)
        x = x + dropout(mixed, self.dropout, key_1)
        return x + dropout(self.mlp(self.ln_2(x)), self.dropout, key_2)


class LanguageModel(nnx.Module):
    """A model with logits of tokens; without an `lm_head`, of the token embedding."""

    config: Any
    wte: nnx.Param

    def output(self) -> tuple[jax.Array, jax.Array | None]:
        """Returns the output head: a table of [vocab, features], and a bias or None."""
        return getattr(self, "lm_head", self.wte)[...], None

    def head(self, x: jax.Array) -> jax.Array:
        """Maps the output of `hidden`, [..., features], to float32 [..., vocab]."""
        return output_logits(x, *self.output())


class Decoder(LanguageModel):
    """A causal language model, `head(hidden(tokens))`, or one of classes.

    `_embed` of a model makes the input of its first layer.
    """

    def add_blocks(self, parts: Parts, *, rngs: nnx.Rngs) -> None:
        """Makes the layers, the last norm, and the head."""
        config = self.config
        for i in range(config.num_layers):
            setattr(self, f"h{i}", Block(config, parts, rngs=rngs))
        self.ln_f = parts[0](config, rngs=rngs)
        if getattr(config, "head", "causal-lm") == "classification":
            num_in, num_labels = config.num_features, config.num_labels
            self.score = linear(config, num_in, num_labels, rngs=rngs, use_bias=False)
        elif not getattr(config, "tied_embeddings", True):
            self.lm_head = embedding(config, config.vocab_size, rngs=rngs)

    def _embed(
        self, tokens: jax.Array, segments: jax.Array | None, key: Key
    ) -> tuple[jax.Array, Key, dict[str, Any]]:
        """Returns the first layer's input, the layers' key, and their common inputs."""
        raise NotImplementedError

    def hidden(
        self,
        tokens: jax.Array,
        *,
        segments: jax.Array | None = None,
        key: Key = None,
        remat: Remat = None,
    ) -> jax.Array:
        """Returns the normed output, [batch, seq, features] in the compute dtype.

        Args:
          tokens: int [batch, seq].
          segments: int [batch, seq], the number of each token's document; documents do
            not see each other, and positions start at 0 in each.

        Raises:
          ValueError: `seq` is above the config's `num_positions`, if it has one.
        """
        x, key, shared = self._embed(tokens, segments, key)
        mask = attention_mask(segments, segments)
        blocks = blocks_of(self, self.config.num_layers)
        x = run_blocks(blocks, x, key=key, remat=remat, mask=mask, **shared)
        return self.ln_f(x)

    def __call__(
        self,
        tokens: jax.Array,
        *,
        segments: jax.Array | None = None,
        key: Key = None,
        remat: Remat = None,
    ) -> jax.Array:
        """Returns float32 logits: [batch, seq, vocab], or [batch, labels]."""
        x = self.hidden(tokens, segments=segments, key=key, remat=remat)
        if hasattr(self, "score"):
            return self.score(last_tokens(x, segments)).astype(jnp.float32)
        return self.head(x)
