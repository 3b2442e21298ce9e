"""Runs a body over chunks with NumPy, block by block.

Invariant: only the plan is kept between calls, so any number of threads may share it. A
call's temporary memory is a few blocks, however long the chunk.
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxinf.kernels.checking import check_arguments, check_init_arguments
from jaxinf.kernels.operations import flush_denormals
from jaxinf.kernels.plan import (
    GRADIENT,
    PARAMS,
    UPDATE,
    Plan,
    make_plan,
    storage_dtype,
)
from jaxinf.layout import CodedSlot
from jaxinf.program.ir import Constant, Input
from jaxinf.program.kernel import InitKernel, Kernel
from jaxinf.typing import FLOAT32, Array

__all__ = ["BLOCK_ELEMENTS", "evaluate", "initialise"]

BLOCK_ELEMENTS = 32 << 10
"""So many elements hide NumPy's overhead and the GIL, and still fit into L2."""


def evaluate(
    kernel: Kernel,
    *,
    gradient: Array,
    params: Array | CodedSlot,
    slots: Sequence[Array | CodedSlot],
    scalars: Sequence[np.generic | Array],
    arrays: Sequence[Array],
    out: Array,
) -> bool:
    """Updates one chunk in place; blocks the caller; thread-safe.

    Works in blocks of 32 Ki elements: temporary memory does not grow with the
    chunk. Every operation computes in the dtype that optax gave it, without fused
    multiply-adds. As in XLA on a CPU, 16-bit floats are computed in float32 and then
    rounded, and denormal float32 results are flushed to zero.

    Args:
      kernel: A leaf's update.
      gradient: ``(n,)`` float32, bfloat16 or float16; only read.
      params: ``(n,)`` float32 master; becomes ``params + u``. It may be a `CodedSlot`,
        for params that are bfloat16 on the JAX device.
      slots: ``(n,)`` each; become the new state. A float32 slot may be a `CodedSlot`.
      scalars: 0-d, the prologue's results.
      arrays: ``(n,)`` each, the chunk's part of the prologue's arrays.
      out: ``(n,)``: float32 receives `u`; bfloat16 or float16 receives the new
        params rounded to nearest even, or, of coded params, their bfloat16 codes.

    Returns:
      Whether all of the gradient is finite. If not, the caller must discard `params`,
      `slots` and `out`, whose contents are undefined.

    Raises:
      TypeError, ValueError: A dtype, shape or count is not the kernel's.
    """
    numbers = check_arguments(
        kernel, gradient=gradient, params=params, slots=slots,
        scalars=scalars, arrays=arrays, out=out,
    )  # fmt: skip
    num, plan = gradient.size, _plan_of(kernel)
    run = _Run(plan, numbers, num)
    finite = True
    with np.errstate(all="ignore"):
        for start in range(0, num, BLOCK_ELEMENTS):
            block = slice(start, min(start + BLOCK_ELEMENTS, num))
            coded = [_block(state, block) for state in (params, *slots)]
            master, *states = [_decoded(part) for part in coded]
            run.load(master, states, _blocks(arrays, block))
            finite = run.load_gradient(gradient[block]) and finite
            run.compute(out[block])
            run.store_update(out[block])
            run.store_slots()
            run.store_params(out[block])
            _encode(plan, coded, [master, *states], out[block])
    return finite


def initialise(
    kernel: InitKernel,
    *,
    params: Array,
    slots: Sequence[Array],
    scalars: Sequence[np.generic | Array] = (),
    arrays: Sequence[Array] = (),
) -> None:
    """Writes one chunk's first state into `slots`; blocks; thread-safe.

    Args:
      kernel: A leaf's first state.
      params: ``(n,)`` float32 master; only read.
      slots: ``(n,)`` each, of the slots' dtypes; only written.
      scalars: 0-d, the prologue's results.
      arrays: ``(n,)`` each, the chunk's part of the prologue's arrays.

    Raises:
      TypeError, ValueError: A dtype, shape or count is not the kernel's.
    """
    numbers = check_init_arguments(
        kernel, params=params, slots=slots, scalars=scalars, arrays=arrays
    )
    num = params.size
    run = _Run(_plan_of(kernel), numbers, num)
    with np.errstate(all="ignore"):
        for start in range(0, num, BLOCK_ELEMENTS):
            block = slice(start, min(start + BLOCK_ELEMENTS, num))
            run.load(params[block], _blocks(slots, block), _blocks(arrays, block))
            run.compute(None)
            run.store_slots()


@functools.cache
def _plan_of(kernel: Kernel | InitKernel) -> Plan:
    update = kernel.update if isinstance(kernel, Kernel) else None
    return make_plan(kernel.equations, update, kernel.new_slots, kernel.slot_dtypes)


def _encode(
    plan: Plan,
    coded: Sequence[Array | CodedSlot],
    values: Sequence[Array],
    out: Array,
) -> None:
    """Encodes new values of coded params and slots; 16-bit `out` gets params' codes."""
    params, *slots = coded
    if isinstance(params, CodedSlot):
        if plan.update is not None:
            params.encode(values[0])
        if out.dtype != FLOAT32:
            out[...] = params.codes
    for slot, value, place in zip(slots, values[1:], plan.new_slots, strict=True):
        if isinstance(slot, CodedSlot) and place is not None:
            slot.encode(value)


class _Run:
    """The buffers of one call."""

    def __init__(self, plan: Plan, scalars: Sequence[np.generic], num: int) -> None:
        self._plan = plan
        self._capacity = min(num, BLOCK_ELEMENTS)
        self._table: list[Any] = [None] * plan.num_places
        self._buffers = {
            place: np.empty(self._capacity, dtype)
            for place, dtype in plan.registers.items()
        }
        self._wide: dict[int, Array] = {}
        self._scratch = np.empty(self._capacity, FLOAT32)
        self._slots: Sequence[Array] = ()
        self._num = 0
        for operand, place in plan.places.items():
            if isinstance(operand, Constant):
                self._table[place] = operand.value.astype(storage_dtype(operand.dtype))
            elif operand.kind == "scalar":
                wide = storage_dtype(operand.dtype)
                self._table[place] = scalars[operand.index].astype(wide)

    def load(
        self, params: Array, slots: Sequence[Array], arrays: Sequence[Array]
    ) -> None:
        self._num = params.size
        self._slots = slots
        table = self._table
        table[PARAMS] = params
        for place, buffer in self._buffers.items():
            table[place] = buffer[: self._num]
        # Slots that are never read still need places for their new values.
        for place, slot in zip(self._plan.slot_places, slots, strict=True):
            table[place] = slot
        for operand, place in self._plan.places.items():
            if isinstance(operand, Input) and operand.kind in ("slot", "array"):
                source = slots if operand.kind == "slot" else arrays
                table[place] = self._widen(source[operand.index], place)

    def load_gradient(self, gradient: Array) -> bool:
        """Loads the gradient, and returns whether all of it is finite."""
        wide = self._widen(gradient, GRADIENT)
        self._table[GRADIENT] = wide
        return bool(np.isfinite(wide.min()) and np.isfinite(wide.max()))

    def compute(self, out: Array | None) -> None:
        table = self._table
        if out is not None:
            narrow = out.dtype != FLOAT32
            table[UPDATE] = self._buffer(UPDATE, FLOAT32) if narrow else out
        for step in self._plan.steps:
            result = table[step.out]
            step.operation(result, *[table[p] for p in step.inputs], **step.params)
            if step.round_to is not None:
                result[...] = result.astype(step.round_to)

    def store_update(self, out: Array) -> None:
        if self._plan.update is None:
            if out.dtype == FLOAT32:
                out.fill(0)
            return
        update = self._table[UPDATE]
        if self._plan.update != UPDATE:
            np.copyto(update, self._table[self._plan.update])
        self._flush(update)

    def store_slots(self) -> None:
        plan = self._plan
        for index, (place, own) in enumerate(
            zip(plan.new_slots, plan.slot_places, strict=True)
        ):
            slot = self._slots[index]
            if place is None:
                continue
            if place != own or self._table[own] is not slot:
                np.copyto(slot, self._table[place], casting="unsafe")
            if slot.dtype == FLOAT32:
                self._flush(slot)

    def store_params(self, out: Array) -> None:
        params = self._table[PARAMS]
        if self._plan.update is not None:
            np.add(params, self._table[UPDATE], out=params)
            self._flush(params)
        if out.dtype != FLOAT32:
            np.copyto(out, params, casting="unsafe")

    def _flush(self, values: Array) -> None:
        flush_denormals(values, self._scratch[: self._num])

    def _widen(self, values: Array, place: int) -> Array:
        wide = storage_dtype(values.dtype)
        if wide == values.dtype:
            return values
        buffer = self._buffer(place, wide)
        np.copyto(buffer, values)
        return buffer

    def _buffer(self, place: int, dtype: np.dtype) -> Array:
        if place not in self._wide:
            self._wide[place] = np.empty(self._capacity, dtype)
        return self._wide[place][: self._num]


def _blocks(arrays: Sequence[Array], block: slice) -> list[Array]:
    return [array[block] for array in arrays]


def _block(state: Array | CodedSlot, block: slice) -> Array | CodedSlot:
    if isinstance(state, CodedSlot):
        return state.part(block.start, block.stop)
    return state[block]


def _decoded(state: Array | CodedSlot) -> Array:
    return state.decode() if isinstance(state, CodedSlot) else state
