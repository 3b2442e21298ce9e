"""Specialises a kernel for a step: resolves selections that its scalars decide.

Invariant: a specialised kernel has the results of the kernel. It differs only if that
saves I/O: a slot that the step leaves unchanged is neither read nor written.

Gradient accumulation needs it: optax selects old or new state of the inner optimizer by
a boolean scalar, and multiplies the update by zero between two emissions.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from jaxinf.program import (
    Constant,
    Equation,
    Input,
    Kernel,
    Operand,
    Result,
    inputs_of,
    needed_by,
)
from jaxinf.typing import Array

_Decisions = tuple[bool | None, ...]
"""The values of a kernel's boolean scalars; None for its other scalars."""

_LOGIC: Mapping[str, Callable[[list[bool]], bool]] = {
    "not": lambda inputs: not inputs[0],
    "and": all,
    "or": any,
    "convert_element_type": lambda inputs: inputs[0],
}

# Products with zero count as zero, too, which is exact for finite values.
_ZERO_TO_ZERO = frozenset({"neg", "convert_element_type", "copy", "reduce_precision"})


def specialise(kernel: Kernel, scalars: Sequence[np.generic | Array]) -> Kernel:
    """Returns the kernel for a step with these results of its prologue.

    It takes the same arguments and leaves more state unchanged; it is `kernel` itself
    if no state can be saved.
    """
    if not any(dtype == np.bool_ for dtype in kernel.scalar_dtypes):
        return kernel
    pairs = zip(kernel.scalar_dtypes, scalars, strict=True)
    zeros = tuple(dtype != np.bool_ and not np.any(s) for dtype, s in pairs)
    return _fold_to_save_state(kernel, _decisions(kernel, scalars), zeros) or kernel


@functools.cache
def _fold_to_save_state(
    kernel: Kernel, decisions: _Decisions, zeros: tuple[bool, ...]
) -> Kernel | None:
    taken = _fold(kernel, decisions, (False,) * len(zeros))
    saves_state = taken.unchanged != kernel.unchanged
    return _fold(kernel, decisions, zeros) if saves_state else None


def _decisions(kernel: Kernel, scalars: Sequence[np.generic | Array]) -> _Decisions:
    pairs = zip(kernel.scalar_dtypes, scalars, strict=True)
    return tuple(bool(s) if dtype == np.bool_ else None for dtype, s in pairs)


def scalars_used(
    kernel: Kernel, scalars: Sequence[np.generic | Array]
) -> frozenset[int]:
    """Returns the positions of the scalars that the update depends on.

    Branches that these scalars do not take are ignored.
    """
    decisions = _decisions(kernel, scalars)
    taken = _fold(kernel, decisions, (False,) * len(decisions))
    inputs = inputs_of(taken.equations, [taken.update, *taken.new_slots])
    return frozenset(index for kind, index in inputs if kind == "scalar")


@functools.cache
def state_read(kernel: Kernel) -> frozenset[str]:
    """Returns the states whose old values the update or the new state depends on.

    They are slots' names and ``"params"``.
    """
    states = zip(kernel.slots, kernel.new_slots, strict=True)
    changed = [value for name, value in states if name not in kernel.unchanged]
    inputs = inputs_of(kernel.equations, [kernel.update, *changed])
    names = {kernel.slots[index] for kind, index in inputs if kind == "slot"}
    needs_params = ("params", 0) in inputs or kernel.update is not None
    return frozenset(names | ({"params"} if needs_params else set()))


def _fold(kernel: Kernel, decisions: _Decisions, zeros: tuple[bool, ...]) -> Kernel:
    """Replaces what scalars decide; equations that nothing needs any more stay.

    Args:
      zeros: For each scalar, whether it is replaced by zero.
    """
    values: list[Operand] = []
    equations: list[Equation] = []

    def value_of(operand: Operand) -> Operand:
        if isinstance(operand, Result):
            return values[operand.index]
        if isinstance(operand, Input) and operand.kind == "scalar":
            if (is_true := decisions[operand.index]) is not None:
                return Constant.of(is_true, operand.dtype)
            if zeros[operand.index]:
                return Constant.of(0, operand.dtype)
        return operand

    for equation in kernel.equations:
        inputs = tuple(map(value_of, equation.inputs))
        value = _decide(equation, inputs, folds_zeros=any(zeros))
        if value is None:
            value = Result(len(equations), equation.dtype)
            equations.append(replace(equation, inputs=inputs))
        values.append(value)
    update = None if kernel.update is None else value_of(kernel.update)
    update = None if update is None or _is_zero(update) else update
    new_slots = tuple(map(value_of, kernel.new_slots))
    needed = needed_by(equations, [update, *new_slots])
    reduced = [values[number] for number in kernel.reduced]
    return replace(
        kernel,
        equations=tuple(equations),
        update=update,
        new_slots=new_slots,
        reduced=tuple(
            value.index
            for value in reduced
            if isinstance(value, Result) and value in needed
        ),
    )


def _decide(
    equation: Equation, inputs: tuple[Operand, ...], *, folds_zeros: bool
) -> Operand | None:
    """Returns the operand that the result equals, or None if it is not decided."""
    first = inputs[0]
    if equation.op == "select_n" and isinstance(first, Constant):
        return inputs[1 + int(first.value)]
    literals = [bool(i.value) for i in inputs if isinstance(i, Constant)]
    if first.dtype == np.bool_ and len(literals) == len(inputs):
        logic = _LOGIC.get(equation.op)
        return Constant.of(logic(literals), equation.dtype) if logic else None
    is_zero = [_is_zero(operand) for operand in inputs]
    if equation.dtype.kind in "fV" and folds_zeros:
        if equation.op == "mul" and any(is_zero):
            return Constant.of(0, equation.dtype)
        if equation.op in _ZERO_TO_ZERO and is_zero[0]:
            return Constant.of(0, equation.dtype)
    return None


def _is_zero(operand: Operand) -> bool:
    return isinstance(operand, Constant) and not np.any(operand.value)
