"""A prologue divided into passes over the gradients, which arrive one by one.

    first:  gradient of a leaf ─► a few numbers ─┐
                                                 ├─► combined ─► numbers
    next:   gradient of a leaf + numbers ─► …   ─┘
    last:   gradient of a leaf + numbers ─► inputs of its kernel

A *part* is what a pass computes of one leaf; a *number* is a small value that parts of
other leaves, or later passes, get.

Invariant: a part reads only its own leaf's gradient, params and stored state, and
numbers that are combined before its pass. A leaf may arrive in slices along leading
axes if its parts only take sums, maxima or minima of the gradient.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxinf.errors import UnsupportedTransformError
from jaxinf.program.graph import Node, Value, evaluate, evaluate_node
from jaxinf.program.prologue import Prologue, as_scalar
from jaxinf.program.split import describe_origin, is_elementwise
from jaxinf.program.state import StateSlot

_MAX_PASSES = 3  # over the gradients, of which the last one updates
_MAX_SHARED_ELEMENTS = 64  # of a value of no leaf that is not computed by each part
_TOTALS: Mapping[str, Callable[..., jax.Array]] = {
    "reduce_sum": jnp.add,
    "reduce_max": jnp.maximum,
    "reduce_min": jnp.minimum,
    "reduce_and": jnp.logical_and,
    "reduce_or": jnp.logical_or,
}
"""Reductions of slices, and how their results are combined."""


@dataclass(frozen=True, eq=False)
class PassComputation:
    """A computation of a pass: on one leaf, or before the pass on numbers alone.

    Attributes:
      exports: Numbers for later computations.
      scalars, arrays: Inputs of kernels; arrays are of the leaf's shape.
      leaf_inputs: Gradient, params and stored state of the leaf.
      numbers: Inputs that are known before.
      is_sliced: Whether slices of the gradient are enough; `combine` then adds up their
        exports.
    """

    exports: tuple[Value, ...]
    scalars: tuple[Value, ...] = ()
    arrays: tuple[Value, ...] = ()
    leaf: int = -1
    shape: tuple[int, ...] = ()
    leaf_inputs: tuple[Value, ...] = ()
    numbers: tuple[Value, ...] = ()
    nodes: tuple[Node, ...] = ()
    is_sliced: bool = False

    @property
    def inputs(self) -> tuple[Value, ...]:
        return self.leaf_inputs + self.numbers

    @property
    def outputs(self) -> tuple[Value, ...]:
        return self.exports + self.scalars + self.arrays

    def __call__(self, *arrays: jax.Array) -> list[jax.Array]:
        """Computes the results; traceable. A slice keeps its leading axes."""
        env: dict[Value, Any] = dict(zip(self.inputs, arrays, strict=True))

        def compute(node: Node, operands: Sequence[Any]) -> Sequence[Any]:
            if self.is_sliced and node.is_spread:  # as long as the slice
                return [lax.broadcast(operands[0], env[self.leaf_inputs[0]].shape)]
            return evaluate_node(node, operands)

        results = iter(evaluate(self.nodes, self.outputs, env, compute))
        return [
            *(jnp.asarray(next(results)) for _ in self.exports),
            *(as_scalar(next(results), value) for value in self.scalars),
            *(jnp.broadcast_to(next(results), self.shape) for _ in self.arrays),
        ]

    def combine(
        self, exports: Sequence[jax.Array], others: Sequence[jax.Array]
    ) -> list[jax.Array]:
        """Combines the exports of two slices."""
        node_of = {value: node for node in self.nodes for value in node.outputs}
        return [
            _TOTALS[node_of[value].name](export, other)
            for value, export, other in zip(self.exports, exports, others, strict=True)
        ]


class Passes:
    """A prologue in passes.

    Args:
      gradients, params: The inputs that are gradients and params, by leaf.
      prologue_state: The inputs that are stored state, with their leaf and slot.
      late: Numbers that are known after the first pass only, such as the loss.
      sliced: Leaves whose gradients arrive in slices along leading axes.

    Attributes:
      num_passes: With one pass no gradient waits.
      parts: The parts, by pass and leaf.
      before: The computation before each pass, from the exports of all earlier ones;
        the last entry gives the new scalar state.

    Raises:
      UnsupportedTransformError: More than a few numbers of a leaf are needed together
        with others, or too many passes.
    """

    def __init__(
        self,
        prologue: Prologue,
        *,
        gradients: Sequence[Value],
        params: Sequence[Value],
        prologue_state: Mapping[Value, tuple[int, StateSlot]],
        late: Set[Value] = frozenset(),
        sliced: Set[int] = frozenset(),
    ) -> None:
        self.prologue, self.gradients, self.params = prologue, gradients, params
        self.prologue_state, self._sliced = prologue_state, sliced
        leaf_of = {value: leaf for leaf, value in enumerate(gradients)}
        leaf_of |= {value: leaf for leaf, value in enumerate(params)}
        leaf_of |= {value: leaf for value, (leaf, _) in prologue_state.items()}
        in_slices = {gradients[leaf]: leaf for leaf in sliced}
        self._flow = _Flow(prologue, leaf_of, late=late, in_slices=in_slices)
        self._new_state = _variables(prologue.scalar_state)
        self._kernel_inputs = [
            (value, leaf)
            for leaf, kernel in enumerate(prologue.leaves)
            for value in _variables((*kernel.scalars, *kernel.arrays))
        ]
        self.num_passes = self._count_passes()
        exports = self._find_exports()
        self.parts = self._make_parts(exports)
        self.before = self._make_before(exports)

    def of_leaf(self, leaf: int) -> list[PassComputation]:
        """Returns the computations of all passes on a leaf."""
        keys = [(index, leaf) for index in range(self.num_passes)]
        return [self.parts[key] for key in keys if key in self.parts]

    @cached_property
    def gathered_leaves(self) -> Set[int]:
        """Leaves in slices that have to be gathered before a pass."""
        parts = self.parts.values()
        return {p.leaf for p in parts if p.leaf in self._sliced and not p.is_sliced}

    @cached_property
    def last_pass_leaves(self) -> Set[int]:
        """Leaves of which the last pass computes something; they are needed whole."""
        return {leaf for index, leaf in self.parts if index == self._last}

    @property
    def _last(self) -> int:
        return self.num_passes - 1

    def _count_passes(self) -> int:
        stages, numbers = self._flow.stages, self._flow.numbers
        ends = [
            stages[v] if self._flow.leaf_of.get(v, leaf) == leaf else numbers[v]
            for v, leaf in self._kernel_inputs
        ]
        ends += [numbers[value] - 1 for value in self._new_state]
        num_passes = 1 + max(ends, default=0)
        if num_passes <= _MAX_PASSES:
            return max(1, num_passes)
        nodes = self.prologue.nodes
        culprit = max(nodes, key=lambda node: stages[node.outputs[0]])
        raise UnsupportedTransformError(
            f"optimizer: expected to need at most {_MAX_PASSES} passes over the "
            f"gradients, found one that needs {num_passes}, for {culprit.name}"
            f"{describe_origin(culprit)}; leave one of its norms out, or use "
            "jaxinf.smart_update"
        )

    def _find_exports(self) -> dict[Value, tuple[int, int]]:
        """Returns the numbers that leaves give, each with its pass and its leaf.

        Other leaves use them, or later passes of the same leaf.
        """
        flow = self._flow
        exports = {v: (flow.stages[v] - 1, leaf) for v, leaf in flow.totals.items()}
        reads: list[tuple[Value, int | None]] = [(v, None) for v in self._new_state]
        for node in self.prologue.nodes:
            out = node.outputs[0]
            if out not in flow.totals:
                reads += [(value, flow.leaf_of.get(out)) for value in node.inputs]
        for value, leaf in dict.fromkeys((*reads, *self._kernel_inputs)):
            is_computed = leaf is not None and flow.computes(self._last, leaf, value)
            if value in flow.leaf_of and not is_computed:
                for root in self._find_roots(value):
                    exports[root] = flow.stages[root], flow.leaf_of[root]
        return exports

    def _find_roots(self, value: Value) -> list[Value]:
        """Returns the numbers from which a leaf's number follows by scalar nodes."""
        stack, roots = [value], dict[Value, None]()
        while stack:
            value = stack.pop()
            if value.node is not None and _is_scalar(value.node):
                stack += [v for v in value.node.inputs if v in self._flow.leaf_of]
            elif not _has_one_element(value) and value not in self._new_state:
                raise _whole_array_error(value)
            else:
                roots[value] = None
        return list(roots)

    def _make_parts(
        self, exports: Mapping[Value, tuple[int, int]]
    ) -> dict[tuple[int, int], PassComputation]:
        exports_of: defaultdict[tuple[int, int], list[Value]] = defaultdict(list)
        for value, key in exports.items():
            exports_of[key].append(value)
        parts = {}
        for leaf, kernel in enumerate(self.prologue.leaves):
            scalars = [
                value
                for value in kernel.scalars
                if self._flow.computes(self._last, leaf, value)
            ]
            for index in range(self.num_passes):
                is_last = index == self._last
                part = PassComputation(
                    tuple(exports_of[index, leaf]),
                    tuple(dict.fromkeys(scalars)) if is_last else (),
                    tuple(dict.fromkeys(kernel.arrays)) if is_last else (),
                    leaf,
                    kernel.info.shape,
                )
                if part.outputs:
                    parts[index, leaf] = self._with_inputs(part, index)
        return parts

    def _with_inputs(self, part: PassComputation, index: int) -> PassComputation:
        flow = self._flow

        def is_leaf_input(value: Value) -> bool:
            return value.node is None and value in flow.leaf_of

        def is_input(value: Value) -> bool:
            is_number = value not in part.exports and flow.is_number_for(
                index, part.leaf, value
            )
            return is_leaf_input(value) or is_number

        inputs, nodes = self._find_needed(part.outputs, is_input)
        leaf_inputs = tuple(filter(is_leaf_input, inputs))
        # Slices of the gradient, with leading axes kept, may be enough.
        takes_slices = leaf_inputs == (self.gradients[part.leaf],) and all(
            value in flow.totals for value in _variables(part.outputs)
        )
        return replace(
            part,
            leaf_inputs=leaf_inputs,
            numbers=tuple(value for value in inputs if not is_leaf_input(value)),
            nodes=nodes,
            is_sliced=part.leaf in self._sliced and takes_slices,
        )

    def _make_before(
        self, exports: Mapping[Value, tuple[int, int]]
    ) -> list[PassComputation]:
        flow = self._flow
        shared = [
            value
            for leaf, kernel in enumerate(self.prologue.leaves)
            for value in kernel.scalars
            if not flow.computes(self._last, leaf, value)
        ]
        inputs = [value for value in self.prologue.inputs if value not in flow.leaf_of]
        before: list[PassComputation] = []
        computed: set[Value] = set()
        for index in range(self.num_passes + 1):
            known = {value for value in inputs if flow.stages[value] <= index}
            known |= {value for value, (n, _) in exports.items() if n < index}
            outputs = self._new_state
            if index < self.num_passes:
                known |= computed
                parts = [part for (n, _), part in self.parts.items() if n == index]
                outputs = [v for part in parts for v in part.numbers if v not in known]
            numbers = tuple(dict.fromkeys(outputs))
            scalars = tuple(dict.fromkeys(shared if index == self._last else ()))
            needed, nodes = self._find_needed((*numbers, *scalars), known.__contains__)
            before.append(
                PassComputation(numbers, scalars, numbers=needed, nodes=nodes)
            )
            computed.update(numbers)
        return before

    @cached_property
    def _places(self) -> Mapping[Value, int]:
        results = (value for node in self.prologue.nodes for value in node.outputs)
        return {v: i for i, v in enumerate((*self.prologue.inputs, *results))}

    def _find_needed(
        self, outputs: Sequence[Value], is_input: Callable[[Value], bool]
    ) -> tuple[tuple[Value, ...], tuple[Node, ...]]:
        """Returns the inputs that outputs follow from, and the nodes between.

        In the order of the prologue, so that parts of equal leaves are alike.
        """
        visited, inputs = set[Value](), set[Value]()
        stack, nodes = _variables(outputs), set[Node]()
        while stack:
            value = stack.pop()
            if value in visited:
                continue
            visited.add(value)
            if is_input(value):
                inputs.add(value)
            else:
                assert value.node is not None, "an input is given"
                nodes.add(value.node)
                stack += _variables(value.node.inputs)
        return (
            tuple(sorted(inputs, key=self._places.__getitem__)),
            tuple(sorted(nodes, key=lambda node: self._places[node.outputs[0]])),
        )


class _Flow:
    """Finds the leaf of each value of a prologue, and the pass that can compute it.

    Attributes:
      leaf_of: The leaf of each value that depends on one leaf's arrays alone. Other
        values are numbers, or depend on no leaf.
      stages: The first pass in which a part of its leaf, or any part, can compute it.
      numbers: The first pass in which each part can have it as a number.
      totals: Sums, maxima and minima of leaves in slices, with their leaves.
    """

    def __init__(
        self,
        prologue: Prologue,
        leaf_of: dict[Value, int],
        *,
        late: Set[Value],
        in_slices: Mapping[Value, int],
    ) -> None:
        self.leaf_of = leaf_of
        self.stages: dict[Value, int] = {}
        self.numbers: dict[Value, int] = {}
        self.totals: dict[Value, int] = {}
        self._sliced_leaves, self._in_slices = {*in_slices.values()}, {*in_slices}
        # Values without a leaf that depend on leaves; and arrays without a leaf whose
        # elements are equal, as long as any slice.
        self._mixed: set[Value] = set()
        self._spread: set[Value] = set()
        for value in prologue.inputs:
            self._set_stage(value, int(value in late))
        for node in prologue.nodes:
            self._follow(node)

    def computes(self, index: int, leaf: int, value: Value) -> bool:
        """Whether a leaf's part in a pass computes a value by itself."""
        if self.leaf_of.get(value) != leaf:
            return False
        return not _has_one_element(value) or self.numbers[value] > index

    def is_number_for(self, index: int, leaf: int, value: Value) -> bool:
        """Whether a leaf's part in a pass gets a value as a number."""
        if value in self.leaf_of:
            return not self.computes(index, leaf, value)
        if value.node is None or value in self._mixed:
            return True
        is_small = math.prod(value.shape) <= _MAX_SHARED_ELEMENTS
        return is_small and value not in self._spread

    def _follow(self, node: Node) -> None:
        operands = _variables(node.inputs)
        of_leaves = {v: self.leaf_of[v] for v in operands if v in self.leaf_of}
        stage = max((self.stages[value] for value in operands), default=0)
        if len(leaves := set(of_leaves.values())) == 1:
            is_total = node.name in _TOTALS and not node.outputs[0].shape
            if is_total and self._in_slices.issuperset(of_leaves):
                self.totals.update(dict.fromkeys(node.outputs, next(iter(leaves))))
                leaves, stage = set(), stage + 1
            elif leaves <= self._sliced_leaves and _maps_elements(
                node, self._in_slices, self._spread
            ):
                self._in_slices.update(node.outputs)
        elif leaves:
            arrays = [value for value in of_leaves if not _has_one_element(value)]
            leaves = {of_leaves[value] for value in arrays}
            if len(leaves) > 1:
                raise _whole_array_error(arrays[0])
            foreign = (v for v, leaf in of_leaves.items() if leaf not in leaves)
            stage = max([stage, *(self.numbers[value] for value in foreign)])
        if not leaves and (node.is_spread or _maps_elements(node, self._spread)):
            self._spread.update(value for value in node.outputs if value.shape)
        if not leaves and (of_leaves or not self._mixed.isdisjoint(operands)):
            self._mixed.update(node.outputs)
        for value in node.outputs:
            self.leaf_of.update((value, leaf) for leaf in leaves)
            self._set_stage(value, stage)

    def _set_stage(self, value: Value, stage: int) -> None:
        self.stages[value] = stage
        if value not in self.leaf_of:
            self.numbers[value] = stage
        elif value.node is None or not _is_scalar(value.node):
            self.numbers[value] = stage + 1
        else:
            operands = _variables(value.node.inputs)
            self.numbers[value] = max(self.numbers[v] for v in operands)


def _variables(values: Sequence[Value]) -> list[Value]:
    return [value for value in values if value.constant is None]


def _has_one_element(value: Value) -> bool:
    return math.prod(value.shape) == 1


def _is_scalar(node: Node) -> bool:
    return not any(value.shape for value in (*node.inputs, *node.outputs))


def _maps_elements(node: Node, *known: Set[Value]) -> bool:
    """Whether a node maps elements of known arrays to elements of its result."""
    return is_elementwise(node) and all(
        not value.shape or any(value in arrays for arrays in known)
        for value in node.inputs
    )


def _whole_array_error(value: Value) -> UnsupportedTransformError:
    name = "its gradient" if value.node is None else f"a result of {value.node.name}"
    where = "" if value.node is None else describe_origin(value.node)
    return UnsupportedTransformError(
        "optimizer: expected to need only a few numbers of each leaf, such as its "
        f"norm, from other leaves, found {name}{where} of shape {value.shape}; use an "
        "optimizer without it, or jaxinf.smart_update"
    )
