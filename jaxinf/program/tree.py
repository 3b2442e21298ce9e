"""Names, shapes and dtypes of the leaves of a params tree.

Invariant: every leaf has a unique path, one string per level, which is the same for
arrays, tracers and avals.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinf import compat
from jaxinf.typing import FLOAT_DTYPES, PyTree


@dataclass(frozen=True)
class LeafInfo:
    """One leaf of the params tree.

    Attributes:
      path: Names from the root to the leaf; empty where params is a bare array.
      dtype: The dtype of the params on the JAX device (the master is float32).
    """

    path: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def name(self) -> str:
        """The path as messages show it, e.g. ``params/h0/kernel``."""
        return "/".join(("params", *self.path))


def leaf_infos(params: PyTree) -> tuple[LeafInfo, ...]:
    """Describes the leaves of `params` in flattening order.

    A trailing attribute ``value`` (flax nnx Variables) is not part of a path.

    Args:
      params: Arrays, tracers or ``jax.ShapeDtypeStruct``.

    Raises:
      TypeError: A leaf is not float32, bfloat16 or float16.
      ValueError: The tree has no leaf, or two leaves have the same path.
    """
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    if not leaves:
        raise ValueError("params: expected at least one array, found an empty tree")
    infos: list[LeafInfo] = []
    for keys, leaf in leaves:
        path = leaf_path(keys)
        where = "/".join(("params", *path))
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            raise TypeError(
                f"{where}: expected an array, found {type(leaf).__name__}; make a "
                "number that is trained an array, jnp.float32(x), and keep other "
                "values out of the params tree (Equinox: eqx.filter(model, "
                "eqx.is_inexact_array))"
            )
        if leaf.dtype not in FLOAT_DTYPES:
            raise TypeError(
                f"{where}: expected float32, bfloat16 or float16, found {leaf.dtype}; "
                "keep other arrays out of the params tree, or cast them"
            )
        infos.append(LeafInfo(path, tuple(leaf.shape), np.dtype(leaf.dtype)))
    counts = Counter(info.path for info in infos)
    for info in infos:
        if counts[info.path] > 1:
            raise ValueError(
                f"{info.name}: expected one leaf per path, found two; paths are told "
                "apart as strings, so rename one (1 and '1' are the same name)"
            )
    return tuple(infos)


def leaf_path(keys: tuple[Any, ...]) -> tuple[str, ...]:
    """Returns the path of a leaf from its key path, as in `LeafInfo`."""
    if compat.path_keys(keys)[-1:] == (("field", "value"),):
        keys = keys[:-1]
    return compat.path_names(keys)


def path_name(path: tuple[Any, ...], whole: str = "params") -> str:
    """Returns a leaf's key path as text; `whole` names a tree that is one leaf."""
    return "/".join(compat.path_names(path)) or whole


def is_trained(leaf: Any) -> bool:
    """Whether a leaf of the params is an optimizer's: a floating-point array.

    Integer arrays, random keys and other objects have no gradients.
    """
    if isinstance(leaf, float | complex):
        return True
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and bool(jnp.issubdtype(dtype, jnp.inexact))


def keep_trained(params: PyTree) -> PyTree:
    """Returns the params with None for each leaf that is not trained."""
    return jax.tree.map(lambda leaf: leaf if is_trained(leaf) else None, params)
