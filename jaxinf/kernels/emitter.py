"""Emits kernels as C++: the arithmetic of one element, without a loop.

Invariant: the text depends on the equations alone. Literals are numbered arguments (the
*constants*), and the shell handles storage dtypes. So kernels that differ only in
hyperparameters or in the precision of their state share one compiled function.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxinf.errors import UnsupportedTransformError
from jaxinf.kernels.calls import scalar_word
from jaxinf.kernels.lowering import lower, uniform_results
from jaxinf.program import Constant, Equation, Input, Kernel, Operand, Result
from jaxinf.typing import FLOAT32

_TYPES = {"float32": "F32", "int32": "I32", "uint32": "U32", "bool": "I32"}
_INFIX = dict(zip("add sub mul div and or xor".split(), "+-*/&|^", strict=True))
_ROUNDINGS = {"bfloat16": "L::round_bf16", "float16": "L::round_f16"}
_COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_CALLS = frozenset(
    """
    abs cbrt ceil clamp cos exp exp2 expm1 floor fma fms fnma is_finite log log1p
    logistic max min nextafter pow reciprocal rem sign sin sqrt tanh
    """.split()
)


@dataclass(frozen=True)
class Source:
    """A translation unit for the host's shell, and its literals of 32 bits in order."""

    text: str
    constants: tuple[int, ...]


def emit(kernel: Kernel) -> Source:
    """Lowers a kernel, and returns it as C++; refuses values without a 32-bit form."""
    return _Emitter(lower(kernel)).emit()


@dataclass
class _Emitter:
    body: Kernel
    constants: list[int] = field(default_factory=list)
    members: list[str] = field(default_factory=list)
    setup: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    names: dict[Operand, str] = field(default_factory=dict)

    def emit(self) -> Source:
        body = self.body
        slots = [
            name if name in _READABLE_SLOTS else f"slot_{number}"
            for number, name in enumerate(body.slots)
        ]
        self._name_inputs(slots)
        for slot, value in zip(slots, body.new_slots, strict=True):
            if isinstance(value, Result):
                self.names.setdefault(value, f"new_{slot}")
        uniform = uniform_results(body.equations)
        for index, equation in enumerate(body.equations):
            result = Result(index, equation.dtype)
            cpp_type, value = _cpp_type(equation.dtype), self._expression(equation)
            if uniform[index]:
                self.names[result] = self._member(f"r{index}", cpp_type, value)
            else:
                name = self.names.setdefault(result, f"t{index}")
                self.lines.append(f"const {cpp_type} {name} = {value};")
        writes = [name not in body.unchanged for name in body.slots]
        for number, value in enumerate(body.new_slots):
            if writes[number]:
                bits = f"L::bits({self._operand(value)})"
                self.lines.append(f"new_slots[{number}] = {bits};")
        if body.update is not None:
            self.lines.append(f"update = {self._operand(body.update)};")
        setup = "\n      , ".join(self.setup)
        text = _TEMPLATE.format(
            num_slots=len(body.slots),
            num_arrays=len(body.array_dtypes),
            has_update=str(body.update is not None).lower(),
            writes=", ".join(map(str, [*writes, False])).lower(),
            members="".join(f"  {line}\n" for line in self.members),
            setup=f"\n      : {setup}" if setup else "",
            lines="".join(f"    {line}\n" for line in self.lines),
        )
        return Source(text, tuple(self.constants))

    def _name_inputs(self, slots: Sequence[str]) -> None:
        used = {o for equation in self.body.equations for o in equation.inputs}
        used |= {o for o in (self.body.update, *self.body.new_slots) if o is not None}
        inputs = [operand for operand in used if isinstance(operand, Input)]
        for operand in sorted(inputs, key=lambda o: (o.kind, o.index)):
            number, kind = operand.index, operand.kind
            if kind in ("gradient", "params"):
                self.names[operand] = kind
                continue
            cpp_type = _cpp_type(operand.dtype)
            if kind == "scalar":
                value = _from_bits(cpp_type, f"L::uniform(scalars[{number}])")
                self.names[operand] = self._member(f"s{number}", cpp_type, value)
                continue
            name = slots[number] if kind == "slot" else f"a{number}"
            value = _from_bits(cpp_type, f"{kind}s[{number}]")
            self.lines.append(f"const {cpp_type} {name} = {value};")
            self.names[operand] = name

    def _member(self, name: str, cpp_type: str, value: str) -> str:
        self.members.append(f"const {cpp_type} {name};")
        self.setup.append(f"{name}({value})")
        return name

    def _operand(self, operand: Operand) -> str:
        if isinstance(operand, Constant):
            cpp_type, number = _cpp_type(operand.dtype), len(self.constants)
            self.constants.append(scalar_word(operand.value))
            value = _from_bits(cpp_type, f"L::uniform(constants[{number}])")
            return self._member(f"c{number}", cpp_type, value)
        return self.names[operand]

    def _expression(self, equation: Equation) -> str:
        op, dtype = equation.op, equation.dtype
        inputs = [self._operand(operand) for operand in equation.inputs]
        first_dtype = equation.inputs[0].dtype
        if op in _INFIX and not (op == "div" and dtype != FLOAT32):
            return f"{inputs[0]} {_INFIX[op]} {inputs[1]}"
        if op in _COMPARE:
            return f"(I32)({inputs[0]} {_COMPARE[op]} {inputs[1]})"
        if op == "rsqrt":
            return f"lanes.rsqrt({inputs[0]})"
        if op in _CALLS or op == "div":
            return f"L::{op}({', '.join(inputs)})"
        match op:
            case "neg":
                return f"-{inputs[0]}"
            case "not":
                return f"~{inputs[0]}"
            case "round":
                to_even = dict(equation.params)["to_even"]
                return f"L::round_{'even' if to_even else 'away'}({inputs[0]})"
            case "reduce_precision":
                name = _ROUNDINGS.get(dict(equation.params)["to"])
                return f"{name}({inputs[0]})" if name else inputs[0]
            case "select_n":
                return _select(inputs, first_dtype)
            case "convert_element_type":
                return _convert(inputs[0], first_dtype, dtype)
        raise _refusal(f"the operation {op} on {dtype}")


def _cpp_type(dtype: np.dtype) -> str:
    if dtype.name not in _TYPES:
        raise _refusal(f"values of {dtype}")
    return _TYPES[dtype.name]


def _refusal(what: str) -> UnsupportedTransformError:
    return UnsupportedTransformError(
        "the optimizer's kernel: expected float32 and 32-bit integers, to which 16-bit "
        f"floats are widened, found {what}; compute in float32 or int32"
    )


def _from_bits(cpp_type: str, bits: str) -> str:
    return bits if cpp_type == "F32" else f"L::as_{cpp_type.lower()}({bits})"


def _select(inputs: Sequence[str], index_dtype: np.dtype) -> str:
    index, *cases = inputs
    if index_dtype == np.bool_:
        return f"L::select({index}, {cases[1]}, {cases[0]})" if cases[1:] else cases[0]
    text = cases[-1]
    for number in reversed(range(len(cases) - 1)):
        text = f"L::select((I32)({index} <= {number}), {cases[number]}, {text})"
    return text


def _convert(value: str, source: np.dtype, target: np.dtype) -> str:
    from_type, to_type = _cpp_type(source), _cpp_type(target)
    if target == np.bool_:
        return f"(I32)({value} != 0)"
    if source == np.bool_:
        is_float = to_type == "F32"
        return f"L::f32_of_mask({value})" if is_float else f"({to_type})({value} & 1)"
    if from_type == to_type:
        return value
    if "F32" in (from_type, to_type):
        return f"L::{to_type.lower()}({value})"
    return f"({to_type}){value}"


_READABLE_SLOTS = frozenset(("average", "mu", "nu", "sum_of_squares", "trace"))
"""Slots that keep their names in C++, those of the package's kernels; others get
numbers."""

_TEMPLATE = """\
#include "shell.hpp"

namespace {{

template <class L>
struct Body {{
  using F32 = typename L::F32;
  using I32 = typename L::I32;
  using U32 = typename L::U32;
  static constexpr int num_slots = {num_slots}, num_arrays = {num_arrays};
  static constexpr bool has_update = {has_update};
  static constexpr bool writes[] = {{{writes}}};
{members}
  Body([[maybe_unused]] const L& lanes,
       [[maybe_unused]] const jaxinf::Word* constants,
       [[maybe_unused]] const jaxinf::Word* scalars){setup} {{}}

  JAXINF_INLINE void operator()([[maybe_unused]] const L& lanes,
                                [[maybe_unused]] F32 gradient,
                                [[maybe_unused]] F32 params,
                                [[maybe_unused]] const F32* slots,
                                [[maybe_unused]] const F32* arrays,
                                [[maybe_unused]] F32& update,
                                [[maybe_unused]] F32* new_slots) const {{
{lines}  }}
}};

}}  // namespace

JAXINF_HOST_KERNEL(Body)
"""
