"""Safetensors files, one or several, as arrays to import.

Invariant: a name is in one file only, and every file is complete.
"""

from pathlib import Path
from typing import Annotated

import msgspec

from jaxinf.documents import pattern
from jaxinf.errors import ExchangeError
from jaxinf.exchange.safetensors_format import read_header
from jaxinf.exchange.safetensors_writer import INDEX_NAME
from jaxinf.exchange.sources import FileArray, SourceArray, within
from jaxinf.store import read_foreign

_SUFFIX = ".safetensors"
_FILE = pattern(
    r"[^./\0][^/\0]*\.safetensors",
    "the name of a safetensors file in the same folder; nothing outside it is read",
    255,
)


class _Index(msgspec.Struct):
    """What is read of ``model.safetensors.index.json``."""

    weight_map: dict[str, Annotated[str, _FILE]]


def is_safetensors(path: Path) -> bool:
    """Whether a path is a safetensors file, or a directory of some."""
    return path.name.endswith(_SUFFIX) or bool(_in_directory(path))


def read_safetensors(path: Path) -> dict[str, SourceArray]:
    """Reads the headers of a file, or of all files of a directory.

    Returns:
      Arrays by name, with ``/`` in names replaced by ``.``.

    Raises:
      ExchangeError: a file is missing or damaged, or two tensors have the same name.
    """
    arrays: dict[str, SourceArray] = {}
    for file in _in_directory(path) if path.is_dir() else [path]:
        header = read_header(file)
        for key, info in header.tensors.items():
            name = key.replace("/", ".")
            if name in arrays:
                raise ExchangeError(
                    f"{file}: holds {key}, and so does another file of {path}; give "
                    "one file, or a directory of the files of one model"
                )
            offset_bytes = header.data_offset_bytes + info.offset_bytes
            arrays[name] = FileArray(name, info.shape, info.dtype, file, offset_bytes)
    return arrays


def index_places(index: Path) -> dict[str, str]:
    """Returns each tensor's file from an index.

    Raises:
      ExchangeError: the index cannot be read, or names a file outside its folder.
    """
    what = "the index of safetensors files"
    return read_foreign(index, _Index, what, "copy it anew").weight_map


def _in_directory(path: Path) -> list[Path]:
    if not path.is_dir():
        return []
    index = path / INDEX_NAME
    if index.is_file():
        names = sorted(set(index_places(within(path, INDEX_NAME)).values()))
    else:
        names = sorted(file.name for file in path.glob("*" + _SUFFIX))
    return [within(path, name) for name in names]
