"""GPT-2 in Flax NNX: the published architecture, small enough to read in one sitting.

Invariant: this module knows nothing of jaxinf. A `GPT2` holds only `nnx.Param`s, with
string keys all the way down (`h0/attn/qkv/kernel`), so that `split` gives a plain
nested dict that any optimizer or store can take.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import jax
from flax import nnx

from .blocks import MLP, Decoder, FusedAttention
from .layers import (
    Key,
    ModelConfig,
    check_length,
    dropout,
    embedding,
    layer_norm,
    look_up,
    positions_in,
    split_key,
)


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
    norm_epsilon: ClassVar[float] = 1e-5

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


class GPT2(Decoder):
    """GPT-2, with the token embedding as its output head, or one for classes."""

    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs):
        self.config = config
        self.wte = embedding(config, config.vocab_size, rngs=rngs)
        self.wpe = embedding(config, config.num_positions, rngs=rngs)
        self.add_blocks((layer_norm, FusedAttention, MLP), rngs=rngs)

    def _embed(
        self, tokens: jax.Array, segments: jax.Array | None, key: Key
    ) -> tuple[jax.Array, Key, dict[str, Any]]:
        seq = tokens.shape[-1]
        key_0, key = split_key(key, 2)
        x = look_up(self.config, self.wte, tokens)
        check_length("GPT2.embed", seq, self.config.num_positions)
        if segments is None:
            x = x + self.wpe[...][:seq].astype(self.config.dtype)
        else:
            x = x + look_up(self.config, self.wpe, positions_in(segments))
        return dropout(x, self.config.dropout, key_0), key, {}
