"""Cuts one leaf's elementwise body out of the graph of a whole update.

Invariant: a body reads only its own leaf's gradient, master params and slots; the
prologue computes all its other inputs, as scalars or arrays.
"""

import functools
import math
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

import numpy as np

from jaxinf import compat
from jaxinf.errors import UnsupportedTransformError
from jaxinf.program.graph import Node, Value, ancestors
from jaxinf.program.kernel import (
    Constant,
    Equation,
    Input,
    Kernel,
    Operand,
    Result,
    is_supported_dtype,
    scalar_dtype,
)
from jaxinf.program.state import StateSlot
from jaxinf.program.tree import LeafInfo

_REMEDY = (
    "near storage an update must be elementwise in stored state; apply norms and clips "
    "to the gradients instead, before the optimizer and outside optax.MultiSteps, "
    "train with jaxinf.stream, where LAMB and others may reduce over state, use an "
    "optimizer without it (docs/optimizers.md lists them), or keep this one's state in "
    "memory"
)


@dataclass(eq=False)
class BodyBuilder:
    """Collects the equations of one leaf's body, in a canonical order.

    Attributes:
      inputs: Inputs of the graph that the body reads: gradient, params, slots.
      local: Scalars that belong in the body of a 0-d leaf.
      scalars, arrays: Values that the prologue has to compute, in order of use.
    """

    info: LeafInfo
    inputs: Mapping[Value, Input]
    local: Set[Value] = frozenset()
    equations: list[Equation] = field(default_factory=list)
    scalars: list[Value] = field(default_factory=list)
    arrays: list[Value] = field(default_factory=list)
    _operands: dict[Value, Operand] = field(default_factory=dict)
    _results: dict[Equation, Result] = field(default_factory=dict)

    def scalar_input(self, index: int) -> Input:
        return Input("scalar", index, np.dtype(self.scalars[index].dtype))

    def operand(self, root: Value) -> Operand:
        """Adds the equations that compute `root`, and returns its operand.

        Raises:
          UnsupportedTransformError: It is not elementwise in stored state.
        """
        stack = [root]
        while stack:
            value = stack[-1]
            if value in self._operands:
                stack.pop()
                continue
            operand = self._terminal(value)
            if operand is None:
                assert value.node is not None, "a value that is no input is computed"
                pending = [v for v in value.node.inputs if v not in self._operands]
                if pending:
                    stack += reversed(pending)
                    continue
                operand = self._emit(value, value.node)
            self._operands[value] = operand
            stack.pop()
        return self._operands[root]

    def kernel(
        self,
        slots: Sequence[StateSlot],
        *,
        update: Operand | None,
        new_slots: Sequence[Operand],
        reciprocals: tuple[bool, ...] = (),
        reduced: tuple[int, ...] = (),
    ) -> Kernel:
        kernel = Kernel(
            slots=tuple(slot.name for slot in slots),
            slot_dtypes=tuple(slot.dtype for slot in slots),
            scalar_dtypes=tuple(scalar_dtype(value.dtype) for value in self.scalars),
            array_dtypes=tuple(np.dtype(value.dtype) for value in self.arrays),
            equations=tuple(self.equations),
            update=update,
            new_slots=tuple(new_slots),
            reciprocals=reciprocals,
            reduced=reduced,
        )
        return _first_equal(kernel)

    def equations_used_by(self, nodes: Sequence[Node]) -> tuple[int, ...]:
        """Returns the numbers of equations whose values nodes outside the body read."""
        indices = {
            operand.index
            for node in nodes
            if not any(value in self._operands for value in node.outputs)
            for operand in map(self._operands.get, node.inputs)
            if isinstance(operand, Result)
        }
        return tuple(sorted(indices))

    def _terminal(self, value: Value) -> Operand | None:
        """Returns the operand of a value that no equation computes; None for others."""
        if value in self.inputs:
            return self.inputs[value]
        if value.is_literal:
            self._check_dtype(value)
            return Constant.of(value.constant, value.dtype)
        if value.stored:
            if not self._is_elementwise(value):
                raise not_elementwise_error(self.info.name, value)
            return None
        if value in self.local:
            return None
        is_one = math.prod(value.shape) == 1
        if is_one and (not value.shape or value.shape != self.info.shape):
            self._check_dtype(value)
            self.scalars.append(value)
            return self.scalar_input(len(self.scalars) - 1)
        if self._is_elementwise(value):
            return None
        self._check_dtype(value)
        self.arrays.append(value)
        return Input("array", len(self.arrays) - 1, value.dtype)

    def _is_elementwise(self, value: Value) -> bool:
        node = value.node
        return (
            node is not None
            and value.shape == self.info.shape
            and (node.is_spread or is_elementwise(node))
        )

    def _check_dtype(self, value: Value) -> None:
        if not is_supported_dtype(value.dtype):
            raise UnsupportedTransformError(
                f"{self.info.name}: expected numbers of at most 32 bits in the update, "
                f"found {value.dtype}; turn jax_enable_x64 off, or cast in the schedule"
            )

    def _emit(self, value: Value, node: Node) -> Operand:
        operands = tuple(self._operands[operand] for operand in node.inputs)
        if node.is_spread:
            return operands[0]
        name = node.primitive.name
        params = compat.static_params(name, node.params)
        assert params is not None, "checked by _is_elementwise"
        if name == "integer_pow" and params["y"] == 1:
            return operands[0]
        if name == "integer_pow" and params["y"] == 2:
            name, params = "square", {}
        equation = Equation(name, operands, tuple(sorted(params.items())), value.dtype)
        if equation not in self._results:
            self._results[equation] = Result(len(self.equations), value.dtype)
            self.equations.append(equation)
        return self._results[equation]


@functools.lru_cache(maxsize=4096)
def _first_equal(kernel: Kernel) -> Kernel:
    """Returns the first of equal kernels: leaves share it, caches find it at once."""
    return kernel


def is_elementwise(node: Node) -> bool:
    """Whether a body may contain the node, by its primitive and dtypes."""
    values = (*node.outputs, *node.inputs)
    return compat.static_params(node.primitive.name, node.params) is not None and all(
        is_supported_dtype(value.dtype) for value in values
    )


def not_elementwise_error(where: str, value: Value) -> UnsupportedTransformError:
    """Makes the error for a value that is not elementwise in stored state.

    It names the first node that is not elementwise.
    """

    def is_culprit(node: Node) -> bool:
        shapes = (), node.outputs[0].shape
        keeps_shape = all(value.shape in shapes for value in node.inputs)
        has_state = any(value.stored for value in node.inputs)
        return has_state and not (keeps_shape and is_elementwise(node))

    node, values = value.node, [value]
    while culprit := next(filter(is_culprit, ancestors(values)), None):
        node, values = culprit, culprit.inputs
    found = "the stored state of another leaf"
    if node is not None:
        found = f"the primitive {node.name}{describe_origin(node)} on it"
    return UnsupportedTransformError(
        f"{where}: expected an update elementwise in stored optimizer state, found "
        f"{found}; {_REMEDY}"
    )


def describe_origin(node: Node) -> str:
    """Names the function that called a primitive, and the transformation it is for.

    Frames of JAX and of this room are skipped. Empty if nothing is known.
    """
    frames = [f for source in node.sources for f in compat.source_frames(source)]
    internal = "/jax/", "/jaxinf/program/"
    callers = [f for f in frames if not any(part in f[0] for part in internal)]
    if not callers:
        return ""
    file, name = callers[0]
    _, optax, after = file.rpartition("/optax/")
    short = f"optax/{after}" if optax else file.rpartition("/")[2]
    matches = (re.match(r"(\w+)\.<locals>\.update(_fn)?\b", n) for _, n in callers)
    transform = next((match[1] for match in matches if match), "")
    whose = f", for {transform}" if transform and transform not in name else ""
    return f" (from {name} in {short}{whose})"
