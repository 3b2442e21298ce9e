"""A Hugging Face checkpoint folder: config.json and safetensors, checked, then read.

Invariant: only headers are read until a leaf is requested, which is then read piece by
  piece; no file outside the folder is opened, but for the blobs of a hub's cache.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxinf.errors import ExchangeError
from jaxinf.exchange.huggingface_config import Architecture, read_config
from jaxinf.exchange.huggingface_names import TABLES, TensorName, WeightTable
from jaxinf.exchange.safetensors_format import read_header
from jaxinf.exchange.safetensors_source import index_places
from jaxinf.exchange.safetensors_writer import INDEX_NAME, WEIGHTS_NAME
from jaxinf.exchange.sources import FileArray, SourceArray, within
from jaxinf.io.buffers import aligned_array
from jaxinf.store import read_foreign
from jaxinf.typing import FLOAT_DTYPES, Array, DeferredArray

_PIECE_BYTES = 1 << 18
_MAX_LINES = 20
_LAYERS = ("num_layers", "num_decoder_layers")
_FREE = ("num_positions", "window", "max_distance", "num_labels")
"""Counts that shape no tensor, or not in every checkpoint."""

_OF_CLASSES = ("classifier.", "score.")
_CLASS_HEADS = ("classifier.weight", "score.weight")
_MOST_LABELS = 1 << 16
"""Limit without the weight of a classifier."""


class TensorLeaf(DeferredArray):
    """A leaf of our model, read from a tensor.

    Attributes:
      source: the tensor.
      axes: order of the tensor's axes in the leaf; empty for no change.
    """

    def __init__(
        self, source: SourceArray, axes: tuple[int, ...], dtype: np.dtype[Any]
    ) -> None:
        shape = source.shape
        super().__init__(tuple(shape[a] for a in axes) if axes else shape, dtype)
        self.source = source
        self.axes = axes

    def read(self) -> Array:
        """See `DeferredArray`; needs 256 KiB of memory beside the result.

        Raises:
          ExchangeError: the file has become shorter.
        """
        # The allocator may keep freed memory, which would add up for large leaves.
        result = aligned_array(self.shape, self.dtype)
        theirs = result.transpose(np.argsort(self.axes)) if self.axes else result
        for start, values in self.source.blocks(_PIECE_BYTES):
            box = tuple(
                slice(s, s + n) for s, n in zip(start, values.shape, strict=True)
            )
            theirs[(*box, ...)] = values
        return result


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
        """Reads config.json, the index and the headers.

        Raises:
          ExchangeError: a file is missing or damaged, the architecture is not known, or
            the index names files outside the folder.
        """
        if not path.is_dir():
            found = "a file" if path.exists() else "nothing"
            raise ExchangeError(
                f"{path}: expected a Hugging Face checkpoint folder, found {found}; "
                "check the path"
            )
        config = within(path, "config.json")
        document = _read_json(config)
        _check_precision(document, str(config))
        architecture = read_config(document, where=str(config))
        return cls(path, architecture, _read_tensors(path))

    @property
    def table(self) -> WeightTable:
        """The names of its tensors."""
        return TABLES[self.architecture.table]

    def check_counts(self) -> None:
        """Refuses a config with larger counts than its tensors can have.

        Laying out such a model could otherwise take forever.

        Raises:
          ExchangeError: names the count and its limit.
        """
        for name, count in self.architecture.fields.items():
            if type(count) is not int:
                continue
            limit, why = self._limit(name)
            if count > limit:
                raise ExchangeError(
                    f"{self.path / 'config.json'}: {name} of {count}, expected at most "
                    f"{limit}, {why}; give the config.json that belongs to the weights"
                )

    def _limit(self, name: str) -> tuple[int, str]:
        if name in _LAYERS:
            numbered = (re.sub(r"\.\d+\.", ".{}.", n, count=1) for n in self.tensors)
            most = max(Counter(numbered).values(), default=0)
            return most, "the number of tensors of one kind"
        if name == "num_labels":
            for head in _CLASS_HEADS:
                tensor = self.tensors.get(head)
                if tensor is not None and tensor.shape:
                    return tensor.shape[0], f"the rows of {head}"
            return _MOST_LABELS, f"for a checkpoint without {_CLASS_HEADS[0]}"
        if name in _FREE:
            return 1 << 31, "for any model"
        most = max((math.prod(x.shape) for x in self.tensors.values()), default=0)
        return most, "the elements of the largest tensor"

    def check_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Like `leaves`, but reads no tensor, so that tied ones may differ."""
        _Matcher(self, shapes, np.dtype(np.float32), reads=False).run()

    def leaves(
        self, shapes: Mapping[str, tuple[int, ...]], dtype: np.dtype[Any]
    ) -> dict[str, TensorLeaf | None]:
        """Finds each leaf of a model; reads tied tensors to compare them.

        Args:
          shapes: shapes of the model's leaves by path, keys joined by ``/``.
          dtype: dtype of the returned leaves.

        Returns:
          Leaves by path; None for a leaf of a new head, if the checkpoint's head is for
          another task.

        Raises:
          ExchangeError: tensors are missing, too many, or of other shapes, or tied ones
            differ; lists all.
        """
        return _Matcher(self, shapes, dtype).run()


class _Matcher:
    """Matches leaves for `HuggingFaceFolder.leaves`, and collects problems."""

    def __init__(
        self,
        folder: HuggingFaceFolder,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: np.dtype[Any],
        *,
        reads: bool = True,
    ) -> None:
        self._reads = reads
        self._where, self._table = folder.path, folder.table
        self._shapes, self._dtype = shapes, dtype
        self._names = {path: self._table.find(path) for path in shapes}
        expected = {name.theirs for name in self._names.values()}
        self._found = {
            self._full_name(name, expected): array
            for name, array in folder.tensors.items()
        }
        self._tied = {
            alias: name
            for alias, name in self._table.tied.items()
            if alias not in expected
            and name in expected
            and "score/kernel" not in shapes  # it has no output table
        }
        self._problems: list[str] = []

    def _full_name(self, name: str, expected: set[str]) -> str:
        """Returns the table's name of a tensor; files have older or bare names, too."""
        name = name.replace("LayerNorm.gamma", "LayerNorm.weight")
        name = name.replace("LayerNorm.beta", "LayerNorm.bias")
        full = self._table.prefix + name
        is_bare = name not in expected and (
            full in expected or self._table.is_unused(full)
        )
        return full if is_bare and not self._table.is_unused(name) else name

    def run(self) -> dict[str, TensorLeaf | None]:
        self._use_tied()
        new = self._new_heads()
        leaves = {
            path: None if path in new else self._leaf(path, name)
            for path, name in self._names.items()
        }
        self._check_left_over()
        if self._problems:
            shown = self._problems[:_MAX_LINES]
            more = len(self._problems) - len(shown)
            listed = "\n  - ".join([*shown, *([f"and {more} more"] if more else [])])
            raise ExchangeError(
                f"{self._where}: expected the tensors of its config.json, found:\n"
                f"  - {listed}\nNothing was written; copy the checkpoint anew, or give "
                "the config.json that belongs to it"
            )
        return leaves

    def _use_tied(self) -> None:
        """Uses a shared tensor under its other name, or compares the two."""
        for alias, name in self._tied.items():
            if alias not in self._found:
                continue
            if name not in self._found:
                self._found[name] = self._found.pop(alias)
            elif self._reads and not _same(self._found[alias], self._found[name]):
                self._problems.append(
                    f"{alias}: expected the values of {name}, with which the config "
                    "says that it is tied, found others"
                )

    def _new_heads(self) -> set[str]:
        """Returns the leaves of heads that the checkpoint lacks."""
        new: set[str] = set()
        for head in self._table.heads:
            below = [path for path in self._names if path.startswith(head)]
            below = [path for path in below if path not in new]
            if all(self._is_other(path) for path in below):
                new |= set(below)
        return new

    def _is_other(self, path: str) -> bool:
        """Whether a head's leaf is missing, or of another number of classes."""
        array = self._found.get(self._names[path].theirs)
        if array is None:  # a language model's table is missed, unless it has classes
            return path != "lm_head" or "score.weight" in self._found
        ours, theirs = self._shape(path), array.shape
        return (
            self._names[path].theirs.startswith(_OF_CLASSES)
            and ours[1:] == theirs[1:]
            and ours != theirs
        )

    def _shape(self, path: str) -> tuple[int, ...]:
        """Returns a leaf's shape with the axes in the tensor's order."""
        axes, shape = self._names[path].axes, self._shapes[path]
        return tuple(shape[a] for a in np.argsort(axes)) if axes else shape

    def _leaf(self, path: str, name: TensorName) -> TensorLeaf | None:
        array, shape = self._found.get(name.theirs), self._shape(path)
        if array is None:
            self._problems.append(f"{name.theirs}: missing")
        elif array.shape != shape:
            self._problems.append(
                f"{name.theirs}: expected shape {list(shape)}, found "
                f"{list(array.shape)}"
            )
        elif array.dtype not in FLOAT_DTYPES:
            self._problems.append(
                f"{name.theirs}: expected float32, bfloat16 or float16, found "
                f"{array.dtype}"
            )
        else:
            return TensorLeaf(array, name.axes, self._dtype)
        return None

    def _check_left_over(self) -> None:
        known = {name.theirs for name in self._names.values()} | set(self._tied)
        self._problems += [
            f"{name}: not a tensor of this model"
            for name in self._found
            if name not in known and not self._table.is_unused(name)
        ]


def read_config_file(path: Path) -> Architecture:
    """Reads a config.json that has no weights.

    Raises:
      ExchangeError: it cannot be read, or the architecture is not known.
    """
    document = read_foreign(path, dict[str, Any], "a config.json", "check the file")
    return read_config(document, where=str(path))


def _same(a: SourceArray, b: SourceArray) -> bool:
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    pairs = zip(a.blocks(_PIECE_BYTES), b.blocks(_PIECE_BYTES), strict=True)
    return all(x.tobytes() == y.tobytes() for (_, x), (_, y) in pairs)


def _read_tensors(folder: Path) -> dict[str, SourceArray]:
    """Returns by name the tensors of the index's files, or of the single file."""
    places = _places(folder)
    tensors: dict[str, SourceArray] = {}
    for file in sorted(set(places.values())) or [WEIGHTS_NAME]:
        path = within(folder, file)
        header = read_header(path)
        for name, info in header.tensors.items():
            if places and places.get(name) != file:
                raise ExchangeError(
                    f"{path}: holds {name}, which the index says is in "
                    f"{places.get(name, 'no file')}; copy the checkpoint anew"
                )
            offset = header.data_offset_bytes + info.offset_bytes
            tensors[name] = FileArray(name, info.shape, info.dtype, path, offset)
    missing = [name for name in places if name not in tensors]
    if missing:
        raise ExchangeError(
            f"{folder / INDEX_NAME}: expected the listed tensors in the files, found "
            f"no {', '.join(missing[:8])}; copy the checkpoint again"
        )
    return tensors


def _places(folder: Path) -> dict[str, str]:
    """Returns each tensor's file from the index; empty if there is only one file."""
    index = folder / INDEX_NAME
    if not index.exists():
        if not (folder / WEIGHTS_NAME).exists():
            raise ExchangeError(
                f"{folder}: expected {WEIGHTS_NAME} or {INDEX_NAME}, found neither; "
                "weights of other formats are not read: save them as safetensors "
                "(save_pretrained does)"
            )
        return {}
    return index_places(within(folder, INDEX_NAME))


def _check_precision(document: Any, where: str) -> None:
    """Refuses weights in few bits, which are other tensors than the model's."""
    held = document.get("quantization_config") if isinstance(document, dict) else None
    if not held:
        return
    method = held.get("quant_method") if isinstance(held, dict) else held
    bits: Any = held.get("bits") if isinstance(held, dict) else None
    if isinstance(held, dict):
        bits = bits or next((n for n in (4, 8) if held.get(f"load_in_{n}bit")), None)
    raise ExchangeError(
        f"{where}: expected weights of 16 or 32 bits, found quantization_config "
        f"({method!r}{f', {bits} bits' if bits else ''}); give the weights that these "
        "were made of"
    )


def _read_json(path: Path) -> Any:
    what, remedy = "a JSON document", "copy the checkpoint anew"
    return read_foreign(path, dict[str, Any], what, remedy)
