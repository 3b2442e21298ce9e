"""A Hugging Face checkpoint folder: config.json and safetensors, checked, then read.

Invariant: only headers are read until a leaf is requested, which is then read piece by
  piece; no file outside the folder is opened, but for the blobs of a hub's cache.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxinf.errors import ExchangeError
from jaxinf.exchange.huggingface_config import Architecture, read_config_file
from jaxinf.exchange.huggingface_families import Family
from jaxinf.exchange.safetensors_files import is_safetensors, read_safetensors
from jaxinf.exchange.sources import (
    SourceArray,
    TensorLeaf,
    listed,
    within,
)
from jaxinf.typing import FLOAT_DTYPES

_MAX_LINES = 20
_LAYERS = ("num_layers", "num_decoder_layers")
# Counts that shape no tensor, or not in every checkpoint, and their limits.
_FREE = {"num_positions": 1 << 31, "window": 1 << 31, "max_distance": 1 << 31}
_FREE |= {"num_labels": 1 << 16}

_OF_CLASSES = ("classifier.", "score.")


@dataclass(frozen=True)
class HuggingFaceFolder:
    """A checkpoint whose headers have been read.

    Attributes:
      path: the folder.
      architecture: the architecture in its config.json.
      tensors: the tensors by name.
    """

    path: Path
    architecture: Architecture
    tensors: Mapping[str, SourceArray]

    @classmethod
    def read(cls, path: Path) -> "HuggingFaceFolder":
        """Reads config.json, the index and the headers, of this folder alone."""
        if not path.is_dir():
            found = "a file" if path.exists() else "nothing"
            raise ExchangeError(
                f"{path}: expected a Hugging Face checkpoint folder, found {found}; "
                "check the path"
            )
        architecture = read_config_file(within(path, "config.json"))
        if not is_safetensors(path):
            raise ExchangeError(
                f"{path}: expected weights as safetensors, found none; weights of "
                "other formats are not read: save them with save_pretrained"
            )
        return cls(path, architecture, read_safetensors(path))

    def check_counts(self) -> None:
        """Refuses a config with larger counts than its tensors can have.

        Laying out such a model could otherwise take forever.
        """
        largest = max((math.prod(x.shape) for x in self.tensors.values()), default=0)
        limits: dict[str, int] = dict.fromkeys(_LAYERS, len(self.tensors))
        limits |= _FREE
        for name, count in self.architecture.fields.items():
            most = limits.get(name, largest)
            if type(count) is int and count > most:
                raise ExchangeError(
                    f"{self.path / 'config.json'}: {name} of {count}, expected at most "
                    f"{most} for tensors as they are here; give the config.json that "
                    "belongs to the weights"
                )

    def leaves(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: np.dtype[Any],
        *,
        compares: bool = True,
    ) -> dict[str, TensorLeaf | None]:
        """Finds each leaf of a model; reads tied tensors to compare them.

        Args:
          shapes: shapes of the model's leaves by path, keys joined by ``/``.
          dtype: dtype of the returned leaves.
          compares: whether tied tensors are read.

        Returns:
          Leaves by path; None for a leaf of a new head, if the checkpoint's head is for
          another task.

        Raises:
          ExchangeError: tensors are missing, too many, or of other shapes, or tied ones
            differ; lists all.
        """
        family = self.architecture.family
        tensors = {path: family.find(path) for path in shapes}
        names = {path: name for path, (name, _) in tensors.items()}
        expected = set(names.values())
        found = {
            _full_name(name, family, expected): array
            for name, array in self.tensors.items()
        }
        tied = {
            alias: name
            for alias, name in family.tied.items()
            if alias not in expected
            and name in expected
            and "score/kernel" not in shapes  # it has no output table
        }
        problems: list[str] = []
        for alias, name in tied.items():
            if alias in found and name not in found:
                found[name] = found.pop(alias)
            elif alias in found and compares and not _same(found[alias], found[name]):
                problems.append(
                    f"{alias}: expected the values of {name}, with which the config "
                    "says that it is tied, found others"
                )
        wanted = {  # shapes there
            path: tuple(shapes[path][a] for a in np.argsort(axes)) or shapes[path]
            for path, (_, axes) in tensors.items()
        }
        new = _new_heads(family, names, wanted, found)
        leaves: dict[str, TensorLeaf | None] = {}
        for path, (name, axes) in tensors.items():
            array = None if path in new else found.get(name)
            if path not in new and (problem := _problem(array, wanted[path])):
                problems.append(f"{name}: {problem}")
            leaves[path] = array and TensorLeaf(array, axes, dtype)
        problems += [
            f"{name}: not a tensor of this model"
            for name in found
            if name not in expected and name not in tied and not family.is_unused(name)
        ]
        if problems:
            raise ExchangeError(
                f"{self.path}: expected the tensors of its config.json, found:"
                f"{listed(problems, _MAX_LINES)}\nNothing was written; copy the "
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


def _new_heads(
    family: Family,
    names: Mapping[str, str],
    wanted: Mapping[str, tuple[int, ...]],
    found: Mapping[str, SourceArray],
) -> set[str]:
    """Returns the leaves of heads that the checkpoint lacks."""

    def is_other(path: str) -> bool:
        """Whether a head's leaf is missing, or of another number of classes."""
        name, ours = names[path], wanted[path]
        array = found.get(name)
        if array is None:  # a language model's table is missed, unless it has classes
            return path != "lm_head" or "score.weight" in found
        is_of_classes = name.startswith(_OF_CLASSES) and ours[1:] == array.shape[1:]
        return is_of_classes and ours != array.shape

    new: set[str] = set()
    for head in family.heads:
        below = [p for p in names if p.startswith(head) and p not in new]
        if all(map(is_other, below)):
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


def _same(a: SourceArray, b: SourceArray) -> bool:
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    pairs = zip(a.blocks(), b.blocks(), strict=True)
    return all(x.tobytes() == y.tobytes() for (_, x), (_, y) in pairs)
