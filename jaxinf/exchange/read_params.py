"""Params of safetensors files, by their exact names.

Invariant: everything is checked before an element is read, and a leaf is read when it
  is used, one at a time.
"""

import os
from pathlib import Path

import numpy as np

from jaxinf.errors import ExchangeError
from jaxinf.exchange.safetensors_files import is_safetensors, read_safetensors
from jaxinf.exchange.sources import TensorLeaf, listed
from jaxinf.program import leaf_infos, with_leaves
from jaxinf.store import encode_key
from jaxinf.typing import FLOAT_DTYPES, PathLikeStr, PyTree

_MAX_LINES = 40


def read_params(path: PathLikeStr, like: PyTree, *, place: str = "") -> PyTree:
    """Opens params by their names, for the ``tx.init`` of `jaxinf.smart_update`.

    A leaf's array has the leaf's path as its name, keys joined by ``.`` or ``/``. A
    float of another width is rounded to nearest even, float64 to float32 first.

    Args:
      path: a safetensors file, or a directory of such.
      like: a tree like the params, of arrays or ``jax.ShapeDtypeStruct``.
      place: what the names of the params begin with, such as ``params``.

    Returns:
      A tree like the params, of `jaxinf.typing.DeferredArray`. Each reads its array
      anew whenever it is converted to NumPy.

    Raises:
      ExchangeError: the files cannot be read, or lack a leaf, or have it in another
        shape or no floats; names every leaf.
      TypeError, ValueError: `like` is no tree of params.
    """
    source = Path(os.path.abspath(os.path.expanduser(path)))
    if not is_safetensors(source):
        found = "none there" if source.exists() else "nothing"
        raise ExchangeError(
            f"{source}: expected a safetensors file, or a directory of some, found "
            f"{found}; check the path. A checkpoint of Orbax is restored with Orbax, "
            "and its params are given to tx.init"
        )
    found = read_safetensors(source)
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
            'Give what the names begin with (place="NAME"), or params of these '
            "names and shapes"
        )
    return with_leaves(like, leaves)
