"""Models in Flax NNX, installed as `jaxinf_models`.

Invariant: definitions only; nothing here imports jaxinf.
"""

from .gpt2 import (
    GPT2,
    PRESETS,
    GPT2Config,
    abstract_params,
    loss,
    num_params,
    split,
)
from .sampling import generate

__all__ = [
    "GPT2",
    "PRESETS",
    "GPT2Config",
    "abstract_params",
    "generate",
    "loss",
    "num_params",
    "split",
]
