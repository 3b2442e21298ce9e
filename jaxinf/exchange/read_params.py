"""Params of another tool's checkpoint, by their exact names.

A checkpoint that stock Orbax wrote is opened without Orbax: ``_METADATA`` lists the
arrays, and tensorstore opens each: zarr or zarr v3, in OCDBT or in plain files.

Invariant: everything is checked before an element is read, and a leaf is read when it
  is used, one at a time. An array's name has all keys of its path, except a last
  ``value`` without siblings: Flax adds this key for a variable.
"""

import math
import os
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import tensorstore
from msgspec import Meta

from jaxinf.documents import pattern
from jaxinf.errors import ExchangeError
from jaxinf.exchange.safetensors_files import is_safetensors, read_safetensors
from jaxinf.exchange.sources import Blocks, SourceArray, TensorLeaf, listed
from jaxinf.program import leaf_infos, with_leaves
from jaxinf.store import encode_key, read_foreign
from jaxinf.typing import FLOAT_DTYPES, PathLikeStr, PyTree

_MAX_LINES = 40


def read_arrays(path: Path) -> dict[str, SourceArray]:
    """Returns by name the arrays of an Orbax checkpoint or of safetensors files."""
    if is_safetensors(path):
        return read_safetensors(path)
    if path.is_dir() or _is_orbax(path):
        return _read_orbax(path)
    found = "another file" if path.exists() else "nothing"
    raise ExchangeError(
        f"{path}: expected an Orbax checkpoint or safetensors, found {found}; check "
        "the path"
    )


def read_params(path: PathLikeStr, like: PyTree, *, place: str = "") -> PyTree:
    """Opens params by their names, for the ``tx.init`` of `jaxinf.smart_update`.

    A leaf's array has the leaf's path as its name, keys joined by ``.`` or ``/``. A
    float of another width is rounded to nearest even, float64 to float32 first.

    Args:
      path: an Orbax checkpoint, an export, a safetensors file or a directory of such.
      like: a tree like the params, of arrays or ``jax.ShapeDtypeStruct``.
      place: name of the tree in the checkpoint that is the params, such as ``params``;
        by default all of it.

    Returns:
      A tree like the params, of `jaxinf.typing.DeferredArray`. Each reads its array
      anew whenever it is converted to NumPy.

    Raises:
      ExchangeError: the checkpoint cannot be read, or lacks a leaf, or has it in
        another shape or no floats; names every leaf.
      TypeError, ValueError: `like` is no tree of params.
    """
    source = Path(os.path.abspath(os.path.expanduser(path)))
    found = read_arrays(source)
    within = place.strip("/.").replace("/", ".")
    leaves, problems = [], []
    for leaf in leaf_infos(like):
        name = ".".join(filter(None, [within, *map(encode_key, leaf.path)]))
        array = found.get(name)
        if array is None:
            problems.append(f"{name or 'the params'}: missing")
        elif array.shape != leaf.shape:
            problems.append(f"{name}: {array.shape}, in the params {leaf.shape}")
        elif array.dtype not in (*FLOAT_DTYPES, np.float64):
            problems.append(f"{name}: {array.dtype}, in the params {leaf.dtype}")
        else:
            leaves.append(TensorLeaf(array, (), leaf.dtype))
    if problems:
        raise ExchangeError(
            f"{source}: expected every leaf of the params by its name, found:"
            f"{listed(problems, _MAX_LINES)}\nIt has {', '.join(list(found)[:8])}, …. "
            'Give the name of the params\' tree in it (place="NAME"), or params of '
            "these names and shapes"
        )
    return with_leaves(like, leaves)


# --- Orbax --------------------------------------------------------------------------

_METADATA = "_METADATA"


class _Key(msgspec.Struct):
    key: (
        Annotated[str, pattern(r"[^\0]*", "a key")]
        | Annotated[int, Meta(ge=0, le=2**62)]
    )


class _Value(msgspec.Struct):
    value_type: str
    skip_deserialize: bool = False


class _Entry(msgspec.Struct):
    key_metadata: Annotated[tuple[_Key, ...], Meta(max_length=255)]
    value_metadata: _Value


class _Tree(msgspec.Struct):
    """What is read of Orbax's ``_METADATA``."""

    tree_metadata: dict[str, _Entry]
    use_zarr3: bool = False


_SMALL_CHUNK = 1 << 20  # elements
_WHAT = "the tree of an Orbax checkpoint"
_REMEDY = "copy the checkpoint anew, or save it with a newer Orbax"

_VARIABLE_KEYS = (("value",), ("raw_value",))
_NO_ARRAYS = ("None", "string", "Dict", "List", "Tuple", "NamedTuple")


def _is_orbax(path: Path) -> bool:
    """Whether a directory is an Orbax checkpoint, or a CheckpointManager's step."""
    return any((*path.glob(_METADATA), *path.glob(f"*/{_METADATA}")))


def _read_orbax(path: Path) -> dict[str, SourceArray]:
    """Opens the arrays of a checkpoint, by name in the order of the tree.

    The path is what a checkpointer's ``save`` got, or a step's directory of a
    CheckpointManager that saves a single pytree.
    """
    directory = _find_item(path)
    file = directory / _METADATA
    document = read_foreign(file, _Tree, _WHAT, _REMEDY)
    # jaxinf's own trees have their keys encoded already.
    is_ours = (directory / "commit.json").is_file()
    folders = _folders(document.tree_metadata, str if is_ours else encode_key)
    place: dict[str, Any] = {"driver": "file", "path": f"{directory}/"}
    if (directory / "manifest.ocdbt").is_file():
        place = {"driver": "ocdbt", "base": place, "path": ""}
    driver, futures = "zarr3" if document.use_zarr3 else "zarr", {}
    for name, folder in folders.items():
        if "/" in folder or folder in ("", ".", ".."):
            raise ExchangeError(
                f"{file}: expected {_WHAT}, found the array {name!r} in {folder!r}, "
                f"which is no folder of its own; {_REMEDY}"
            )
        own = {**place, "path": f"{place['path']}{folder}/"}
        spec = {"driver": driver, "kvstore": own}
        futures[name] = tensorstore.open(spec, open=True, read=True)
    arrays = {}
    for name, future in futures.items():
        array = _or_explain(future, directory, name)
        shape, dtype = tuple(array.shape), np.dtype(array.dtype.numpy_dtype)
        chunk = tuple(array.chunk_layout.write_chunk.shape or ())
        if math.prod(chunk) > max(2 * math.prod(shape), _SMALL_CHUNK):
            # It would be decoded whole, of however few bytes it is made.
            raise ExchangeError(
                f"{directory}: expected chunks of {name} of about its shape {shape}, "
                f"found {chunk}; give another checkpoint"
            )
        blocks = partial(_blocks, name, array, directory)
        arrays[name] = SourceArray(name, shape, dtype, blocks)
    return arrays


def _blocks(name: str, array: Any, directory: Path) -> Blocks:
    """Yields all of an array: Orbax may have saved it as a single chunk."""
    yield (0,) * array.ndim, _or_explain(array.read(), directory, name)


def _folders(
    tree: Mapping[str, _Entry], encode: Callable[[str], str]
) -> dict[str, str]:
    """Returns the folders of arrays by their names."""
    paths = [
        tuple(str(part.key) for part in entry.key_metadata)
        for entry in tree.values()
        if not entry.value_metadata.skip_deserialize
        and entry.value_metadata.value_type not in _NO_ARRAYS
    ]
    num_children = Counter(path[:-1] for path in paths)
    folders: dict[str, str] = {}
    for path in paths:
        is_variable = path[-1:] in _VARIABLE_KEYS and num_children[path[:-1]] == 1
        keys = path[:-1] if is_variable and len(path) > 1 else path
        folders[".".join(map(encode, keys))] = ".".join(path)
    return folders


def _or_explain(future: Any, directory: Path, name: str) -> Any:
    try:
        return future.result()
    except (ValueError, OSError, RuntimeError) as error:
        raise ExchangeError(
            f"{directory}: the checkpoint's tree has {name}, which cannot be read: "
            f"{error}; is it whole? Copy it anew, or import another one"
        ) from error


def _find_item(path: Path) -> Path:
    """Returns the directory of the only pytree at or below a path."""
    if (path / _METADATA).is_file():
        return path
    # One directory may have two names.
    items = {m.parent.resolve(): m.parent for m in path.glob(f"*/{_METADATA}")}
    if len(items) == 1:
        return next(iter(items.values()))
    several = items.values() or [m.parent for m in path.glob(f"*/*/{_METADATA}")]
    names = sorted(str(item.relative_to(path)) for item in several)
    raise ExchangeError(
        f"{path}: expected an Orbax checkpoint of one pytree, found "
        f"{', '.join(names[:8]) or f'no {_METADATA}'}; give the directory of the "
        "one that holds the params"
    )
