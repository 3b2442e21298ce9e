"""Models in Flax NNX, installed as `jaxinf_models`.

Invariant: definitions only, which import nothing of jaxinf; `pretrained` alone reads
files, by it.
"""

from .bert import Bert, BertConfig
from .bloom import Bloom, BloomConfig
from .gpt2 import GPT2, PRESETS, GPT2Config
from .layers import ModelConfig
from .llama import Llama, LlamaConfig, RopeScaling
from .losses import BATCH_FIELDS, Batch, Scores, TaskName, loss, score, task_loss
from .registry import (
    MODELS,
    ModelFamily,
    abstract_params,
    config_for,
    config_from_json,
    config_to_json,
    family_of,
    make_model,
    num_params,
    split,
)
from .t5 import T5, T5Config
from .vit import ViT, ViTConfig
from .weights import ModelFiles, Pretrained, deferred_params, pretrained

__all__ = [
    "BATCH_FIELDS",
    "GPT2",
    "MODELS",
    "PRESETS",
    "T5",
    "Batch",
    "Bert",
    "BertConfig",
    "Bloom",
    "BloomConfig",
    "GPT2Config",
    "Llama",
    "LlamaConfig",
    "ModelConfig",
    "ModelFamily",
    "ModelFiles",
    "Pretrained",
    "RopeScaling",
    "Scores",
    "T5Config",
    "TaskName",
    "ViT",
    "ViTConfig",
    "abstract_params",
    "config_for",
    "config_from_json",
    "config_to_json",
    "deferred_params",
    "family_of",
    "loss",
    "make_model",
    "num_params",
    "pretrained",
    "score",
    "split",
    "task_loss",
]
