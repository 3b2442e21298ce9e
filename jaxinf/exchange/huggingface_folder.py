"""Hugging Face checkpoint folders: read, and written from a step's params.

Invariant: only headers are read until a leaf is requested, which is then read piece by
piece; no file outside the folder is opened, but for the blobs of a hub's cache.
Import and export use the same table of names and axes, so that an imported checkpoint
is exported to the bit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxinf.errors import ExchangeError
from jaxinf.exchange.huggingface_config import (
    Architecture,
    read_config_file,
    write_config,
)
from jaxinf.exchange.huggingface_families import FAMILIES, Family
from jaxinf.exchange.params import (
    ExportOptions,
    ParamArray,
    committed_architecture,
    param_arrays,
)
from jaxinf.exchange.safetensors_files import read_safetensors, write_tensors
from jaxinf.exchange.sources import SourceArray, TensorLeaf, path_within
from jaxinf.store import CommittedStep, dtype_of
from jaxinf.typing import FLOAT_DTYPES

_MAX_LINES = 20
_CLASS_TENSORS = ("classifier.", "score.")


@dataclass(frozen=True)
class HuggingFaceFolder:
    """A checkpoint whose headers and config.json have been read."""

    path: Path
    architecture: Architecture
    tensors: Mapping[str, SourceArray]

    @classmethod
    def read(cls, path: Path) -> "HuggingFaceFolder":
        """Reads config.json, the index and the headers, of this folder alone."""
        if not path.is_dir():
            raise ExchangeError(f"{path}: expected a folder, found none; mend the path")
        architecture = read_config_file(path_within(path, "config.json"))
        if not (tensors := read_safetensors(path)):
            raise ExchangeError(
                f"{path}: expected weights as safetensors, found none; weights of "
                "other formats are not read: save them with save_pretrained"
            )
        return cls(path, architecture, tensors)

    def leaves(
        self, shapes: Mapping[str, tuple[int, ...]], dtype: np.dtype[Any]
    ) -> dict[str, TensorLeaf | None]:
        """Finds each leaf of a model; of tied tensors one, as transformers does.

        Paths are keys joined by ``/``. A leaf is None if the checkpoint's head is for
        another task, so that it is new.

        Raises:
          ExchangeError: Tensors are missing, too many, or of other shapes.
        """
        family = self.architecture.family
        names_and_axes = {path: family.find_tensor(path) for path in shapes}
        names = {path: name for path, (name, _) in names_and_axes.items()}
        expected = set(names.values())
        arrays = {
            _full_name(name, family, expected): array
            for name, array in self.tensors.items()
        }
        for alias, name in family.tied.items():
            if alias in arrays and alias not in expected and name in expected:
                arrays.setdefault(name, arrays.pop(alias))
        file_shapes = {
            path: tuple(shapes[path][a] for a in np.argsort(axes)) or shapes[path]
            for path, (_, axes) in names_and_axes.items()
        }
        new = _find_new_heads(family, names, file_shapes, arrays)
        leaves, problems = dict[str, TensorLeaf | None](), list[str]()
        for path, (name, axes) in names_and_axes.items():
            array = None if path in new else arrays.get(name)
            if path not in new and (problem := _problem(array, file_shapes[path])):
                problems.append(f"{name}: {problem}")
            leaves[path] = array and TensorLeaf(array, axes, dtype)
        problems += [
            f"{name}: not a tensor of this model"
            for name in arrays
            if name not in expected and not family.is_unused(name)
        ]
        if problems:
            lines = "".join(f"\n  - {problem}" for problem in problems[:_MAX_LINES])
            raise ExchangeError(
                f"{self.path}: expected the tensors of its config.json, found "
                f"{len(problems)} problems:{lines}\nNothing was written; copy the "
                "checkpoint anew, or give the config.json that belongs to it"
            )
        return leaves


def _full_name(name: str, family: Family, expected: set[str]) -> str:
    """Returns the family's name of a tensor; files have older or bare names, too."""
    name = name.replace("LayerNorm.gamma", "LayerNorm.weight")
    name = name.replace("LayerNorm.beta", "LayerNorm.bias")
    if name in expected or family.is_unused(name):
        return name
    full = family.prefix + name
    return full if full in expected or family.is_unused(full) else name


def _find_new_heads(
    family: Family,
    names: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
    arrays: Mapping[str, SourceArray],
) -> set[str]:
    """Returns the leaves of heads that the checkpoint lacks."""

    def is_new(path: str) -> bool:
        """Whether a head's leaf is missing, or has another number of classes."""
        name, shape = names[path], shapes[path]
        array = arrays.get(name)
        if array is None:  # a language model's table is missed, unless it has classes
            return path != "lm_head" or "score.weight" in arrays
        has_classes = name.startswith(_CLASS_TENSORS) and shape[1:] == array.shape[1:]
        return has_classes and shape != array.shape

    new: set[str] = set()
    for head in family.heads:
        below = [p for p in names if p.startswith(head) and p not in new]
        if all(map(is_new, below)):
            new |= set(below)
    return new


def _problem(array: SourceArray | None, shape: tuple[int, ...]) -> str | None:
    if array is None:
        return "missing"
    if array.shape != shape:
        return f"expected shape {list(shape)}, found {list(array.shape)}"
    if array.dtype not in FLOAT_DTYPES:
        return f"expected float32, bfloat16 or float16, found {array.dtype}"
    return None


_CLASS_HEADS = ("score/kernel", "classifier/kernel", "head/classifier/kernel")


def export_huggingface(
    step: CommittedStep,
    destination: Path,
    *,
    average: bool = False,
    dtype: str | None = None,
    like: Path | None = None,
    beside: Mapping[str, bytes] | None = None,
    options: ExportOptions | None = None,
) -> None:
    """Writes a step's params as ``transformers`` loads them; blocks until durable.

    Adapters are added to their matrices. The step's commit must name the model, as
    `jaxinf.train` does by ``architecture`` in the payload; for a loop of one's own with
    `jaxinf_models.pretrained`, give the folder that the params came from.

    Args:
      step, destination, average, options: Arguments of `export_safetensors`.
      dtype: Dtype of the tensors: float32, bfloat16 or float16, rounded to nearest
        even; by default that of the params on the JAX device.
      like: A folder of a model with these params; by default the commit names it.
      beside: Further files by name: those of the tokenizer.

    Raises:
      ExchangeError: The commit names no model, or one with other leaves.
      FileExistsError, StoreError: As for `export_safetensors`.
    """
    params = param_arrays(step, average=average)
    if like is None:
        architecture, task = _architecture_and_task(step)
    else:
        architecture, task = _architecture_like(params, like)
    tensors = _tensors(params, architecture, dtype)
    config = write_config(architecture, task, tensors[0].dtype.name)
    files = {**(beside or {}), "config.json": config}
    options = options or ExportOptions()
    write_tensors(destination, tensors, {"format": "pt"}, files, options)


def _architecture_and_task(step: CommittedStep) -> tuple[Architecture, str]:
    record = committed_architecture(step)
    if record.get("model") not in FAMILIES:
        raise ExchangeError(
            f"{step.path}: expected a step of jaxinf.train, whose commit says which "
            "model it is of, found none that says so; give the folder that its params "
            "came from (--like FOLDER), or export it as safetensors"
        )
    fields, extra = (
        value if isinstance(value, Mapping) else {}
        for value in (record.get("fields"), record.get("extra"))
    )
    model, kind = str(record["model"]), str(record.get("model_type", ""))
    return Architecture(model, fields, kind, extra), str(record.get("task"))


def _architecture_like(
    params: Sequence[ParamArray], folder: Path
) -> tuple[Architecture, str]:
    """Returns the model of a folder, if these are its params, and its head's task."""
    checkpoint = HuggingFaceFolder.read(folder)
    architecture = checkpoint.architecture
    _tensors(params, architecture, None)  # refuses other leaves
    shapes = {param.leaf.name: tuple(param.leaf.shape) for param in params}
    checkpoint.leaves(shapes, np.dtype(np.float32))
    heads = [shapes[head] for head in _CLASS_HEADS if head in shapes]
    if not heads:
        classes = architecture.family.classes
        return architecture, next(task for task in classes if task != "classification")
    fields = {**architecture.fields, "num_labels": heads[0][1]}
    return replace(architecture, fields=fields), "classification"


def _tensors(
    params: Sequence[ParamArray], architecture: Architecture, dtype: str | None
) -> list[ParamArray]:
    tensors = []
    for param in params:
        try:
            name, axes = architecture.family.find_tensor(param.leaf.name)
        except KeyError as error:
            raise ExchangeError(
                f"{param.step.path}: leaf {param.leaf.name} is none of a "
                f"{architecture.model}'s, which the commit says this is"
            ) from error
        order = tuple(np.argsort(axes).tolist())
        tensor_dtype = dtype_of(dtype or param.leaf.dtype)
        tensors.append(replace(param, name=name, dtype=tensor_dtype, axes=order))
    return tensors
