"""Assigns a buffer to each value of a body, for the computation of a block.

Invariant: a place is reused only after its value's last use, and a slot is overwritten
only after its old value's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxinf.kernels.operations import IN_PLACE, OPERATIONS, Operation
from jaxinf.program.ir import Constant, Equation, Input, Operand, Result
from jaxinf.typing import BFLOAT16, FLOAT16, FLOAT32

__all__ = ["Plan", "Step", "make_plan", "storage_dtype"]

GRADIENT, PARAMS, UPDATE = range(3)


def storage_dtype(dtype: np.dtype) -> np.dtype:
    """Returns the dtype of buffers for `dtype`: float32 for 16-bit floats."""
    return FLOAT32 if dtype in (BFLOAT16, FLOAT16) else dtype


@dataclass(frozen=True)
class Step:
    """One operation on places; its result is rounded to `round_to` unless None."""

    operation: Operation
    inputs: tuple[int, ...]
    params: Mapping[str, Any]
    out: int
    round_to: np.dtype | None


@dataclass
class Plan:
    """Numbered places: gradient, params, update, then others in order of appearance.

    Attributes:
      places: The place of each input and constant that is read.
      registers: Place and dtype of each buffer that holds intermediate values.
      steps: The operations in order.
      update: The final place of `u`; None for zero.
      new_slots: The final place of each slot's new value; None if unchanged.
      slot_places: The slots' own places.
    """

    slot_places: tuple[int, ...]
    num_places: int
    places: dict[Input | Constant, int] = field(default_factory=dict)
    registers: dict[int, np.dtype] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    update: int | None = None
    new_slots: tuple[int | None, ...] = ()


def make_plan(
    equations: Sequence[Equation],
    update: Operand | None,
    new_slots: Sequence[Operand],
    slot_dtypes: Sequence[np.dtype],
) -> Plan:
    """Plans the steps of a body."""
    return _Planner(equations, update, new_slots, slot_dtypes).plan()


class _Planner:
    def __init__(
        self,
        equations: Sequence[Equation],
        update: Operand | None,
        new_slots: Sequence[Operand],
        slot_dtypes: Sequence[np.dtype],
    ) -> None:
        first = UPDATE + 1
        slot_places = tuple(range(first, first + len(slot_dtypes)))
        self._plan = Plan(slot_places, first + len(slot_dtypes))
        self._equations = equations
        self._update = update
        self._new_slots = new_slots
        self._slot_dtypes = slot_dtypes
        self._result_places: dict[int, int] = {}
        self._free: dict[np.dtype, list[int]] = {}
        self._last_use = self._last_uses()

    def plan(self) -> Plan:
        for index, equation in enumerate(self._equations):
            self._add_step(index, equation)
        plan = self._plan
        plan.new_slots = tuple(
            self._final(index, value) for index, value in enumerate(self._new_slots)
        )
        plan.update = None if self._update is None else self._place(self._update)
        return plan

    def _last_uses(self) -> dict[Operand, int]:
        uses: dict[Operand, int] = {}
        for index, equation in enumerate(self._equations):
            uses.update(dict.fromkeys(equation.inputs, index))
        end = len(self._equations)
        for index, value in enumerate(self._new_slots):
            if not _is_slot(value, index):
                uses[value] = end
        if self._update is not None:
            uses[self._update] = end
        return uses

    def _add_step(self, index: int, equation: Equation) -> None:
        inputs = tuple(self._place(operand) for operand in equation.inputs)
        dying = [o for o in set(equation.inputs) if self._last_use[o] == index]
        in_place = equation.op in IN_PLACE
        if in_place:
            self._release(dying)
        out = self._destination(index, equation.dtype, in_place)
        if not in_place:
            self._release(dying)
        self._result_places[index] = out
        rounded = storage_dtype(equation.dtype) != equation.dtype
        params = dict(equation.params)
        round_to = equation.dtype if rounded else None
        if equation.op == "reduce_precision":
            operation = OPERATIONS["convert_element_type"]
            target = np.dtype(params.pop("to"))
            round_to = round_to if target == FLOAT32 else target
        else:
            operation = OPERATIONS[equation.op]
        self._plan.steps.append(Step(operation, inputs, params, out, round_to))

    def _destination(self, index: int, dtype: np.dtype, in_place: bool) -> int:
        """Returns the result's final place if it is free, else a register."""
        result = Result(index, dtype)
        for slot, value in enumerate(self._new_slots):
            old = Input("slot", slot, self._slot_dtypes[slot])
            last_use = self._last_use.get(old, -1)
            done = last_use <= index if in_place else last_use < index
            if value == result and done and storage_dtype(dtype) == dtype:
                return self._plan.slot_places[slot]
        if self._update == result:
            return UPDATE
        return self._register(storage_dtype(dtype))

    def _register(self, dtype: np.dtype) -> int:
        free = self._free.setdefault(dtype, [])
        if free:
            return free.pop()
        place = self._new_place()
        self._plan.registers[place] = dtype
        return place

    def _release(self, operands: Sequence[Operand]) -> None:
        for operand in operands:
            place = self._place(operand)
            if isinstance(operand, Result) and place in self._plan.registers:
                self._free[self._plan.registers[place]].append(place)

    def _place(self, operand: Operand) -> int:
        match operand:
            case Result():
                return self._result_places[operand.index]
            case Input(kind="gradient"):
                return self._plan.places.setdefault(operand, GRADIENT)
            case Input(kind="params"):
                return self._plan.places.setdefault(operand, PARAMS)
            case Input(kind="slot"):
                own = self._plan.slot_places[operand.index]
                return self._plan.places.setdefault(operand, own)
        if operand not in self._plan.places:
            self._plan.places[operand] = self._new_place()
        return self._plan.places[operand]

    def _new_place(self) -> int:
        self._plan.num_places += 1
        return self._plan.num_places - 1

    def _final(self, slot: int, value: Operand) -> int | None:
        if _is_slot(value, slot):
            return None
        place = self._place(value)
        if not (isinstance(value, Input) and value.kind == "slot"):
            return place
        # This is another slot's old value: copy it before that slot is written.
        copy = self._register(storage_dtype(value.dtype))
        operation = OPERATIONS["convert_element_type"]
        self._plan.steps.append(Step(operation, (place,), {}, copy, None))
        return copy


def _is_slot(value: Operand, index: int) -> bool:
    return isinstance(value, Input) and (value.kind, value.index) == ("slot", index)
