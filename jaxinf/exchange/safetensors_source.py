"""Safetensors files, one or several, as arrays to import.

Invariant: a name is in one file only, and every file is whole.
"""

import json
from pathlib import Path

from jaxinf.errors import ExchangeError
from jaxinf.exchange.safetensors_export import INDEX_NAME
from jaxinf.exchange.safetensors_format import read_header
from jaxinf.exchange.sources import FileArray, SourceArray

__all__ = ["is_safetensors", "read_safetensors"]

_SUFFIX = ".safetensors"


def is_safetensors(path: Path) -> bool:
    """Whether a path is a safetensors file, or a directory of some."""
    return path.name.endswith(_SUFFIX) or bool(_in_directory(path))


def read_safetensors(path: Path) -> dict[str, SourceArray]:
    """Reads the headers of a file, or of all files of a directory.

    Returns:
      By name, ``/`` in it read as ``.``.

    Raises:
      ExchangeError: a file is missing or damaged, or a name comes twice.
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


def _in_directory(path: Path) -> list[Path]:
    if not path.is_dir():
        return []
    index = path / INDEX_NAME
    if not index.is_file():
        return sorted(path.glob("*" + _SUFFIX))
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ExchangeError(
            f"{index}: expected the index of safetensors files, found a document that "
            f"cannot be read ({type(error).__name__}: {error}); copy it anew"
        ) from error
    return [path / str(name) for name in sorted(names)]
