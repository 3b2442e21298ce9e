"""ViT (Dosovitskiy et al. 2021): a pre-norm encoder over patches of an image.

Invariant: images are [batch, height, width, channels], all of the config's size.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from .blocks import Block, EncoderAttention, EncoderConfig, EncoderMLP
from .layers import (
    Key,
    Remat,
    blocks_of,
    dropout,
    layer_norm,
    linear,
    normal_param,
    run_blocks,
    split_key,
)


@dataclasses.dataclass(frozen=True)
class ViTConfig(EncoderConfig):
    """Shape and precision of a ViT."""

    image_size: int  # height and width
    patch_size: int
    num_channels: int = 3
    num_labels: int = 1000
    norm_epsilon: ClassVar[float] = 1e-12

    def __post_init__(self):
        super().__post_init__()
        self.check_divides("patch_size", "image_size")

    @property
    def num_patches(self) -> int:
        return (self.image_size // self.patch_size) ** 2


# Layers, heads, features, hidden, image size, patch size.
PRESETS: Mapping[str, ViTConfig] = {
    "nano": ViTConfig(4, 4, 128, 512, 32, 4, num_labels=10),
    "base": ViTConfig(12, 12, 768, 3072, 224, 16),
    "large": ViTConfig(24, 16, 1024, 4096, 224, 16),
    "huge": ViTConfig(32, 16, 1280, 5120, 224, 14),
}


class Patches(nnx.Module):
    """Maps images to tokens: a linear layer over each patch."""

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs):
        self.config = config
        size, num = config.patch_size, config.num_features
        shape = (size, size, config.num_channels, num)
        self.kernel = normal_param(config, shape, rngs=rngs)
        self.bias = nnx.Param(jnp.zeros(num, jnp.dtype(config.param_dtype)))

    def __call__(self, images: jax.Array) -> jax.Array:
        """Maps [batch, height, width, channels] to [batch, patches, features].

        Raises:
          ValueError: the images do not have the config's size.
        """
        size, image_size = self.config.patch_size, self.config.image_size
        expected = (image_size, image_size, self.config.num_channels)
        if images.shape[1:] != expected:
            raise ValueError(
                f"ViT: expected images of {expected}, height, width and channels, got "
                f"{images.shape[1:]}"
            )
        side = image_size // size
        x = images.reshape(-1, side, size, side, size, expected[2])
        x = x.transpose(0, 1, 3, 2, 4, 5).reshape(
            -1, side * side, size**2 * expected[2]
        )
        dtype = jnp.dtype(self.config.dtype)
        kernel = self.kernel[...].astype(dtype).reshape(x.shape[-1], -1)
        return x.astype(dtype) @ kernel + self.bias[...].astype(dtype)


class ViT(nnx.Module):
    """ViT with a linear classifier on the features of a class token."""

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs):
        self.config = config
        num, num_places = config.num_features, config.num_patches + 1
        self.patches = Patches(config, rngs=rngs)
        self.cls = normal_param(config, (1, 1, num), rngs=rngs)
        self.wpe = normal_param(config, (1, num_places, num), rngs=rngs)
        parts = (layer_norm, EncoderAttention, EncoderMLP)
        for i in range(config.num_layers):
            setattr(self, f"h{i}", Block(config, parts, rngs=rngs))
        self.ln_f = layer_norm(config, rngs=rngs)
        self.classifier = linear(config, num, config.num_labels, rngs=rngs)

    def embed(self, images: jax.Array) -> jax.Array:
        """Returns the class token and patches: [batch, 1 + patches, features]."""
        x = self.patches(images)
        cls = jnp.broadcast_to(self.cls[...].astype(x.dtype), (len(x), 1, x.shape[-1]))
        return jnp.concatenate([cls, x], axis=1) + self.wpe[...].astype(x.dtype)

    def __call__(
        self, images: jax.Array, *, key: Key = None, remat: Remat = None
    ) -> jax.Array:
        """Maps [batch, height, width, channels] to float32 logits [batch, labels]."""
        key_0, key = split_key(key, 2)
        x = dropout(self.embed(images), self.config.dropout, key_0)
        blocks = blocks_of(self, self.config.num_layers)
        x = self.ln_f(run_blocks(blocks, x, key=key, remat=remat))
        return self.classifier(x[:, 0]).astype(jnp.float32)
