"""A kernel as a JAX function again: for updates that a JAX device computes.

Invariant: jitted on a CPU it has the bits of the compiled kernel, in a run of any
length, if nothing else is in its program: an update that is added to params in the loop
which computes it would be rounded once, not twice.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxinf.program.kernel import Constant, Equation, Input, Kernel, Operand, Result
from jaxinf.typing import AVERAGE, BFLOAT16

_NAMES = {name: f"bitwise_{name}" for name in ("and", "not", "or", "xor")}


def is_computable(kernel: Kernel) -> bool:
    """Whether `kernel_function` has a kernel's bits.

    It does not if XLA computes an array outside the kernel, which decides its rounding,
    or with an average of the params, which has the update's sum with them.
    """
    is_whole = not kernel.array_dtypes and not kernel.reduced
    return is_whole and AVERAGE not in kernel.slots


def kernel_function(
    kernel: Kernel,
    gradient: jax.Array,
    params: jax.Array | None,
    slots: Sequence[jax.Array | None],
    scalars: Sequence[jax.Array],
) -> tuple[jax.Array | None, list[jax.Array | None], list[jax.Array]]:
    """Computes an update; traceable.

    Args:
      kernel: A computable one.
      gradient: ``(n,)`` float32.
      params: ``(n,)`` float32, the master params; None if it does not read them.
      slots: ``(n,)`` each, of the slots' dtypes; None for those it does not read.
      scalars: 0-d, of the kernel's dtypes.

    Returns:
      The update, float32, None for zero; new slots, None for unchanged ones; and
      scalars that a program has to return, too: XLA does not multiply by their
      reciprocals then.
    """
    inputs: dict[str, Sequence[Any]] = {"slot": slots, "scalar": scalars}
    values: list[Any] = []

    def value(operand: Operand) -> Any:
        match operand:
            case Result():
                return values[operand.index]
            case Constant():
                return jnp.asarray(operand.value, operand.dtype)
            case Input(kind="gradient"):
                return gradient
            case Input(kind="params"):
                return params
        array = inputs[operand.kind][operand.index]
        return None if array is None else jnp.asarray(array, operand.dtype)

    for equation in kernel.equations:
        operands = [value(operand) for operand in equation.inputs]
        # A slot that is not given is read by a branch that the step does not take.
        is_taken = all(operand is not None for operand in operands)
        values.append(_compute(equation, operands) if is_taken else None)
    shape = gradient.shape
    columns = kernel.slots, kernel.new_slots, kernel.slot_dtypes
    new = [
        None
        if name in kernel.unchanged
        else jnp.broadcast_to(value(operand), shape).astype(dtype)
        for name, operand, dtype in zip(*columns, strict=True)
    ]
    update = None
    if kernel.update is not None:
        update = jnp.broadcast_to(value(kernel.update), shape)
    flags = kernel.reciprocals or (False,) * len(scalars)
    kept = [s for s, flag in zip(scalars, flags, strict=True) if not flag]
    return update, new, kept


def _compute(equation: Equation, operands: list[Any]) -> jax.Array:
    op, params = equation.op, dict(equation.params)
    shape = jnp.broadcast_shapes(*(x.shape for x in operands))
    if op != "clamp":
        start = int(op == "select_n")  # its condition may be a scalar
        wide = (jnp.broadcast_to(x, shape) for x in operands[start:])
        operands = [*operands[:start], *wide]
    match op:
        case "convert_element_type":
            return lax.convert_element_type(operands[0], equation.dtype)
        case "integer_pow":
            return lax.integer_pow(operands[0], params["y"])
        case "round":
            to_even = lax.RoundingMethod.TO_NEAREST_EVEN
            from_zero = lax.RoundingMethod.AWAY_FROM_ZERO
            return lax.round(operands[0], to_even if params["to_even"] else from_zero)
        case "reduce_precision":
            info = jnp.finfo(params["to"])
            return lax.reduce_precision(operands[0], info.nexp, info.nmant)
    return getattr(lax, _NAMES.get(op, op))(*operands)


def join_params(codes: jax.Array, remainders: jax.Array) -> jax.Array:
    """Reverses `split_params`, as `jaxinf.layout.codecs` does."""
    high = lax.bitcast_convert_type(codes, jnp.uint16).astype(jnp.uint32) << 16
    low = lax.bitcast_convert_type(remainders.astype(jnp.int32), jnp.uint32)
    return lax.bitcast_convert_type(high + low, jnp.float32)


def split_params(params: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rounds float32 to bfloat16 and the rest, as `jaxinf.layout.codecs` does."""
    bits = lax.bitcast_convert_type(params, jnp.uint32)
    is_nan = jnp.isnan(params)
    quiet = (bits >> 16) | 0x40
    codes = jnp.where(is_nan, quiet, (bits + 0x8000) >> 16).astype(jnp.uint16)
    rest = jnp.where(is_nan, 0, bits & 0xFFFF).astype(jnp.uint16)
    return (
        lax.bitcast_convert_type(codes, BFLOAT16),
        lax.bitcast_convert_type(rest, jnp.int16),
    )
