"""Names for the types that cross module borders.

Invariant: nothing here imports another jaxinf module.
"""

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any, TypeAlias

import numpy as np

__all__ = [
    "Array",
    "JsonValue",
    "PathLikeStr",
    "ProgressCallback",
    "PyTree",
]

Array: TypeAlias = np.ndarray[Any, Any]
"""A NumPy array; shapes and dtypes are given in the docstrings."""

PyTree: TypeAlias = Any
"""Any JAX pytree."""

PathLikeStr: TypeAlias = str | PathLike[str]

JsonValue: TypeAlias = (
    bool | int | float | str | Sequence["JsonValue"] | Mapping[str, "JsonValue"] | None
)

ProgressCallback: TypeAlias = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""
