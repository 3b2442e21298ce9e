"""Safetensors files, one or several, as arrays to import.

Invariant: a name is in one file only, and every file is whole.
"""

import json
from pathlib import Path

from jaxinf.errors import ExchangeError
from jaxinf.exchange.safetensors_format import read_header
from jaxinf.exchange.safetensors_writer import INDEX_NAME
from jaxinf.exchange.sources import FileArray, SourceArray

__all__ = ["index_places", "is_safetensors", "read_safetensors"]

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


def index_places(index: Path) -> dict[str, str]:
    """Each tensor's file, as an index says.

    Raises:
      ExchangeError: the index cannot be read, or names a file outside its folder.
    """
    try:
        places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        items = dict(places).items()
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ExchangeError(
            f"{index}: expected the index of safetensors files, found a document that "
            f"cannot be read ({type(error).__name__}: {error}); copy it anew"
        ) from error
    for name, file in items:
        is_own = isinstance(file, str) and Path(file).name == file
        if not is_own or not file.endswith(_SUFFIX):
            raise ExchangeError(
                f"{index}: {name} is in {file!r}, expected the name of a safetensors "
                "file in the same folder; nothing outside it is read"
            )
    return dict(items)


def _in_directory(path: Path) -> list[Path]:
    if not path.is_dir():
        return []
    index = path / INDEX_NAME
    if not index.is_file():
        return sorted(path.glob("*" + _SUFFIX))
    return [path / name for name in sorted(set(index_places(index).values()))]
