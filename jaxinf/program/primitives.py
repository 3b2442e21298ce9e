"""Which JAX primitives a body may contain, and their static parameters.

Invariant: what `static_params` accepts, every backend implements bit for bit alike,
up to the rounding of transcendental functions.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

__all__ = ["CALLS", "ELEMENTWISE", "IDENTITIES", "static_params"]

ELEMENTWISE = frozenset(
    """
    abs add and cbrt ceil clamp convert_element_type cos div eq exp exp2 expm1 floor
    ge gt integer_pow is_finite le log log1p logistic lt max min mul ne neg
    nextafter not or pow reduce_precision rem round rsqrt select_n sign sin sqrt
    square sub tanh xor
    """.split()  # noqa: SIM905
)
"""Primitives by name: every operand leaf-shaped or a scalar."""

IDENTITIES = frozenset(
    """
    copy copy_p stop_gradient optimization_barrier sharding_constraint reshape
    squeeze expand_dims broadcast_in_dim
    """.split()  # noqa: SIM905
)
"""Primitives that pass operands through, where no shape or dtype changes."""

CALLS = frozenset(
    """
    jit pjit closed_call core_call core_closed_call custom_jvp_call custom_vjp_call
    custom_vjp_call_jaxpr remat remat2 checkpoint
    """.split()  # noqa: SIM905
)
"""Primitives that only call the jaxpr in their parameters."""

_REDUCED = {(8, 7): "bfloat16", (5, 10): "float16", (8, 23): "float32"}
_DTYPE_NAMES = frozenset(
    """
    float32 bfloat16 float16 int8 uint8 int16 uint16 int32 uint32 bool
    """.split()  # noqa: SIM905
)


def static_params(name: str, params: Mapping[str, Any]) -> dict[str, Any] | None:
    """The parameters that matter to a body; None where they are not supported."""
    if name not in ELEMENTWISE:
        return None
    if name == "integer_pow":
        return {"y": int(params["y"])}
    if name == "round":
        return {"to_even": int(params["rounding_method"]) == 1}
    if name == "reduce_precision":
        bits = (int(params["exponent_bits"]), int(params["mantissa_bits"]))
        return {"to": _REDUCED[bits]} if bits in _REDUCED else None
    return {}


def is_supported_dtype(dtype: Any) -> bool:
    """Whether a body may hold values of `dtype` (no 64-bit, no random keys)."""
    return isinstance(dtype, np.dtype) and dtype.name in _DTYPE_NAMES
