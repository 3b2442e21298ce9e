"""Names for the types and dtypes that cross module borders.

Invariant: nothing here imports another jaxinf module.
"""

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

__all__ = [
    "BFLOAT16",
    "FLOAT16",
    "FLOAT32",
    "FLOAT_DTYPES",
    "Array",
    "JsonValue",
    "PathLikeStr",
    "ProgressCallback",
    "PyTree",
]

Array: TypeAlias = np.ndarray[Any, Any]
"""A NumPy array; shapes and dtypes are given in the docstrings."""

FLOAT32 = np.dtype(np.float32)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT16 = np.dtype(np.float16)
FLOAT_DTYPES = (FLOAT32, BFLOAT16, FLOAT16)
"""What params and gradients may be of."""

PyTree: TypeAlias = Any
"""Any JAX pytree."""

PathLikeStr: TypeAlias = str | PathLike[str]

JsonValue: TypeAlias = (
    bool | int | float | str | Sequence["JsonValue"] | Mapping[str, "JsonValue"] | None
)

ProgressCallback: TypeAlias = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""
