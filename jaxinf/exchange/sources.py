"""Another tool's checkpoint: its arrays, read block by block, and its tokenizer.

Invariant: no element is read before `TensorLeaf.read`. Of a tokenizer, only files with
known names are copied, whole and without a change; none is read by a link out of its
folder.
"""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from jaxinf.documents import MOST_BYTES, decode
from jaxinf.errors import ExchangeError, StoreIOError
from jaxinf.layout import LeafGrid, cut_portions
from jaxinf.transfer import (
    allocate_array,
    read_bounded,
    translated,
    write_bytes_atomically,
)
from jaxinf.typing import Array, DeferredArray

_PIECE_BYTES = 1 << 18
_Kind = TypeVar("_Kind")


@dataclass(frozen=True)
class SourceArray:
    """A tensor of a file, whose elements begin at `offset_bytes`; not read yet."""

    path: Path
    name: str  # keys joined by ".", percent-encoded as in a store
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    offset_bytes: int


class TensorLeaf(DeferredArray):
    """A leaf of params, read from a tensor when it is used.

    Args:
      axes: Order of the tensor's axes in the leaf; empty for no change.
    """

    def __init__(
        self, source: SourceArray, axes: tuple[int, ...], dtype: np.dtype[Any]
    ) -> None:
        shape = source.shape
        super().__init__(tuple(shape[a] for a in axes) if axes else shape, dtype)
        self.source, self.axes = source, axes

    def read(self) -> Array:
        """Reads with one block of memory beside the result.

        No memory map: the file may be truncated meanwhile.
        """
        source = self.source
        grid = LeafGrid(source.shape, tuple(max(1, n) for n in source.shape))
        itemsize = source.dtype.itemsize
        # The allocator may keep freed memory, which would add up for large leaves.
        result = allocate_array(self.shape, self.dtype)
        tensor = result.transpose(np.argsort(self.axes)) if self.axes else result
        with translated("read", source.path), open(source.path, "rb") as stream:
            for box in cut_portions(grid, _PIECE_BYTES // itemsize):
                values = np.empty(box.num_elements, source.dtype)
                stream.seek(source.offset_bytes + box.offset_elements * itemsize)
                if stream.readinto(values.view(np.uint8).data) < values.nbytes:
                    raise ExchangeError(
                        f"{source.path}: truncated in {source.name} while it was read; "
                        "copy the file anew"
                    )
                fd, end = stream.fileno(), stream.tell()
                os.posix_fadvise(fd, 0, end, os.POSIX_FADV_DONTNEED)
                tensor[(*box.slices, ...)] = values.reshape(box.extent)
        return result


def read_json_document(path: Path, kind: type[_Kind], what: str, remedy: str) -> _Kind:
    """Reads a JSON document of another tool, or raises ExchangeError; follows links."""
    try:
        return decode(read_bounded(path, MOST_BYTES), kind)
    except (StoreIOError, ValueError) as error:
        raise ExchangeError(
            f"{path}: expected {what}, found a document that cannot be read "
            f"({error}); {remedy}"
        ) from error


def path_within(folder: Path, name: str) -> Path:
    """Returns the path of a file in a folder whose links are a stranger's.

    A link may lead to another file of the folder. In a hub's cache, where the folder is
    ``snapshots/REVISION``, it may lead to a file of ``blobs``, too.

    Raises:
      ExchangeError: The name is a link, or behind one, that leads elsewhere.
    """
    path, root = folder / name, Path(os.path.realpath(folder))
    target = Path(os.path.realpath(path))
    is_blob = root.parent.name == "snapshots" and (
        target.parent == root.parent.parent / "blobs"
    )
    if not (is_blob or target.is_relative_to(root)):
        raise ExchangeError(
            f"{path}: expected a file in this folder, found a link to {target}, which "
            "is not followed; copy the file into the folder if it belongs there"
        )
    return path


# --- tokenizers: folder of weights ─► STORE/tokenizer/ ─► an export -------------------

VOCABULARIES = (
    *("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.txt"),
    *("sentencepiece.bpe.model", "vocab.json", "tekken.json"),
)
"""Files of which the folder of a tokenizer has at least one."""

_TOKENIZER_FILES = (
    *(*VOCABULARIES, "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "chat_template.jinja", "merges.txt"),
)
_MODEL_FILES = ("generation_config.json", "preprocessor_config.json")
_FOLDER = "tokenizer"


def read_tokenizer_files(
    *, tokenizer: Path | None = None, weights: Path | None = None
) -> dict[str, bytes]:
    """Reads the files of a tokenizer, each of at most 64 MiB, by name.

    The tokenizer is a folder or its ``tokenizer.json``; by default that of the weights.
    """
    if tokenizer is not None and not tokenizer.expanduser().is_dir():
        tokenizer = tokenizer.parent
    places = ((weights, _MODEL_FILES), (tokenizer or weights, _TOKENIZER_FILES))
    folders = [(place.expanduser(), names) for place, names in places if place]
    return {
        name: read_bounded(path_within(folder, name), MOST_BYTES)
        for folder, names in folders
        for name in names
        if (folder / name).is_file()
    }


def keep_tokenizer(store: Path, files: Mapping[str, bytes]) -> None:
    """Writes a tokenizer's files into a store, in place of those kept before."""
    place = store / _FOLDER
    shutil.rmtree(place, ignore_errors=True)
    if files:
        place.mkdir()
    for name, content in files.items():
        write_bytes_atomically(place / name, content)


def kept_tokenizer(beside: Mapping[str, bytes]) -> Mapping[str, bytes]:
    """Returns the tokenizer among the files that a store has beside its steps."""
    names = {f"{_FOLDER}/{name}": name for name in (*_TOKENIZER_FILES, *_MODEL_FILES)}
    return {names[place]: raw for place, raw in beside.items() if place in names}
