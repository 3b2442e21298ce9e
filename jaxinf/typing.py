"""Names for the types and dtypes that cross module borders.

Invariant: nothing here imports another jaxinf module.
"""

import abc
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

Array: TypeAlias = np.ndarray[Any, Any]
"""A NumPy array; shapes and dtypes are given in the docstrings."""

FLOAT32 = np.dtype(np.float32)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT16 = np.dtype(np.float16)
FLOAT_DTYPES = (FLOAT32, BFLOAT16, FLOAT16)
"""Dtypes that params and gradients may have."""

AVERAGE = "average"
"""The state that holds the average of the params, after the optimizer's states."""

PyTree: TypeAlias = Any
"""Any JAX pytree."""

PathLikeStr: TypeAlias = str | PathLike[str]

JsonValue: TypeAlias = (
    bool | int | float | str | Sequence["JsonValue"] | Mapping[str, "JsonValue"] | None
)


class DeferredArray(abc.ABC):
    """An array that is read when it is converted to NumPy; it keeps no copy.

    ``tx.init`` of `jaxinf.smart_update` takes trees of such leaves, and has one of them
    in memory at a time.
    """

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        self.shape = shape
        self.dtype = np.dtype(dtype)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @abc.abstractmethod
    def read(self) -> Array:
        """Reads the whole array, anew at each call; blocks."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return self.read().astype(dtype or self.dtype, copy=False)


KeyPath: TypeAlias = tuple[tuple[str, Any], ...]
"""Keys of a tree with their kinds: ``"field"`` for a named tuple or a class; ``"key"``
for a dict, or for a sequence with its number; ``"other"``."""

ProgressCallback: TypeAlias = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""
