"""Initial weights from a Hugging Face checkpoint, read leaf by leaf.

Invariant: the whole config and all weights are checked before a store is made; after
that only one leaf at a time is in memory.
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

__all__ = [
    "architecture_of",
    "deferred_params",
    "describe_architecture",
    "held_params",
    "is_deferred",
    "read_config_file",
    "read_model_config",
]

_MOST_LAYERS = 1000


@functools.lru_cache(maxsize=4)
def _folder(path: Path) -> HuggingFaceFolder:
    return HuggingFaceFolder.read(path)


def read_model_config(folder: Path) -> ModelConfig:
    """Returns the configuration of a checkpoint's model, in float32.

    Raises:
      ExchangeError: the folder, its config or its headers cannot be read, or do not
        belong together.
    """
    return _config(folder.expanduser().absolute())


@functools.lru_cache(maxsize=4)
def _config(folder: Path) -> ModelConfig:
    checkpoint = _folder(folder)
    checkpoint.check_counts()
    config, shapes = _config_of(checkpoint.architecture, folder / "config.json")
    checkpoint.check_shapes(shapes)
    return config


@functools.lru_cache(maxsize=4)
def read_config_file(path: Path) -> ModelConfig:
    """Returns the configuration in a config.json without weights, in float32.

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
    return _config_of(found, path)[0]


def _config_of(
    found: Architecture, path: Path
) -> tuple[ModelConfig, dict[str, tuple[int, ...]]]:
    """Returns the configuration, and the shapes of the model's params by path."""
    try:
        config = config_from_json(found.model, found.fields)
        shapes = {path: leaf.shape for path, leaf in _leaves(config).items()}
    except (ValueError, TypeError, ArithmeticError) as error:
        raise ExchangeError(
            f"{path}: expected the config of a {found.model_type}, found one that "
            f"cannot be: {error}"
        ) from error
    return config, shapes


def _leaves(config: ModelConfig) -> dict[str, jax.ShapeDtypeStruct]:
    return {_path(keys): leaf for keys, leaf in _flat(_abstract(config))}


def _abstract(config: ModelConfig) -> PyTree:
    """Returns the tree of a model's params, with their shapes; dtypes are float32."""
    # Tracing a large model takes seconds.
    plain = dataclasses.replace(config, dtype="float32", param_dtype="float32")
    return _traced(plain)


@functools.lru_cache(maxsize=4)
def _traced(config: ModelConfig) -> PyTree:
    return abstract_params(config)[1]


def architecture_of(
    config: ModelConfig, folder: Path | None = None
) -> dict[str, JsonValue]:
    """Returns the description of the model that each commit keeps for exports.

    Args:
      config: the model's configuration, with the head for its task.
      folder: the folder of the checkpoint that it came from.
    """
    family = family_of(config)
    document: dict[str, JsonValue] = {
        "model": family.name,
        "task": getattr(config, "head", family.tasks[0]),
        "fields": config_to_json(config),
    }
    if folder is not None:
        found = _folder(folder.expanduser().absolute()).architecture
        document |= {"model_type": found.model_type, "extra": dict(found.extra)}
    return document


def deferred_params(folder: Path, config: ModelConfig, seed: int) -> PyTree:
    """Returns the params of a checkpoint as leaves that are read on demand.

    Args:
      folder: the checkpoint's folder.
      config: the model's configuration, with the head for the task.
      seed: seed of a head that the checkpoint lacks.

    Returns:
      A tree like the model's, of `DeferredArray`s, and arrays for a new head.

    Raises:
      ExchangeError: tensors are missing, too many, or of other shapes; lists all.
    """
    like = _abstract(config)
    shapes = {path: leaf.shape for path, leaf in _leaves(config).items()}
    checkpoint = _folder(folder.expanduser().absolute())
    leaves = checkpoint.leaves(shapes, np.dtype(config.param_dtype))
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
    return f"{architecture.get('model')!r} for {architecture.get('task')!r} ({listed})"
