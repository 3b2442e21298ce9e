"""A run's model as its commits describe it, and params that are read on demand."""

from collections.abc import Mapping

import jax
import numpy as np
from jaxinf_models import ModelConfig, ModelFiles, config_to_json, family_of

from jaxinf.typing import DeferredArray, JsonValue, PyTree


def architecture_of(
    config: ModelConfig, files: ModelFiles | None
) -> dict[str, JsonValue]:
    """Returns the description of the model that each commit keeps for exports.

    Args:
      config: the model's configuration, with the head for its task.
      files: the files that it came from, if any.
    """
    family = family_of(config)
    document: dict[str, JsonValue] = {
        "model": family.name,
        "task": getattr(config, "head", family.tasks[0]),
        "fields": config_to_json(config),
    }
    if files is not None and files.checkpoint is not None:
        found = files.checkpoint.architecture
        document |= {"model_type": found.model_type, "extra": dict(found.extra)}
    return document


def held_params(params: PyTree) -> PyTree:
    """Reads `deferred_params` onto the JAX device."""
    return jax.tree.map(lambda leaf: jax.numpy.asarray(np.asarray(leaf)), params)


def is_deferred(params: PyTree) -> bool:
    """Whether any leaf has not been read yet."""
    return any(isinstance(leaf, DeferredArray) for leaf in jax.tree.leaves(params))


def describe_architecture(architecture: JsonValue) -> str:
    """Describes the model of a payload in a line; its fields may be anything."""
    if not isinstance(architecture, Mapping):
        return repr(architecture)
    fields = architecture.get("fields")
    sizes = fields if isinstance(fields, Mapping) else {}
    shown = ("num_layers", "num_features", "vocab_size")
    listed = ", ".join(f"{name} {sizes[name]!r}" for name in shown if name in sizes)
    adapted = ", with adapters" if "lora_alpha" in architecture else ""
    task = architecture.get("task")
    return f"{architecture.get('model')!r} for {task!r} ({listed}){adapted}"
