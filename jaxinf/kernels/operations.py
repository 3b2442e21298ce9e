"""The elementwise operations in NumPy; results go into the caller's buffer.

Invariant: no operation widens: float32 inputs are computed in float32 and give float32.
Buffers of 16-bit floats do not occur here (see `evaluator`).
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from jaxinf.typing import Array

__all__ = ["IN_PLACE", "OPERATIONS", "flush_denormals"]

SMALLEST_NORMAL = np.finfo(np.float32).smallest_normal

Operation = Callable[..., None]
"""``operation(out, *inputs, **static_params)``."""


def flush_denormals(values: Array, scratch: Array) -> None:
    """Sets denormal float32 to zero in place; `scratch`: float32, of equal shape."""
    np.abs(values, out=scratch)
    # A minimum of NaN compares false, so it takes the slow path too.
    if values.size and not scratch.min() >= SMALLEST_NORMAL:
        values[scratch < SMALLEST_NORMAL] = 0


def _ufunc(function: np.ufunc) -> Operation:
    def operation(out: Array, *inputs: Any) -> None:
        function(*inputs, out=out)

    return operation


def _div(out: Array, x: Any, y: Any) -> None:
    if out.dtype.kind == "f":
        np.divide(x, y, out=out)
    else:  # integers; C rounds towards zero
        np.floor_divide(np.subtract(x, np.fmod(x, y)), y, out=out)


def _pow(out: Array, x: Any, y: Any) -> None:
    if y.dtype != out.dtype:
        y = y.astype(out.dtype)
    np.power(x, y, out=out)


def _integer_pow(out: Array, x: Any, *, y: int) -> None:
    """Computes a power by repeated squaring, in XLA's order of products."""
    base, exponent, started = np.array(x), abs(y), False
    if not exponent:
        out.fill(1)
    while exponent:
        if exponent & 1:
            np.multiply(out, base, out=out) if started else np.copyto(out, base)
            started = True
        exponent >>= 1
        if exponent:
            base = np.multiply(base, base)
    if y < 0:
        np.divide(out.dtype.type(1), out, out=out)


def _sign(out: Array, x: Any) -> None:
    if out.dtype != np.float32:
        np.sign(x, out=out)
        return
    tiny = np.abs(x) < SMALLEST_NORMAL  # XLA reads denormals as zero
    np.sign(x, out=out)
    np.copyto(out, np.float32(0), where=tiny)


def _rsqrt(out: Array, x: Any) -> None:
    np.sqrt(x, out=out)
    np.divide(out.dtype.type(1), out, out=out)


def _square(out: Array, x: Any) -> None:
    np.multiply(x, x, out=out)


def _logistic(out: Array, x: Any) -> None:
    one = out.dtype.type(1)
    np.negative(x, out=out)
    np.exp(out, out=out)
    np.add(out, one, out=out)
    np.divide(one, out, out=out)


def _round(out: Array, x: Any, *, to_even: bool) -> None:
    if to_even:
        np.rint(x, out=out)
        return
    whole = np.trunc(x)
    away = np.abs(x - whole) >= out.dtype.type(0.5)
    np.add(whole, np.copysign(away.astype(out.dtype), x), out=out)


def _clamp(out: Array, low: Any, x: Any, high: Any) -> None:
    np.minimum(np.maximum(x, low), high, out=out)


def _select_n(out: Array, which: Any, *cases: Any) -> None:
    if np.ndim(which) == 0:
        chosen = min(max(int(which), 0), len(cases) - 1)
        np.copyto(out, cases[chosen])
        return
    np.copyto(out, cases[0])
    for index, case in enumerate(cases[1:], start=1):
        mask = which if which.dtype == np.bool_ else which == index
        np.copyto(out, case, where=mask)


def _convert(out: Array, x: Any) -> None:
    if out.dtype == np.bool_:
        np.not_equal(x, 0, out=out)
    elif out.dtype.kind in "iu" and x.dtype.kind == "f":
        _saturate(out, x)
    else:
        np.copyto(out, x, casting="unsafe")


def _saturate(out: Array, x: Any) -> None:
    """Converts floats to integers as XLA does: towards zero, saturating, NaN to 0."""
    limits = np.iinfo(out.dtype)
    below, above = x < x.dtype.type(limits.min), x >= x.dtype.type(limits.max)
    inside = np.where(below | above | np.isnan(x), x.dtype.type(0), x)
    np.copyto(out, inside, casting="unsafe")
    np.copyto(out, limits.min, where=below)
    np.copyto(out, limits.max, where=above)


_UFUNCS: dict[str, np.ufunc] = {
    "abs": np.absolute,
    "add": np.add,
    "and": np.bitwise_and,
    "cbrt": np.cbrt,
    "ceil": np.ceil,
    "cos": np.cos,
    "eq": np.equal,
    "exp": np.exp,
    "exp2": np.exp2,
    "expm1": np.expm1,
    "floor": np.floor,
    "ge": np.greater_equal,
    "gt": np.greater,
    "is_finite": np.isfinite,
    "le": np.less_equal,
    "log": np.log,
    "log1p": np.log1p,
    "lt": np.less,
    "max": np.maximum,
    "min": np.minimum,
    "mul": np.multiply,
    "ne": np.not_equal,
    "neg": np.negative,
    "nextafter": np.nextafter,
    "not": np.invert,
    "or": np.bitwise_or,
    "rem": np.fmod,
    "sin": np.sin,
    "sqrt": np.sqrt,
    "sub": np.subtract,
    "tanh": np.tanh,
    "xor": np.bitwise_xor,
}

IN_PLACE = frozenset(_UFUNCS) | {"clamp", "div", "logistic", "rsqrt", "sign", "square"}
"""Operations whose `out` may be one of their inputs."""

OPERATIONS: dict[str, Operation] = {name: _ufunc(f) for name, f in _UFUNCS.items()} | {
    "clamp": _clamp,
    "convert_element_type": _convert,
    "div": _div,
    "integer_pow": _integer_pow,
    "logistic": _logistic,
    "pow": _pow,
    "round": _round,
    "rsqrt": _rsqrt,
    "select_n": _select_n,
    "sign": _sign,
    "square": _square,
}
