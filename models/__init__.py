"""Models in Flax NNX, installed as `jaxinf_models`.

Invariant: definitions only; nothing here imports jaxinf.
"""

from .gpt2 import GPT2, PRESETS, GPT2Config
from .layers import ModelConfig
from .losses import BATCH_FIELDS, Batch, Scores, TaskName, loss, score, task_loss
from .registry import (
    MODELS,
    ModelFamily,
    abstract_params,
    config_for,
    family_of,
    make_model,
    num_params,
    split,
)
from .sampling import generate

__all__ = [
    "BATCH_FIELDS",
    "GPT2",
    "MODELS",
    "PRESETS",
    "Batch",
    "GPT2Config",
    "ModelConfig",
    "ModelFamily",
    "Scores",
    "TaskName",
    "abstract_params",
    "config_for",
    "family_of",
    "generate",
    "loss",
    "make_model",
    "num_params",
    "score",
    "split",
    "task_loss",
]
