"""Published weights: a Hugging Face folder as a model's function and its params.

Invariant: config and headers are read and checked at once; after that only one leaf at
a time is in memory. This module alone imports jaxinf, which reads the files.
"""

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxinf.errors import ExchangeError
from jaxinf.exchange import Architecture, HuggingFaceFolder, read_config_file

from .layers import DTypeName, ModelConfig
from .losses import TaskName
from .registry import (
    Params,
    abstract_params,
    config_for,
    config_from_json,
    make_model,
    split,
)

_MAX_LAYERS, _MAX_LABELS = 1000, 1 << 16
_SAMPLE_BYTES = 4096


@dataclasses.dataclass(frozen=True)
class Pretrained:
    """A model with published weights.

    Attributes:
      apply: ``apply(params, tokens, **options)``, the model's own call, with the
        options of its ``__call__``: float32 logits [batch, seq, vocab] of int tokens
        [batch, seq], or of classes [batch, labels]. It can be jitted, differentiated
        and streamed.
      params: nested dicts of leaves that are read when they are converted to NumPy.
        ``tx.init``, ``step.load`` and `jax.device_put` take them.
      shapes: the same tree of `jax.ShapeDtypeStruct`.
      config: the model's configuration.
    """

    apply: Callable[..., jax.Array]
    params: Params
    shapes: Params
    config: ModelConfig


def pretrained(
    folder: Path | str,
    task: TaskName | None = None,
    *,
    num_labels: int | None = None,
    dtype: DTypeName = "float32",
    param_dtype: DTypeName = "float32",
    seed: int = 0,
) -> Pretrained:
    """Reads a Hugging Face folder as a function of params; blocks for its headers.

    Args:
      folder: a local folder with config.json and safetensors.
      task: the task of the head; by default the model's usual one.
      num_labels: classes of a classification; by default the config's own number.
      dtype: dtype of activations.
      param_dtype: dtype of the params.
      seed: seed of a head that the folder lacks.

    Raises:
      jaxinf.errors.ExchangeError: the folder cannot be read, or its files do not belong
        together.
      ValueError: the model does not have the task.
    """
    files = ModelFiles.of_folder(Path(folder))
    config: Any = files.config
    if task is not None:
        config = config_for(config, task, num_labels=num_labels)
    config = dataclasses.replace(config, dtype=dtype, param_dtype=param_dtype)
    graphdef, shapes = abstract_params(config)

    def apply(params: Params, *inputs: Any, **options: Any) -> jax.Array:
        """Returns logits of tokens [batch, seq], T5's of both sides, or of images."""
        return nnx.merge(graphdef, params)(*inputs, **options)

    return Pretrained(apply, deferred_params(files, config, seed), shapes, config)


@dataclasses.dataclass(frozen=True)
class ModelFiles:
    """A model from files, as they were when they were read.

    Attributes:
      config: the model's configuration, in float32.
      params: the tree of its params, with their shapes.
      checkpoint: the folder with its weights; None for a config.json without.
    """

    config: ModelConfig
    params: Params
    checkpoint: HuggingFaceFolder | None = None

    @classmethod
    def of_folder(cls, folder: Path) -> "ModelFiles":
        """Reads a checkpoint's config and headers (blocks).

        Raises:
          ExchangeError: the folder, its config or its headers cannot be read, or do not
            belong together.
        """
        checkpoint = HuggingFaceFolder.read(folder.expanduser().absolute())
        path = checkpoint.path / "config.json"
        num_tensors = len(checkpoint.tensors)
        config, params = _make_config(checkpoint.architecture, path, num_tensors)
        checkpoint.leaves(_shapes(params), np.dtype(np.float32))
        return cls(config, params, checkpoint)

    @classmethod
    def of_config(cls, path: Path) -> "ModelFiles":
        """Reads a config.json without weights (blocks).

        Raises:
          ExchangeError: the file cannot be read, or is the config of no model here.
        """
        return cls(*_make_config(read_config_file(path.expanduser()), path))

    def weights_sha256(self) -> str | None:
        """Returns a digest of each tensor's name, shape, dtype and a sample.

        Blocks. A copy of the weights has the same one; a config.json alone has none.
        """
        if self.checkpoint is None:
            return None
        digest = hashlib.sha256()
        for name, tensor in sorted(self.checkpoint.tensors.items()):
            digest.update(f"{name} {tensor.shape} {tensor.dtype};".encode())
            middle = math.prod(tensor.shape) * tensor.dtype.itemsize // 2
            with tensor.path.open("rb") as stream:
                stream.seek(tensor.offset_bytes + middle)
                digest.update(stream.read(min(middle, _SAMPLE_BYTES)))
        return digest.hexdigest()


def _make_config(
    architecture: Architecture, path: Path, max_layers: int = _MAX_LAYERS
) -> tuple[ModelConfig, Params]:
    """Returns the configuration, and the tree of the model's params.

    Refuses one with more layers, which could take forever to lay out.
    """
    limits = dict.fromkeys(("num_layers", "num_decoder_layers"), max_layers)
    for name, limit in {**limits, "num_labels": _MAX_LABELS}.items():
        if (number := architecture.fields.get(name, 0)) > limit:
            raise ExchangeError(
                f"{path}: {name} of {number}, expected at most {limit}; give a smaller "
                "model, or the config.json that belongs to the weights"
            )
    try:
        config = config_from_json(architecture.model, architecture.fields)
        return config, abstract_params(config)[1]
    except (ValueError, TypeError, ArithmeticError) as error:
        raise ExchangeError(
            f"{path}: expected the config of a {architecture.model_type}, found one "
            f"that cannot be: {error}"
        ) from error


def deferred_params(files: ModelFiles, config: ModelConfig, seed: int) -> Params:
    """Returns the params of a checkpoint as leaves that are read on demand.

    A head that the checkpoint lacks has new arrays, by the seed.

    Raises:
      ExchangeError: tensors are missing, too many, or of other shapes; lists all.
    """
    assert files.checkpoint is not None, "a config.json alone has no weights"
    plain = dataclasses.replace(config, dtype="float32", param_dtype="float32")
    # Tracing a large model takes seconds.
    like = files.params if plain == files.config else abstract_params(plain)[1]
    leaves = files.checkpoint.leaves(_shapes(like), np.dtype(config.param_dtype))
    missing = frozenset(path for path, leaf in leaves.items() if leaf is None)
    new = _init_leaves(config, seed, missing) if missing else {}
    return jax.tree_util.tree_map_with_path(
        lambda keys, _: leaves[_path(keys)] or np.asarray(new[_path(keys)]), like
    )


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _init_leaves(
    config: ModelConfig, seed: int, paths: frozenset[str]
) -> Mapping[str, jax.Array]:
    _, params = split(make_model(config, rngs=nnx.Rngs(seed)))
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {_path(keys): leaf for keys, leaf in leaves if _path(keys) in paths}


def _shapes(params: Params) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {_path(keys): leaf.shape for keys, leaf in leaves}


def _path(keys: Any) -> str:
    return "/".join(str(key.key) for key in keys)
