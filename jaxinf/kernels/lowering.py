"""Turns optax's equations into the operations that XLA computes on a CPU.

Invariant: a lowered body has exactly the roundings of the jitted update on XLA's CPU
backend, as far as they follow from the equations. Every backend (C++, HLS) translates
it one to one, with contraction turned off.

The passes imitate XLA's:

* *excess precision*: operations on 16-bit floats are computed in float32, and a value
  is rounded to 16 bits only where it is stored (``xla_allow_excess_precision``).
* *expansion*: integer powers become products by repeated squaring.
* *reciprocals*: ``x / c`` with a literal becomes ``x * (1 / c)``. So does ``x / s`` if
  the scalar `s` is broadcast for this division and used nowhere else in the whole
  update (`Kernel.reciprocals`). The bias corrections of a single leaf are such scalars;
  those of several leaves are shared, and are not.
* *quotients*: ``(a / b) / c`` becomes ``a / (b * c)``, ``a / (b / c)`` becomes
  ``(a * c) / b``, and ``(a / b) / (c / d)`` becomes ``(a * d) / (b * c)``;
  ``a / sqrt(b)`` becomes ``a * rsqrt(b)``, and two literal factors become one.
* *units*: products with 1 and -1 are dropped. This matters only where the product would
  flush a denormal or be fused. Elsewhere the product stays, so that one source serves
  every value of the literal.
* *fusions*: every output of the update has its own loop. The loop reads the outputs
  that it depends on from memory and computes all else again, so a value's uses are
  counted in each loop separately. An expensive value (a division, a root) that several
  loops use gets its own loop, and so does one that a reduction reads, too.
* *contraction*: LLVM turns an addition of a product that is used nowhere else into a
  fused multiply-add. With two such products the first operand is fused, after the
  operands have been put in order of *rank* (LLVM's Reassociate): a load ranks by its
  place in the loop, an operation one above its highest operand. XLA emits a loop by
  distance from its root, the farthest first, so that loads of deep values come first.
  A first operand with a negative literal factor goes second: LLVM subtracts its
  opposite.

XLA itself is not consistent in a few cases, and there the last bits may differ: adam
with Nesterov momentum on leaves of one element, or with bfloat16 mu on leaves large
enough for several threads (loads of scalars have ranks there); the last element of
adagrad's leaves of 8 k + 1 elements in jax 0.12 (a vector of one lane is not fused);
branches of ``lax.cond`` on state (apply_if_finite), which XLA compiles separately.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from jaxinf.program import Constant, Equation, Input, Kernel, Operand, Result
from jaxinf.typing import BFLOAT16, FLOAT16, FLOAT32


def lower(kernel: Kernel) -> Kernel:
    """Applies all passes to a kernel's equations.

    Further operations are ``fma`` (a * b + c), ``fms`` (a * b - c), ``fnma`` (c - a *
    b), each rounded once, and ``reciprocal``. No value is a 16-bit float: slots and
    scalars of such dtypes are read widened, and new slots are rounded where they are
    stored.
    """
    simplifier = _Simplifier(kernel.reciprocals)
    values = [simplifier.simplify(equation) for equation in kernel.equations]
    update = None if kernel.update is None else simplifier.operand(kernel.update)
    new_slots = [simplifier.operand(value) for value in kernel.new_slots]
    stored = [
        value
        for value, dtype in zip(new_slots, kernel.slot_dtypes, strict=True)
        if dtype not in (BFLOAT16, FLOAT16)
    ]
    outputs = stored if update is None else [update, *stored]
    reduced = [values[number] for number in kernel.reduced]
    roots = {value for value in (*outputs, *reduced) if isinstance(value, Result)}
    roots |= _find_shared(simplifier.equations, roots)
    contracted, loop_results = _Builder(), dict[Operand, Operand]()

    def contract_loop(root: Operand) -> Operand:
        """Contracts an output's loop, after those that it reads."""
        if isinstance(root, Result) and root not in loop_results:
            loop = _Loop(simplifier.equations, roots - {root}, root)
            for read in loop.reads:
                contract_loop(read)
            loop_results[root] = contract(loop, root, {})
        return loop_results.get(root, root)

    def contract(
        loop: _Loop, operand: Operand, known: dict[Operand, Operand]
    ) -> Operand:
        if not isinstance(operand, Result) or operand in loop.reads:
            return loop_results.get(operand, operand)
        if operand not in known:
            equation = loop.fuse(operand)
            inputs = tuple(contract(loop, value, known) for value in equation.inputs)
            known[operand] = contracted.add(replace(equation, inputs=inputs))
        return known[operand]

    # The equations of the stored values come first, then those of the update.
    new_slots = tuple(map(contract_loop, new_slots))
    update = None if update is None else contract_loop(update)
    equations = tuple(contracted.equations)
    return replace(kernel, equations=equations, update=update, new_slots=new_slots)


def uniform_results(equations: Sequence[Equation]) -> list[bool]:
    uniform: list[bool] = []
    for equation in equations:
        uniform.append(all(_is_uniform(o, uniform) for o in equation.inputs))
    return uniform


def _is_uniform(operand: Operand, results: Sequence[bool]) -> bool:
    match operand:
        case Constant():
            return True
        case Input():
            return operand.kind == "scalar"
    return results[operand.index]


def _unit(operand: Operand) -> int:
    """Returns 1 or -1 if the operand is that literal, else 0."""
    if isinstance(operand, Constant) and abs(_number(operand)) == 1:
        return int(_number(operand))
    return 0


def _number(constant: Constant) -> np.float32:
    return np.float32(constant.value)  # type: ignore[arg-type]


def _widen(dtype: np.dtype) -> np.dtype:
    return FLOAT32 if dtype in (BFLOAT16, FLOAT16) else dtype


@dataclass
class _Builder:
    """Equations without repetition."""

    equations: list[Equation] = field(default_factory=list)
    _results: dict[Equation, Result] = field(default_factory=dict)

    def apply(self, op: str, dtype: np.dtype, *inputs: Operand) -> Result:
        return self.add(Equation(op, inputs, (), dtype))

    def add(self, equation: Equation) -> Result:
        if equation not in self._results:
            result = Result(len(self.equations), equation.dtype)
            self._results[equation] = result
            self.equations.append(equation)
        return self._results[equation]


class _Simplifier(_Builder):
    """Excess precision, expansion, reciprocals, quotients and units."""

    def __init__(self, reciprocals: Sequence[bool]) -> None:
        super().__init__()
        self._reciprocals = {i for i, flag in enumerate(reciprocals) if flag}
        self._values: list[Operand] = []

    def simplify(self, equation: Equation) -> Operand:
        """Translates the next equation of the kernel."""
        inputs = tuple(map(self.operand, equation.inputs))
        value = self._translate(replace(equation, inputs=inputs))
        self._values.append(value)
        return value

    def operand(self, operand: Operand) -> Operand:
        """Returns an operand of the kernel in its new form, widened to 32 bits."""
        match operand:
            case Result():
                return self._values[operand.index]
            case Constant():
                wide = _widen(operand.dtype)
                return Constant.of(operand.value.astype(wide), wide)
        return replace(operand, dtype=_widen(operand.dtype))

    def _translate(self, equation: Equation) -> Operand:
        dtype = _widen(equation.dtype)
        inputs = equation.inputs
        match equation.op:
            case "convert_element_type" if inputs[0].dtype == dtype:
                return inputs[0]
            case "square":
                return self.apply("mul", dtype, inputs[0], inputs[0])
            case "integer_pow" if dtype == FLOAT32:
                return self._power(inputs[0], dict(equation.params)["y"])
            case "div" if dtype == FLOAT32:
                return self._divide(*inputs)
            case "mul" if dtype == FLOAT32:
                return self._multiply(*inputs)
            case "add" | "sub" if dtype == FLOAT32:
                inputs = self._drop_units(inputs)
                equation = replace(equation, inputs=inputs)
        return self.add(replace(equation, dtype=dtype))

    def _multiply(self, x: Operand, y: Operand) -> Operand:
        # XLA moves constants to the right, which changes the order of loads.
        if isinstance(x, Constant) and not isinstance(y, Constant):
            x, y = y, x
        if self._may_be_denormal(x) and (unit := _unit(y)):
            return x if unit > 0 else self.apply("neg", FLOAT32, x)
        factors = self._inputs_if("mul", x)
        if factors and isinstance(y, Constant) and isinstance(factors[1], Constant):
            with np.errstate(all="ignore"):
                product = _number(factors[1]) * _number(y)
            return self._multiply(factors[0], Constant.of(product, FLOAT32))
        return self.apply("mul", FLOAT32, x, y)

    def _may_be_denormal(self, operand: Operand) -> bool:
        """Whether the value may be denormal; arithmetic has flushed its results."""
        if isinstance(operand, Result):
            return self.equations[operand.index].op in ("neg", "abs", "select_n")
        return not isinstance(operand, Constant)

    def _drop_units(self, terms: tuple[Operand, ...]) -> tuple[Operand, ...]:
        """Drops a factor 1 from two products, so that only a real product is fused."""
        products = [self._inputs_if("mul", term) for term in terms]
        if not all(products):
            return terms
        return tuple(
            factors[0] if factors and _unit(factors[1]) > 0 else term
            for term, factors in zip(terms, products, strict=True)
        )

    def _inputs_if(self, op: str, operand: Operand) -> tuple[Operand, ...] | None:
        """Returns the inputs of the operand's equation if that is an `op`."""
        if isinstance(operand, Result) and self.equations[operand.index].op == op:
            return self.equations[operand.index].inputs
        return None

    def _invert(self, divisor: Operand) -> Operand:
        if isinstance(divisor, Constant):
            with np.errstate(all="ignore"):
                return Constant.of(np.float32(1) / _number(divisor), FLOAT32)
        return self.apply("reciprocal", FLOAT32, divisor)

    def _divide(self, x: Operand, y: Operand) -> Operand:
        is_uniform = _is_uniform(x, uniform_results(self.equations))
        if not is_uniform and self._is_inverted(y):
            return self._multiply(x, self._invert(y))
        if root := self._inputs_if("sqrt", y):
            return self._multiply(x, self.apply("rsqrt", FLOAT32, *root))
        above, below = self._inputs_if("div", x), self._inputs_if("div", y)
        if above and below:
            x = self._multiply(above[0], below[1])
            y = self._multiply(above[1], below[0])
        elif above:
            x, y = above[0], self._multiply(above[1], y)
        elif below:
            x, y = self._multiply(x, below[1]), below[0]
        return self.apply("div", FLOAT32, x, y)

    def _is_inverted(self, divisor: Operand) -> bool:
        match divisor:
            case Constant():
                return True
            case Input(kind="scalar"):
                return divisor.index in self._reciprocals
        return False

    def _power(self, base: Operand, exponent: int) -> Operand:
        result: Operand | None = None
        remaining = abs(exponent)
        while remaining:
            if remaining & 1:
                result = base if result is None else self._multiply(result, base)
            remaining >>= 1
            if remaining:
                base = self._multiply(base, base)
        result = Constant.of(1, FLOAT32) if result is None else result
        return self.apply("reciprocal", FLOAT32, result) if exponent < 0 else result


_EXPENSIVE = frozenset(
    """
    cbrt cos div exp exp2 expm1 log log1p logistic pow rem rsqrt sin sqrt tanh
    """.split()
)


def _find_shared(equations: Sequence[Equation], roots: set[Result]) -> set[Result]:
    """Returns expensive values that several loops use."""
    shared: set[Result] = set()
    uniform = uniform_results(equations)
    for index, equation in reversed([*enumerate(equations)]):
        result = Result(index, equation.dtype)
        if equation.op not in _EXPENSIVE or uniform[index] or result in roots:
            continue
        stored = roots | shared
        loops = (_Loop(equations, stored - {root}, root) for root in stored)
        if sum(loop.computes(result) for loop in loops) > 1:
            shared.add(result)
    return shared


class _Loop:
    """One output's loop: the values that it reads, the uses and rank of each value."""

    def __init__(
        self, equations: Sequence[Equation], stored: set[Result], root: Result
    ) -> None:
        self._equations = equations
        self._uniform = uniform_results(equations)
        self._stored = stored
        self._uses: dict[Operand, int] = {root: 1}
        self._ranks: dict[Operand, int] = {}
        order = self._emission_order(root)
        loads = [value for value in order if not self._is_computed(value)]
        self.reads = [value for value in loads if isinstance(value, Result)]
        self._ranks |= {value: 1 + number for number, value in enumerate(loads)}
        self._rank(root)

    def computes(self, result: Result) -> bool:
        return result in self._ranks and result not in self.reads

    def fuse(self, result: Result) -> Equation:
        """Returns `result`'s equation, as a multiply-add if LLVM contracts it."""
        equation = self._equations[result.index]
        if equation.op not in ("add", "sub") or equation.dtype != FLOAT32:
            return equation
        x, y = equation.inputs
        is_sum = equation.op == "add"
        if is_sum and self._ranks[y] < self._ranks[x]:
            x, y = y, x
        if is_sum and self._is_negative(x) and not self._is_negative(y):
            x, y = y, x
        if self._is_fusible(x):
            op = "fma" if is_sum else "fms"
            return replace(equation, op=op, inputs=(*self._factors(x), y))
        if self._is_fusible(y):
            op = "fma" if is_sum else "fnma"
            return replace(equation, op=op, inputs=(*self._factors(y), x))
        return equation

    def _is_fusible(self, operand: Operand) -> bool:
        return (
            isinstance(operand, Result)
            and operand not in self.reads
            and self._equations[operand.index].op == "mul"
            and self._uses[operand] == 1
        )

    def _is_negative(self, operand: Operand) -> bool:
        """Whether LLVM finds an odd number of negative literals in the product."""
        if isinstance(operand, Constant):
            return bool(np.signbit(_number(operand)))
        if not isinstance(operand, Result) or operand in self.reads:
            return False
        equation = self._equations[operand.index]
        if equation.op not in ("mul", "div") or self._uses[operand] != 1:
            return False
        return sum(map(self._is_negative, equation.inputs)) % 2 == 1

    def _factors(self, operand: Operand) -> tuple[Operand, ...]:
        assert isinstance(operand, Result)
        return self._equations[operand.index].inputs

    def _emission_order(self, root: Result) -> list[Operand]:
        """Lists loads and operations in the order in which XLA emits them.

        It emits what is farthest from the root first: by the longest way to it. Values
        of one distance are in the order of their uses.
        """
        levels: list[list[Operand]] = [[root]]
        while levels[-1]:
            needed = [x for value in levels[-1] for x in self._inputs_needed(value)]
            levels.append(list(dict.fromkeys(needed)))
        farthest_first = [value for level in reversed(levels) for value in level]
        return list(dict.fromkeys(farthest_first))

    def _inputs_needed(self, value: Operand) -> list[Operand]:
        """Returns the loads and operations that an operation needs, in XLA's order."""
        if not self._is_computed(value):
            return []
        assert isinstance(value, Result)
        equation = self._equations[value.index]
        inputs = equation.inputs
        if equation.op == "select_n":  # XLA puts the value for true first
            inputs = (inputs[0], *reversed(inputs[1:]))
        inputs = map(self._skip_unit, inputs)
        return [x for x in inputs if not _is_uniform(x, self._uniform)]

    def _is_computed(self, operand: Operand) -> bool:
        return isinstance(operand, Result) and operand not in self._stored

    def _skip_unit(self, operand: Operand) -> Operand:
        """Skips a product with 1, which XLA drops."""
        if isinstance(operand, Result) and operand not in self._stored:
            equation = self._equations[operand.index]
            factors = [x for x in equation.inputs if _unit(x) <= 0]
            if equation.op == "mul" and len(factors) == 1:
                return self._skip_unit(factors[0])
        return operand

    def _rank(self, operand: Operand) -> int:
        if operand not in self._ranks and not self._is_computed(operand):
            self._ranks[operand] = 0
        elif operand not in self._ranks:
            assert isinstance(operand, Result)
            inputs = self._equations[operand.index].inputs
            top = 0
            for value in inputs:
                top = max(top, self._rank(value))
                self._uses[value] = self._uses.get(value, 0) + 1
            is_dropped = self._skip_unit(operand) != operand
            if _is_uniform(operand, self._uniform):
                self._ranks[operand] = 0
            else:
                self._ranks[operand] = top if is_dropped else top + 1
        return self._ranks[operand]
