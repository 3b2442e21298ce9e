"""GPT-2 in Flax NNX: the published architecture, small enough to read in one sitting.

Invariant: this module knows nothing of jaxinf. A `GPT2` holds only `nnx.Param`s, with
string keys all the way down (`h0/attn/qkv/kernel`), so that `split` gives a plain
nested dict that any optimizer or store can take.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal

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
    check_length,
    dropout,
    embedding,
    join_heads,
    last_tokens,
    layer_norm,
    linear,
    look_up,
    output_logits,
    positions_in,
    run_blocks,
    split_heads,
    split_key,
)

__all__ = ["GPT2", "PRESETS", "GPT2Config"]

LAYER_NORM_EPSILON = 1e-5


@dataclasses.dataclass(frozen=True)
class GPT2Config(ModelConfig):
    """Shape and precision of a GPT-2."""

    vocab_size: int
    num_positions: int  # the longest sequence
    num_layers: int
    num_heads: int
    num_features: int
    head: Literal["causal-lm", "classification"] = "causal-lm"
    num_labels: int = 2  # classes of a classification

    def __post_init__(self):
        super().__post_init__()
        self.check_divides("num_heads", "num_features")


PRESETS: Mapping[str, GPT2Config] = {
    # For bytes; learns source code in a minute or two on two CPU cores.
    "nano": GPT2Config(256, 256, num_layers=4, num_heads=4, num_features=128),
    # The four published sizes (Radford et al. 2019, table 2).
    "small": GPT2Config(50257, 1024, num_layers=12, num_heads=12, num_features=768),
    "medium": GPT2Config(50257, 1024, num_layers=24, num_heads=16, num_features=1024),
    "large": GPT2Config(50257, 1024, num_layers=36, num_heads=20, num_features=1280),
    "xl": GPT2Config(50257, 1024, num_layers=48, num_heads=25, num_features=1600),
}


def _projection(config: GPT2Config, num_in: int, *, rngs: nnx.Rngs) -> nnx.Linear:
    """A linear layer onto the skip path; as 2 per layer add up, the init is smaller."""
    stddev = INIT_STDDEV / math.sqrt(2 * config.num_layers)
    return linear(config, num_in, config.num_features, rngs=rngs, stddev=stddev)


def _norm(config: GPT2Config, *, rngs: nnx.Rngs) -> nnx.LayerNorm:
    return layer_norm(config, config.num_features, LAYER_NORM_EPSILON, rngs=rngs)


class Attention(nnx.Module):
    """Causal multi-head self-attention."""

    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs):
        self.num_heads = config.num_heads
        num_features = config.num_features
        self.qkv = linear(config, num_features, 3 * num_features, rngs=rngs)
        self.proj = _projection(config, num_features, rngs=rngs)

    def __call__(
        self, x: jax.Array, mask: jax.Array | None = None, past: Past | None = None
    ) -> jax.Array:
        """Maps [batch, seq, features] to the same shape and dtype."""
        q, k, v = (
            split_heads(part, self.num_heads)
            for part in jnp.split(self.qkv(x), 3, axis=-1)
        )
        if past is not None:
            seen = past.extend(k, v)
            mixed = jax.nn.dot_product_attention(q, past.keys, past.values, mask=seen)
            return self.proj(join_heads(mixed))
        # The softmax is in fp32.
        mixed = jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True)
        return self.proj(join_heads(mixed))


class MLP(nnx.Module):
    """Two linear layers around a tanh-approximated GELU ("gelu_new")."""

    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs):
        hidden = 4 * config.num_features
        self.up = linear(config, config.num_features, hidden, rngs=rngs)
        self.down = _projection(config, hidden, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [batch, seq, features] to the same shape and dtype."""
        return self.down(jax.nn.gelu(self.up(x), approximate=True))


class Block(nnx.Module):
    """One pre-norm transformer layer; all blocks of a model have the same structure."""

    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs):
        self.dropout = config.dropout
        self.ln_1 = _norm(config, rngs=rngs)
        self.attn = Attention(config, rngs=rngs)
        self.ln_2 = _norm(config, rngs=rngs)
        self.mlp = MLP(config, rngs=rngs)

    def __call__(
        self,
        x: jax.Array,
        mask: jax.Array | None = None,
        key: Key = None,
        past: Past | None = None,
    ) -> jax.Array:
        """Maps [batch, seq, features] to the same shape and dtype."""
        key_1, key_2 = split_key(key, 2)
        x = x + dropout(self.attn(self.ln_1(x), mask, past), self.dropout, key_1)
        return x + dropout(self.mlp(self.ln_2(x)), self.dropout, key_2)


class GPT2(nnx.Module):
    """GPT-2, with the token embedding as its output head, or one for classes.

    The model is `head(ln_f(block(... block(embed(tokens)))))`. Each stage can be called
    on its own, for instance by a trainer that streams layers.
    """

    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs):
        self.config = config
        features = config.num_features
        self.wte = embedding(config, config.vocab_size, features, rngs=rngs)
        self.wpe = embedding(config, config.num_positions, features, rngs=rngs)
        for i in range(
            config.num_layers
        ):  # h0, h1, ...: string keys, not a list's ints
            setattr(self, f"h{i}", Block(config, rngs=rngs))
        self.ln_f = _norm(config, rngs=rngs)
        if config.head == "classification":
            self.score = linear(
                config, features, config.num_labels, rngs=rngs, use_bias=False
            )

    @property
    def blocks(self) -> list[Block]:
        """The layers in order."""
        return [getattr(self, f"h{i}") for i in range(self.config.num_layers)]

    def embed(self, tokens: jax.Array, segments: jax.Array | None = None) -> jax.Array:
        """Token plus position embeddings: int [batch, seq] to [batch, seq, features].

        Raises:
            ValueError: `seq` is above the config's `num_positions`.
        """
        seq = tokens.shape[-1]
        check_length("GPT2.embed", seq, self.config.num_positions)
        x = look_up(self.config, self.wte, tokens)
        if segments is None:
            return x + self.wpe[...][:seq].astype(self.config.dtype)
        return x + look_up(self.config, self.wpe, positions_in(segments))

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
            not see each other, and positions start at 0 in each.
          key: key of the dropout; None for no dropout.
          remat: wrapper of each block's function, such as `jax.checkpoint`.
        """
        key_0, key = split_key(key, 2)
        x = dropout(self.embed(tokens, segments), self.config.dropout, key_0)
        mask = attention_mask(segments, segments)
        return self.ln_f(run_blocks(self.blocks, x, key=key, remat=remat, mask=mask))

    def __call__(
        self,
        tokens: jax.Array,
        *,
        segments: jax.Array | None = None,
        key: Key = None,
        remat: Remat = None,
    ) -> jax.Array:
        """Logits in float32: [batch, seq, vocab], or of classes [batch, labels]."""
        x = self.hidden(tokens, segments=segments, key=key, remat=remat)
        if self.config.head == "classification":
            return self.score(last_tokens(x, segments)).astype(jnp.float32)
        return self.head(x)

    def continued(self, tokens: jax.Array, pasts: Sequence[Past]) -> jax.Array:
        """`hidden` of tokens that follow others, whose keys and values are known.

        Args:
          tokens: int [batch, seq].
          pasts: for each layer, the tokens before; it gets these.
        """
        seq = tokens.shape[-1]
        x = look_up(self.config, self.wte, tokens)
        rows = jax.lax.dynamic_slice_in_dim(self.wpe[...], pasts[0].filled, seq)
        x = x + rows.astype(self.config.dtype)
        return self.ln_f(run_blocks(self.blocks, x, key=None, remat=None, pasts=pasts))

    def output(self) -> tuple[jax.Array, None]:
        """The output head: a table of [vocab, features], and no bias."""
        return self.wte[...], None

    def head(self, x: jax.Array) -> jax.Array:
        """Logits of `hidden`'s output: [..., features] to float32 [..., vocab]."""
        return output_logits(x, *self.output())
