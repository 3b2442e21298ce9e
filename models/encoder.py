"""The common layers of BERT and ViT: bidirectional attention, and the MLP.

Invariant: `Attention` and `MLP` know nothing of norms and skip paths, in which the two
models differ.
"""

import dataclasses

import jax
from flax import nnx

from .layers import ModelConfig, join_heads, linear, split_heads

__all__ = ["MLP", "Attention", "EncoderConfig"]


@dataclasses.dataclass(frozen=True)
class EncoderConfig(ModelConfig):
    """The part of a config that `Attention` and `MLP` read."""

    num_layers: int
    num_heads: int
    num_features: int
    num_hidden: int  # features between the MLP's layers

    def __post_init__(self):
        super().__post_init__()
        self.check_divides("num_heads", "num_features")


class Attention(nnx.Module):
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


class MLP(nnx.Module):
    """Two linear layers around an exact GELU."""

    def __init__(self, config: EncoderConfig, *, rngs: nnx.Rngs):
        self.up = linear(config, config.num_features, config.num_hidden, rngs=rngs)
        self.down = linear(config, config.num_hidden, config.num_features, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [batch, seq, features] to the same shape and dtype."""
        return self.down(jax.nn.gelu(self.up(x), approximate=False))
