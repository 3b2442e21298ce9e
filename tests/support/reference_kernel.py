"""A kernel in NumPy, operation by operation: what machine code is compared with.

It has optax's operations without XLA's contractions: no fused multiply-adds and no
reciprocals. Values are float32, which 16-bit floats are rounded from after each
operation; results have no denormals.
"""

import numpy as np

from jaxinf.layout import CodedSlot
from jaxinf.program.kernel import Constant, Input, Result
from jaxinf.typing import BFLOAT16, FLOAT16, FLOAT32

SMALLEST_NORMAL = np.finfo(np.float32).smallest_normal


def evaluate(kernel, *, gradient, params, out, slots=(), scalars=(), arrays=()):
    """Updates one chunk in place, as `jaxinf.kernels.CompiledKernel.run` does."""
    states = [decoded(state) for state in (params, *slots)]
    inputs = {
        "gradient": [gradient], "params": states[:1], "slot": states[1:],
        "scalar": scalars, "array": arrays,
    }  # fmt: skip
    results = []

    def value(operand):
        match operand:
            case Constant():
                return widened(operand.value)
            case Result():
                return results[operand.index]
            case Input():
                return widened(inputs[operand.kind][operand.index])

    with np.errstate(all="ignore"):
        for equation in kernel.equations:
            operands = list(map(value, equation.inputs))
            dtype = widened(np.zeros(0, equation.dtype)).dtype
            found = compute(equation.op, dtype, operands, dict(equation.params))
            results.append(widened(found.astype(equation.dtype)))
        new = [np.array(flushed(value(operand))) for operand in kernel.new_slots]
        master, update = states[0], np.float32(0)
        if kernel.update is not None:
            update = flushed(value(kernel.update))
            master = flushed(master + update)
            store(params, master)
        for name, slot, values in zip(kernel.slots, slots, new, strict=True):
            if name not in kernel.unchanged:
                store(slot, values)
        if out.dtype == FLOAT32:
            out[...] = update
        else:
            out[...] = params.codes if isinstance(params, CodedSlot) else master
    return bool(np.isfinite(widened(gradient)).all())


def compute(op, dtype, operands, params):
    """Returns the result of one operation, in `dtype`."""
    if op == "reduce_precision":
        return operands[0].astype(params["to"]).astype(dtype)
    return np.asarray(OPERATIONS[op](dtype, *operands, **params)).astype(dtype)


def decoded(state):
    return state.decode() if isinstance(state, CodedSlot) else state


def store(state, values):
    if isinstance(state, CodedSlot):
        state.encode(np.broadcast_to(values, state.codes.shape))
    else:
        state[...] = values


def widened(values):
    return values.astype(FLOAT32) if values.dtype in (BFLOAT16, FLOAT16) else values


def flushed(values):
    """Sets denormal float32 to zero."""
    if values.dtype != FLOAT32:
        return values
    return np.where(np.abs(values) < SMALLEST_NORMAL, np.float32(0), values)


def divide(dtype, x, y):
    if dtype.kind == "f":
        return x / y
    return np.floor_divide(x - np.fmod(x, y), y)  # C rounds towards zero


def power(dtype, x, *, y):
    """Computes a power by repeated squaring, in XLA's order of products."""
    result, exponent = np.ones_like(x), abs(y)
    while exponent:
        if exponent & 1:
            result = result * x
        exponent >>= 1
        x = x * x
    return dtype.type(1) / result if y < 0 else result


def sign(dtype, x):
    is_zero = dtype == FLOAT32 and np.abs(x) < SMALLEST_NORMAL  # XLA reads it as zero
    return np.where(is_zero, dtype.type(0), np.sign(x))


def rounded(dtype, x, *, to_even):
    if to_even:
        return np.rint(x)
    whole = np.trunc(x)
    return whole + np.copysign(np.abs(x - whole) >= dtype.type(0.5), x)


def select(dtype, which, *cases):
    del dtype
    return np.choose(np.clip(np.asarray(which, np.int32), 0, len(cases) - 1), cases)


def convert(dtype, x):
    """Converts floats to integers as XLA does: towards zero, saturating, NaN to 0."""
    if dtype == np.bool_:
        return x != 0
    if not (dtype.kind in "iu" and x.dtype.kind == "f"):
        return x
    limits = np.iinfo(dtype)
    below, above = x < x.dtype.type(limits.min), x >= x.dtype.type(limits.max)
    inside = np.where(below | above | np.isnan(x), x.dtype.type(0), x).astype(dtype)
    return np.where(below, limits.min, np.where(above, limits.max, inside))


_ALIKE = {
    "abs": np.absolute, "add": np.add, "and": np.bitwise_and, "cbrt": np.cbrt,
    "ceil": np.ceil, "cos": np.cos, "eq": np.equal, "exp": np.exp, "exp2": np.exp2,
    "expm1": np.expm1, "floor": np.floor, "ge": np.greater_equal, "gt": np.greater,
    "is_finite": np.isfinite, "le": np.less_equal, "log": np.log, "log1p": np.log1p,
    "lt": np.less, "max": np.maximum, "min": np.minimum, "mul": np.multiply,
    "ne": np.not_equal, "neg": np.negative, "nextafter": np.nextafter,
    "not": np.invert, "or": np.bitwise_or, "rem": np.fmod, "sin": np.sin,
    "sqrt": np.sqrt, "sub": np.subtract, "tanh": np.tanh, "xor": np.bitwise_xor,
}  # fmt: skip

OPERATIONS = {
    name: lambda dtype, *inputs, function=function: function(*inputs)
    for name, function in _ALIKE.items()
} | {
    "clamp": lambda dtype, low, x, high: np.minimum(np.maximum(x, low), high),
    "convert_element_type": convert,
    "div": divide,
    "integer_pow": power,
    "logistic": lambda dtype, x: dtype.type(1) / (np.exp(-x) + dtype.type(1)),
    "pow": lambda dtype, x, y: np.power(x, y.astype(dtype)),
    "round": rounded,
    "rsqrt": lambda dtype, x: dtype.type(1) / np.sqrt(x),
    "select_n": select,
    "sign": sign,
    "square": lambda dtype, x: x * x,
}
"""``operation(dtype, *inputs, **params)`` of each name in `jaxinf.compat.ELEMENTWISE`
but ``reduce_precision``."""
