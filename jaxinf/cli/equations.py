"""Writes the lines of a kernel in the manifest as formulas.

Invariant: a formula has every operation of the lines, in the order of evaluation; lines
that do not parse are shown unchanged.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["formulas"]

_EQUATION = re.compile(r"%(\d+): \S+ = (\w+)(\[.*\])? (.+)")
_OUTPUT = re.compile(r"(\w+) = (%\d+|\S+)")
_INFIX = {"add": ("+", 1), "sub": ("-", 1), "mul": ("*", 2), "div": ("/", 2)}
_ATOM = 3


@dataclass(frozen=True)
class _Equation:
    op: str
    operands: tuple[str, ...]


def formulas(lines: Sequence[str], slots: Sequence[str]) -> list[str]:
    """Writes formulas such as ``mu' = # * gradient + # * mu``.

    Args:
      lines: the lines of one kernel in the manifest; `#` stands for a literal.
      slots: names of the stored states without the master params.

    Returns:
      A line for each value that is used more than once, and for each result; the new
      value of a state has a prime. The lines themselves if one cannot be read.
    """
    equations: dict[int, _Equation] = {}
    outputs: dict[str, str] = {}
    for line in lines:
        if match := _EQUATION.fullmatch(line):
            number, op, params, operands = match.groups()
            words = tuple(operands.split(", "))
            equations[int(number)] = _Equation(op + (params or ""), words)
        elif match := _OUTPUT.fullmatch(line):
            outputs[match[1]] = match[2]
        else:
            return list(lines)
    try:
        return _Writer(equations, outputs, slots).lines()
    except (KeyError, IndexError, ValueError):
        return list(lines)


class _Writer:
    """Writes each value where it is used, or on a line of its own with a name."""

    def __init__(
        self,
        equations: dict[int, _Equation],
        outputs: dict[str, str],
        slots: Sequence[str],
    ) -> None:
        self._equations = equations
        self._outputs = outputs
        self._slots = slots
        self._names = self._choose_names()

    def _choose_names(self) -> dict[int, str]:
        uses = Counter(word for e in self._equations.values() for word in e.operands)
        names: dict[int, str] = {}
        for output, operand in self._outputs.items():
            if operand.startswith("%"):
                names.setdefault(int(operand[1:]), self._output_name(output))
        shared = [n for n in self._equations if uses[f"%{n}"] > 1 and n not in names]
        return names | {n: f"t{i}" for i, n in enumerate(shared, start=1)}

    def _output_name(self, output: str) -> str:
        return f"{output}'" if output in self._slots else output

    def lines(self) -> list[str]:
        written = [
            f"{self._names[n]} = {self._expression(n)[0]}" for n in sorted(self._names)
        ]
        for output, operand in self._outputs.items():
            name = self._output_name(output)
            if name not in self._names.values():
                written.append(f"{name} = {self._operand(operand)[0]}")
        return written

    def _operand(self, word: str) -> tuple[str, int]:
        """Returns the text of an operand and the precedence of its operator."""
        if word.startswith("%"):
            number = int(word[1:])
            if number in self._names:
                return self._names[number], _ATOM
            return self._expression(number)
        word = word.partition(":")[0]
        if word.startswith("slot"):
            return self._slots[int(word[len("slot") :])], _ATOM
        return word, _ATOM

    def _expression(self, number: int) -> tuple[str, int]:
        equation = self._equations[number]
        operands = [self._operand(word) for word in equation.operands]
        if equation.op in _INFIX and len(operands) == 2:
            sign, strength = _INFIX[equation.op]
            (left, binds_left), (right, binds_right) = operands
            left = left if binds_left >= strength else f"({left})"
            right = right if binds_right > strength else f"({right})"
            return f"{left} {sign} {right}", strength
        arguments = ", ".join(text for text, _ in operands)
        return f"{equation.op}({arguments})", _ATOM
