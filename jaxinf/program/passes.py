"""A prologue divided into passes over the gradients, which arrive one by one.

    first:  gradient of a leaf ─► a few numbers ─┐
                                                 ├─► combined ─► numbers
    next:   gradient of a leaf + numbers ─► …   ─┘
    last:   gradient of a leaf + numbers ─► inputs of its kernel

Invariant: the part of a leaf reads only its own gradient, params and stored state, and
numbers that are combined before its pass. A leaf may arrive in slices along leading
axes if its parts only take sums, maxima or minima of the gradient.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxinf.errors import UnsupportedTransformError
from jaxinf.program.flow import (
    TOTALS,
    PassAnalysis,
    flow_of,
    is_light,
    is_one,
    too_much,
)
from jaxinf.program.graph import Node, Value, bind, evaluate, prune
from jaxinf.program.prologue import Prologue, as_scalar
from jaxinf.program.split import origin_of
from jaxinf.program.state import StateSlot

MAX_PASSES = 3
"""Passes over the gradients, of which the last one updates."""


@dataclass(frozen=True, eq=False)
class PassComputation:
    """A computation of a pass: on one leaf, or before the pass on numbers alone.

    Attributes:
      own: The leaf's inputs: gradient, params, recalled slots; none of numbers.
      numbers: Further inputs, known before.
      nodes: The computation.
      exports: Numbers for later computations.
      scalars, arrays: Inputs of kernels; arrays are of the leaf's shape.
      leaf, shape: The leaf's number and shape.
      is_sliced: Whether slices of the gradient are enough; `gather` then combines what
        each gives.
    """

    own: tuple[Value, ...]
    numbers: tuple[Value, ...]
    nodes: tuple[Node, ...]
    exports: tuple[Value, ...]
    scalars: tuple[Value, ...]
    arrays: tuple[Value, ...] = ()
    leaf: int = -1
    shape: tuple[int, ...] = ()
    is_sliced: bool = False

    @property
    def inputs(self) -> tuple[Value, ...]:
        """All inputs, in the order of a call."""
        return self.own + self.numbers

    @property
    def outputs(self) -> tuple[Value, ...]:
        """All results, in the order of a call."""
        return self.exports + self.scalars + self.arrays

    def __call__(self, *arrays: jax.Array) -> list[jax.Array]:
        """Computes the results; traceable. A slice keeps its leading axes."""
        env: dict[Value, Any] = dict(zip(self.inputs, arrays, strict=True))

        def compute(node: Node, operands: Sequence[Any]) -> Sequence[Any]:
            if self.is_sliced and node.is_spread:  # as long as the slice
                return [lax.broadcast(operands[0], env[self.own[0]].shape)]
            return bind(node, operands)

        found = iter(evaluate(self.nodes, self.outputs, env, compute))
        return [
            *(jnp.asarray(next(found)) for _ in self.exports),
            *(as_scalar(next(found), value) for value in self.scalars),
            *(jnp.broadcast_to(next(found), self.shape) for _ in self.arrays),
        ]

    def gather(
        self, some: Sequence[jax.Array], more: Sequence[jax.Array]
    ) -> list[jax.Array]:
        """Combines the exports of two slices."""
        made = {value: node for node in self.nodes for value in node.outputs}
        return [
            TOTALS[made[value].name](one, other)
            for value, one, other in zip(self.exports, some, more, strict=True)
        ]


@dataclass(frozen=True, eq=False)
class Passes:
    """A prologue in passes.

    Attributes:
      gradients, params: The inputs that are gradients and params, by leaf.
      recalled: The inputs that are stored state, each with its leaf and its slot.
      num_passes: Number of passes; with one no gradient waits.
      parts: By pass and leaf, what a pass computes of the leaf.
      before: What is computed before each pass, from the exports of all before it; and
        after the last one, the new scalar state.
    """

    prologue: Prologue
    gradients: Sequence[Value]
    params: Sequence[Value]
    recalled: Mapping[Value, tuple[int, StateSlot]]
    num_passes: int
    parts: Mapping[tuple[int, int], PassComputation]
    before: Sequence[PassComputation]
    sliced: Set[int]

    def part(self, number: int, leaf: int) -> PassComputation | None:
        """Returns the computation of a pass on a leaf; None if there is none."""
        return self.parts.get((number, leaf))

    def of_leaf(self, leaf: int) -> list[PassComputation]:
        """Returns what all passes compute of a leaf."""
        parts = (self.part(number, leaf) for number in range(self.num_passes))
        return [part for part in parts if part is not None]

    @cached_property
    def whole(self) -> Set[int]:
        """Leaves in slices that have to be gathered before a pass."""
        parts = self.parts.values()
        return {p.leaf for p in parts if p.leaf in self.sliced and not p.is_sliced}

    @cached_property
    def computed(self) -> Set[int]:
        """Leaves of which the last pass computes something; they are needed whole."""
        last = self.num_passes - 1
        return {leaf for number, leaf in self.parts if number == last}


def in_passes(
    prologue: Prologue,
    gradients: Sequence[Value],
    params: Sequence[Value],
    recalled: Mapping[Value, tuple[int, StateSlot]],
    *,
    late: Set[Value] = frozenset(),
    sliced: Set[int] = frozenset(),
) -> Passes:
    """Divides a prologue into passes.

    Args:
      prologue: Its inputs are gradients, params, scalar state, extra arguments and
        recalled slots.
      gradients, params, recalled: As in `Passes`.
      late: Numbers that are known after the first pass only, such as the loss.
      sliced: Leaves whose gradients arrive in slices along leading axes.

    Raises:
      UnsupportedTransformError: More than a few numbers of a leaf are needed together
        with others, or more than `MAX_PASSES` passes.
    """
    owners = {value: leaf for leaf, value in enumerate(gradients)}
    owners |= {value: leaf for leaf, value in enumerate(params)}
    owners |= {value: leaf for value, (leaf, _) in recalled.items()}
    flow = flow_of(prologue.nodes, prologue.inputs, owners, gradients, late, sliced)
    division = _Division(prologue, flow, gradients, sliced)
    num_passes = division.num_passes()
    exports = division.exports(num_passes - 1)
    parts = division.parts(num_passes, exports)
    shared = [
        value
        for leaf, kernel in enumerate(prologue.leaves)
        for value in kernel.scalars
        if not flow.is_own(value, leaf, num_passes - 1)
    ]
    before: list[PassComputation] = []
    done: set[Value] = set()
    for number in range(num_passes + 1):
        known = {
            value
            for value in prologue.inputs
            if value not in owners and flow.stages[value] <= number
        } | {value for value, (n, _) in exports.items() if n < number}
        if number < num_passes:
            known |= done
            own = [part for (n, _), part in parts.items() if n == number]
            outputs = [v for part in own for v in part.numbers if v not in known]
        else:
            outputs = division.new_state
        numbers = tuple(dict.fromkeys(outputs))
        scalars = tuple(dict.fromkeys(shared if number == num_passes - 1 else ()))
        given, nodes = division.needed((*numbers, *scalars), known.__contains__)
        before.append(PassComputation((), given, nodes, numbers, scalars))
        done.update(numbers)
    return Passes(
        prologue, gradients, params, recalled, num_passes, parts, before, sliced
    )


@dataclass(frozen=True)
class _Division:
    """A prologue between its passes."""

    prologue: Prologue
    flow: PassAnalysis
    gradients: Sequence[Value]
    sliced: Set[int]

    @cached_property
    def new_state(self) -> list[Value]:
        return [v for v in self.prologue.scalar_state if v.constant is None]

    @cached_property
    def wanted(self) -> list[tuple[Value, int]]:
        """Values that kernels take, with their leaves."""
        return [
            (value, number)
            for number, leaf in enumerate(self.prologue.leaves)
            for value in leaf.values
            if value.constant is None
        ]

    def num_passes(self) -> int:
        ends = [self.flow.known_at(value, leaf) for value, leaf in self.wanted]
        ends += [self.flow.numbers[value] - 1 for value in self.new_state]
        found = 1 + max(ends, default=0)
        if found <= MAX_PASSES:
            return max(1, found)
        stages = self.flow.stages
        values = [*(value for value, _ in self.wanted), *self.new_state]
        nodes = prune(self.prologue.nodes, [max(values, key=stages.__getitem__)])
        culprit = max(nodes, key=lambda node: stages[node.outputs[0]])
        raise UnsupportedTransformError(
            f"optimizer: expected to need at most {MAX_PASSES} passes over the "
            f"gradients, found one that needs {found}, for {culprit.name}"
            f"{origin_of(culprit)}; leave one of its norms out, or use "
            "jaxinf.smart_update"
        )

    def exports(self, last: int) -> dict[Value, tuple[int, int]]:
        """Returns numbers that leaves give, each with its pass and its leaf.

        Those are of what others use, or later passes again.
        """
        flow = self.flow
        found = {v: (flow.stages[v] - 1, leaf) for v, leaf in flow.gathered.items()}
        reads: list[tuple[Value, int | None]] = [(v, None) for v in self.new_state]
        for node in self.prologue.nodes:
            out = node.outputs[0]
            if out not in flow.gathered:
                reads += [(value, flow.owners.get(out)) for value in node.inputs]
        for value, leaf in dict.fromkeys((*reads, *self.wanted)):
            is_own = leaf is not None and flow.is_own(value, leaf, last)
            if value in flow.owners and not is_own:
                for root in self.roots(value):
                    found[root] = flow.stages[root], flow.owners[root]
        return found

    def roots(self, value: Value) -> list[Value]:
        """Returns values from which a leaf's number follows by those on numbers."""
        stack, found = [value], dict[Value, None]()
        while stack:
            one = stack.pop()
            if one.node is not None and is_light(one.node):
                stack += [v for v in one.node.inputs if v in self.flow.owners]
            elif not is_one(one) and one not in self.new_state:
                raise too_much(one)
            else:
                found[one] = None
        return list(found)

    def parts(
        self, num_passes: int, exports: Mapping[Value, tuple[int, int]]
    ) -> dict[tuple[int, int], PassComputation]:
        """Returns what each pass computes of each leaf."""
        flow, last = self.flow, num_passes - 1
        given: defaultdict[tuple[int, int], list[Value]] = defaultdict(list)
        for value, at in exports.items():
            given[at].append(value)
        found = {}
        for leaf, kernel in enumerate(self.prologue.leaves):
            own = [v for v in kernel.scalars if flow.is_own(v, leaf, last)]
            for number in range(num_passes):
                scalars, arrays = (own, kernel.arrays) if number == last else ((), ())
                if given[number, leaf] or scalars or arrays:
                    outputs = given[number, leaf], scalars, arrays
                    found[number, leaf] = self.part(number, leaf, *outputs)
        return found

    def part(
        self,
        number: int,
        leaf: int,
        exports: Sequence[Value],
        scalars: Sequence[Value],
        arrays: Sequence[Value],
    ) -> PassComputation:
        outputs = (*exports, *scalars, *arrays)

        def is_own(value: Value) -> bool:
            return value.node is None and value in self.flow.owners

        def is_given(value: Value) -> bool:
            is_known = value not in exports and self.flow.is_number(value, leaf, number)
            return is_own(value) or is_known

        given, nodes = self.needed(outputs, is_given)
        own = tuple(filter(is_own, given))
        # Slices of the gradient, with leading axes kept, may be enough.
        takes_slices = own == (self.gradients[leaf],) and all(
            v in self.flow.gathered for v in outputs if v.constant is None
        )
        return PassComputation(
            own,
            tuple(value for value in given if not is_own(value)),
            nodes,
            tuple(exports),
            tuple(dict.fromkeys(scalars)),
            tuple(dict.fromkeys(arrays)),
            leaf,
            self.prologue.leaves[leaf].shape,
            leaf in self.sliced and takes_slices,
        )

    def needed(
        self, outputs: Sequence[Value], is_given: Callable[[Value], bool]
    ) -> tuple[tuple[Value, ...], tuple[Node, ...]]:
        """Returns the given values that outputs follow from, and the computation.

        In the order of the prologue, so that parts of equal leaves are alike.
        """
        seen, given, nodes = set[Value](), set[Value](), set[Node]()
        stack = list(outputs)
        while stack:
            value = stack.pop()
            if value.constant is not None or value in seen:
                continue
            seen.add(value)
            if is_given(value):
                given.add(value)
            else:
                assert value.node is not None, "an input is given"
                nodes.add(value.node)
                stack += value.node.inputs
        return (
            tuple(sorted(given, key=self.places.__getitem__)),
            tuple(sorted(nodes, key=lambda node: self.places[node.outputs[0]])),
        )

    @cached_property
    def places(self) -> Mapping[Value, int]:
        """The position of each value."""
        made = (value for node in self.prologue.nodes for value in node.outputs)
        return {value: i for i, value in enumerate((*self.prologue.inputs, *made))}
