"""Runs a body over chunks with NumPy, block by block.

Invariant: an evaluator holds no buffer between calls, so that any number of threads
may share it; a call's temporary memory is a few blocks, whatever the chunk.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np

from jaxinf.kernels.codecs import CodedSlot
from jaxinf.kernels.ir import Constant, Equation, Input, Operand
from jaxinf.kernels.operations import flush_denormals
from jaxinf.kernels.plan import (
    GRADIENT,
    PARAMS,
    UPDATE,
    Plan,
    make_plan,
    storage_dtype,
)
from jaxinf.kernels.tree import FLOAT32, FLOAT_DTYPES
from jaxinf.layout import CODE_BLOCK
from jaxinf.typing import Array

__all__ = ["BLOCK_ELEMENTS", "Evaluator"]

_BF16 = np.dtype(ml_dtypes.bfloat16)

BLOCK_ELEMENTS = 32 << 10
"""Large enough that NumPy's overhead and the GIL do not matter, small enough for L2."""


@dataclass(frozen=True, kw_only=True)
class Evaluator:
    """Evaluates the body of a `Kernel` or `InitKernel`; attributes as there."""

    equations: tuple[Equation, ...]
    new_slots: tuple[Operand, ...]
    slot_dtypes: tuple[np.dtype, ...]
    scalar_dtypes: tuple[np.dtype, ...]
    array_dtypes: tuple[np.dtype, ...]
    update: Operand | None = None

    def run_update(
        self,
        *,
        gradient: Array,
        params: Array | CodedSlot,
        slots: Sequence[Array | CodedSlot],
        scalars: Sequence[np.generic | Array],
        arrays: Sequence[Array],
        out: Array,
    ) -> bool:
        """See `Kernel.evaluate`."""
        numbers = self.check_update(
            gradient=gradient, params=params, slots=slots,
            scalars=scalars, arrays=arrays, out=out,
        )  # fmt: skip
        num = gradient.size
        run = _Run(self._plan, numbers, num)
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
                self._encode(coded, [master, *states], out[block])
        return finite

    def _encode(
        self,
        coded: Sequence[Array | CodedSlot],
        values: Sequence[Array],
        out: Array,
    ) -> None:
        """Stores what is coded of params and slots; 16-bit `out` gets such params."""
        params, *slots = coded
        if isinstance(params, CodedSlot):
            if self._plan.update is not None:
                params.encode(values[0])
            if out.dtype != FLOAT32:
                out[...] = params.codes
        for index, slot in enumerate(slots):
            if isinstance(slot, CodedSlot) and self._writes(index):
                slot.encode(values[1 + index])

    def _writes(self, index: int) -> bool:
        return self._plan.new_slots[index] is not None

    def check_update(
        self,
        *,
        gradient: Array,
        params: Array | CodedSlot,
        slots: Sequence[Array | CodedSlot],
        scalars: Sequence[np.generic | Array],
        arrays: Sequence[Array],
        out: Array,
    ) -> list[np.generic]:
        """See `Kernel.check_arguments`."""
        if isinstance(params, CodedSlot):
            num = params.codes.size
            _require_bf16("params", params, num)
        else:
            num = params.size
            _require_chunk("params", params, num, (FLOAT32,))
        self._check(num, slots, scalars, arrays)
        _require_chunk("gradient", gradient, num, FLOAT_DTYPES)
        is_coded = isinstance(params, CodedSlot)
        _require_chunk("out", out, num, (FLOAT32, _BF16) if is_coded else FLOAT_DTYPES)
        return self._scalars(scalars)

    def run_init(
        self,
        *,
        params: Array,
        slots: Sequence[Array],
        scalars: Sequence[np.generic | Array],
        arrays: Sequence[Array],
    ) -> None:
        """See `InitKernel.initialise`."""
        num = params.size
        _require_chunk("params", params, num, (FLOAT32,))
        self._check(num, slots, scalars, arrays)
        run = _Run(self._plan, self._scalars(scalars), num)
        with np.errstate(all="ignore"):
            for start in range(0, num, BLOCK_ELEMENTS):
                block = slice(start, min(start + BLOCK_ELEMENTS, num))
                run.load(params[block], _blocks(slots, block), _blocks(arrays, block))
                run.compute(None)
                run.store_slots()

    @cached_property
    def _plan(self) -> Plan:
        return make_plan(self.equations, self.update, self.new_slots, self.slot_dtypes)

    def _check(
        self,
        num: int,
        slots: Sequence[Array | CodedSlot],
        scalars: Sequence[Any],
        arrays: Sequence[Array],
    ) -> None:
        for what, found, dtypes in (
            ("slots", slots, self.slot_dtypes),
            ("scalars", scalars, self.scalar_dtypes),
            ("arrays", arrays, self.array_dtypes),
        ):
            if len(found) != len(dtypes):
                raise ValueError(
                    f"{what}: the kernel expects {len(dtypes)}, found {len(found)}"
                )
        for index, dtype in enumerate(self.slot_dtypes):
            slot = slots[index]
            if isinstance(slot, CodedSlot):
                _require_coded(f"slots[{index}]", slot, num, dtype)
            else:
                _require_chunk(f"slots[{index}]", slot, num, (dtype,))
        for index, dtype in enumerate(self.array_dtypes):
            _require_chunk(f"arrays[{index}]", arrays[index], num, (dtype,))

    def _scalars(self, scalars: Sequence[Any]) -> list[np.generic]:
        numbers = []
        for index, dtype in enumerate(self.scalar_dtypes):
            number = np.asarray(scalars[index])
            if number.shape or number.dtype != dtype:
                raise TypeError(
                    f"scalars[{index}]: the kernel expects a 0-d {dtype}, found "
                    f"{number.dtype} of shape {number.shape}"
                )
            numbers.append(number[()])
        return numbers


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
        # Slots that are not read are places to write to all the same.
        for place, slot in zip(self._plan.slot_places, slots, strict=True):
            table[place] = slot
        for operand, place in self._plan.places.items():
            if isinstance(operand, Input) and operand.kind in ("slot", "array"):
                source = slots if operand.kind == "slot" else arrays
                table[place] = self._widen(source[operand.index], place)

    def load_gradient(self, gradient: Array) -> bool:
        """Makes the gradient ready to be read; whether all of it is finite."""
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


def _require_coded(what: str, slot: CodedSlot, num: int, dtype: np.dtype) -> None:
    """Codes stand for a float32 slot, and end on a block's end."""
    if dtype != FLOAT32:
        raise TypeError(f"{what}: the kernel expects {dtype}, found codes of float32")
    if slot.scales is not None:
        num_blocks = -(-num // CODE_BLOCK)
        _require_chunk(what, slot.codes, num, (np.dtype(np.uint8),))
        _require_chunk(f"{what}.scales", slot.scales, num_blocks, (FLOAT32,))
    else:
        _require_bf16(what, slot, num)


def _require_bf16(what: str, coded: CodedSlot, num: int) -> None:
    _require_chunk(what, coded.codes, num, (_BF16,))
    if coded.remainders is not None:
        int16 = np.dtype(np.int16)
        _require_chunk(f"{what}.remainders", coded.remainders, num, (int16,))


def _require_chunk(what: str, array: Array, num: int, dtypes: Any) -> None:
    if array.shape != (num,):
        raise ValueError(
            f"{what}: the kernel expects shape ({num},), found {array.shape}"
        )
    if array.dtype not in dtypes:
        names = " or ".join(str(dtype) for dtype in dtypes)
        raise TypeError(f"{what}: the kernel expects {names}, found {array.dtype}")
