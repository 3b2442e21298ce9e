"""Initial weights from a Hugging Face checkpoint, read leaf by leaf.

Invariant: a run reads the config and the headers once, and they are checked before a
store is made; after that only one leaf at a time is in memory.
"""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jaxinf_models import (
    ModelConfig,
    abstract_params,
    config_from_json,
    config_to_json,
    family_of,
    make_model,
    split,
)

from jaxinf import compat, exchange
from jaxinf.errors import ExchangeError
from jaxinf.exchange import Architecture, HuggingFaceFolder
from jaxinf.typing import DeferredArray, JsonValue, PyTree

_MOST_LAYERS = 1000


@dataclasses.dataclass(frozen=True)
class ModelFiles:
    """A model from files, as they were when they were read.

    Attributes:
      config: the model's configuration, in float32.
      params: the tree of its params, with their shapes.
      checkpoint: the folder with its weights; None for a config.json without.
    """

    config: ModelConfig
    params: PyTree
    checkpoint: HuggingFaceFolder | None = None

    @classmethod
    def of_folder(cls, folder: Path) -> "ModelFiles":
        """Reads a checkpoint's config and headers (blocks).

        Raises:
          ExchangeError: the folder, its config or its headers cannot be read, or do not
            belong together.
        """
        checkpoint = HuggingFaceFolder.read(folder.expanduser().absolute())
        checkpoint.check_counts()
        path = checkpoint.path / "config.json"
        config, params = _config_of(checkpoint.architecture, path)
        checkpoint.leaves(_shapes(params), np.dtype(np.float32), compares=False)
        return cls(config, params, checkpoint)

    @classmethod
    def of_config(cls, path: Path) -> "ModelFiles":
        """Reads a config.json without weights (blocks).

        Raises:
          ExchangeError: the file cannot be read, or is the config of no model here.
        """
        found = exchange.read_config_file(path.expanduser())
        for name in ("num_layers", "num_decoder_layers"):
            if found.fields.get(name, 0) > _MOST_LAYERS:
                raise ExchangeError(
                    f"{path}: {name} of {found.fields[name]}, expected at most "
                    f"{_MOST_LAYERS}; larger models take too long to lay out"
                )
        return cls(*_config_of(found, path))


def _config_of(found: Architecture, path: Path) -> tuple[ModelConfig, PyTree]:
    """Returns the configuration, and the tree of the model's params."""
    try:
        config = config_from_json(found.model, found.fields)
        return config, abstract_params(config)[1]
    except (ValueError, TypeError, ArithmeticError) as error:
        raise ExchangeError(
            f"{path}: expected the config of a {found.model_type}, found one that "
            f"cannot be: {error}"
        ) from error


def _shapes(params: PyTree) -> dict[str, tuple[int, ...]]:
    return {_path(keys): leaf.shape for keys, leaf in _flat(params)}


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


def deferred_params(files: ModelFiles, config: ModelConfig, seed: int) -> PyTree:
    """Returns the params of a checkpoint as leaves that are read on demand.

    Args:
      config: the model's configuration, with the head for the task.
      seed: seed of a head that the checkpoint lacks.

    Returns:
      A tree like the model's, of `DeferredArray`s, and arrays for a new head.

    Raises:
      ExchangeError: tensors are missing, too many, or of other shapes; lists all.
    """
    assert files.checkpoint is not None, "a config.json alone has no weights"
    plain = dataclasses.replace(config, dtype="float32", param_dtype="float32")
    # Tracing a large model takes seconds.
    like = files.params if plain == files.config else abstract_params(plain)[1]
    leaves = files.checkpoint.leaves(_shapes(like), np.dtype(config.param_dtype))
    new = {path for path, leaf in leaves.items() if leaf is None}
    made = _new_leaves(config, seed, frozenset(new)) if new else {}
    return jax.tree_util.tree_map_with_path(
        lambda keys, _: leaves[_path(keys)] or made[_path(keys)], like
    )


def held_params(params: PyTree) -> PyTree:
    """Reads `deferred_params` onto the JAX device."""
    return jax.tree.map(lambda leaf: jax.numpy.asarray(np.asarray(leaf)), params)


def is_deferred(params: PyTree) -> bool:
    """Whether any leaf has not been read yet."""
    return any(isinstance(leaf, DeferredArray) for leaf in jax.tree.leaves(params))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _drawn(config: ModelConfig, seed: int, paths: frozenset[str]) -> PyTree:
    _, params = split(make_model(config, rngs=nnx.Rngs(seed)))
    return {_path(keys): leaf for keys, leaf in _flat(params) if _path(keys) in paths}


def _new_leaves(
    config: ModelConfig, seed: int, paths: frozenset[str]
) -> dict[str, np.ndarray]:
    return {path: np.asarray(x) for path, x in _drawn(config, seed, paths).items()}


def _flat(tree: PyTree) -> list[tuple[Any, Any]]:
    return jax.tree_util.tree_leaves_with_path(tree)


def _path(keys: Any) -> str:
    return "/".join(map(compat.key_name, keys))


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
