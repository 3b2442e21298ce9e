"""A prologue divided into passes over the gradients, which arrive one by one.

    first:  gradient of a leaf ─► a few numbers ─┐
                                                 ├─► combined ─► numbers
    next:   gradient of a leaf + numbers ─► …   ─┘
    last:   gradient of a leaf + numbers ─► inputs of its kernel

Invariant: the part of a leaf reads only its own gradient, params and stored state, and
numbers that are combined before its pass. A leaf may arrive in slices along leading
axes if its parts only take sums, maxima or minima of the gradient.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxinf.errors import UnsupportedTransformError
from jaxinf.program.graph import Node, Value, bind, evaluate
from jaxinf.program.prologue import Prologue, as_scalar
from jaxinf.program.split import is_elementwise, origin_of
from jaxinf.program.state import StateSlot

_MOST_PASSES = 3  # over the gradients, of which the last one updates
_FEW = 64  # elements of a value of no leaf that is computed once, not by each part
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
      leaf_inputs: The leaf's inputs: gradient, params, stored state; none of numbers.
      numbers: Further inputs, known before.
      nodes: The computation.
      exports: Numbers for later computations.
      scalars, arrays: Inputs of kernels; arrays are of the leaf's shape.
      leaf, shape: The leaf's number and shape.
      is_sliced: Whether slices of the gradient are enough; `combine` then adds up what
        each gives.
    """

    leaf_inputs: tuple[Value, ...]
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
        return self.leaf_inputs + self.numbers

    @property
    def outputs(self) -> tuple[Value, ...]:
        """All results, in the order of a call."""
        return self.exports + self.scalars + self.arrays

    def __call__(self, *arrays: jax.Array) -> list[jax.Array]:
        """Computes the results; traceable. A slice keeps its leading axes."""
        env: dict[Value, Any] = dict(zip(self.inputs, arrays, strict=True))

        def compute(node: Node, operands: Sequence[Any]) -> Sequence[Any]:
            if self.is_sliced and node.is_spread:  # as long as the slice
                return [lax.broadcast(operands[0], env[self.leaf_inputs[0]].shape)]
            return bind(node, operands)

        found = iter(evaluate(self.nodes, self.outputs, env, compute))
        return [
            *(jnp.asarray(next(found)) for _ in self.exports),
            *(as_scalar(next(found), value) for value in self.scalars),
            *(jnp.broadcast_to(next(found), self.shape) for _ in self.arrays),
        ]

    def combine(
        self, some: Sequence[jax.Array], more: Sequence[jax.Array]
    ) -> list[jax.Array]:
        """Combines the exports of two slices."""
        made = {value: node for node in self.nodes for value in node.outputs}
        return [
            _TOTALS[made[value].name](one, other)
            for value, one, other in zip(self.exports, some, more, strict=True)
        ]


class Passes:
    """A prologue in passes.

    Args:
      gradients, params: The inputs that are gradients and params, by leaf.
      prologue_state: The inputs that are stored state, with their leaf and slot.
      late: Numbers that are known after the first pass only, such as the loss.
      sliced: Leaves whose gradients arrive in slices along leading axes.

    Attributes:
      num_passes: Number of passes; with one no gradient waits.
      parts: By pass and leaf, what a pass computes of the leaf.
      before: What is computed before each pass, from the exports of all before it; and
        after the last one, the new scalar state.

    Raises:
      UnsupportedTransformError: More than a few numbers of a leaf are needed together
        with others, or too many passes.
    """

    def __init__(
        self,
        prologue: Prologue,
        gradients: Sequence[Value],
        params: Sequence[Value],
        prologue_state: Mapping[Value, tuple[int, StateSlot]],
        *,
        late: Set[Value] = frozenset(),
        sliced: Set[int] = frozenset(),
    ) -> None:
        self.prologue, self.gradients, self.params = prologue, gradients, params
        self.prologue_state, self._sliced = prologue_state, sliced
        # The leaf of each value that depends on the arrays of one leaf alone. Others
        # are numbers, or do not depend on any leaf.
        self._owners = {value: leaf for leaf, value in enumerate(gradients)}
        self._owners |= {value: leaf for leaf, value in enumerate(params)}
        self._owners |= {value: leaf for value, (leaf, _) in prologue_state.items()}
        # The first pass in which a value can be computed by its leaf's part; by any
        # part, if it has no owner. And that in which any part can have it as a number.
        self._stages: dict[Value, int] = {}
        self._numbers: dict[Value, int] = {}
        # Sums, maxima and minima of leaves in slices, with their leaves.
        self._gathered: dict[Value, int] = {}
        # Values without an owner that depend on leaves; and arrays without an owner
        # whose elements are equal, as long as any slice.
        self._mixed: set[Value] = set()
        self._spread: set[Value] = set()
        inputs = [value for value in prologue.inputs if value not in self._owners]
        for value in prologue.inputs:
            self._put(value, int(value in late))
        from_slices = {gradients[leaf] for leaf in sliced}
        for node in prologue.nodes:
            self._follow(node, from_slices)
        made = (value for node in prologue.nodes for value in node.outputs)
        self._places = {v: i for i, v in enumerate((*prologue.inputs, *made))}
        self._new_state = [v for v in prologue.scalar_state if v.constant is None]
        self._wanted = [  # what kernels take, with their leaves
            (value, number)
            for number, leaf in enumerate(prologue.leaves)
            for value in (*leaf.scalars, *leaf.arrays)
            if value.constant is None
        ]
        self.num_passes = self._count_passes()
        exports = self._find_exports()
        self.parts = self._make_parts(exports)
        self.before = self._make_before(exports, inputs)

    def of_leaf(self, leaf: int) -> list[PassComputation]:
        """Returns the computations of all passes on a leaf."""
        numbers = range(self.num_passes)
        return [self.parts[n, leaf] for n in numbers if (n, leaf) in self.parts]

    @cached_property
    def gathered_leaves(self) -> Set[int]:
        """Leaves in slices that have to be gathered before a pass."""
        parts = self.parts.values()
        return {p.leaf for p in parts if p.leaf in self._sliced and not p.is_sliced}

    @cached_property
    def last_pass_leaves(self) -> Set[int]:
        """Leaves of which the last pass computes something; they are needed whole."""
        return {leaf for number, leaf in self.parts if number == self._last}

    # --- the division ----------------------------------------------------------------

    @property
    def _last(self) -> int:
        return self.num_passes - 1

    def _follow(self, node: Node, from_slices: set[Value]) -> None:
        """Finds the owner and the pass of a node's results."""
        read = [value for value in node.inputs if value.constant is None]
        own = {v: self._owners[v] for v in read if v in self._owners}
        stage = max((self._stages[value] for value in read), default=0)
        if len(leaves := set(own.values())) == 1:
            is_total = node.name in _TOTALS and not node.outputs[0].shape
            if is_total and from_slices.issuperset(own):
                self._gathered.update(dict.fromkeys(node.outputs, next(iter(leaves))))
                leaves, stage = set(), stage + 1
            elif leaves <= self._sliced and _follows(node, from_slices, self._spread):
                from_slices.update(node.outputs)
        elif leaves:
            leaves = {leaf for value, leaf in own.items() if not _is_one(value)}
            if len(leaves) > 1:
                raise _too_much(next(v for v in own if not _is_one(v)))
            foreign = (v for v, leaf in own.items() if leaf not in leaves)
            stage = max([stage, *(self._numbers[value] for value in foreign)])
        if not leaves and (node.is_spread or _follows(node, self._spread)):
            self._spread.update(value for value in node.outputs if value.shape)
        if not leaves and (own or not self._mixed.isdisjoint(read)):
            self._mixed.update(node.outputs)
        for value in node.outputs:
            self._owners.update((value, leaf) for leaf in leaves)
            self._put(value, stage)

    def _put(self, value: Value, stage: int) -> None:
        """Notes a value whose owner is known."""
        self._stages[value] = stage
        if value not in self._owners:
            self._numbers[value] = stage
        elif value.node is None or not _is_light(value.node):
            self._numbers[value] = stage + 1
        else:
            read = (v for v in value.node.inputs if v.constant is None)
            self._numbers[value] = max(self._numbers[v] for v in read)

    def _is_own(self, value: Value, leaf: int, number: int) -> bool:
        """Whether a leaf's part in a pass computes a value by itself."""
        if self._owners.get(value) != leaf:
            return False
        return not _is_one(value) or self._numbers[value] > number

    def _is_number(self, value: Value, leaf: int, number: int) -> bool:
        """Whether a leaf's part in a pass gets a value as a number."""
        if value in self._owners:
            return not self._is_own(value, leaf, number)
        if value.node is None or value in self._mixed:
            return True
        return value not in self._spread and math.prod(value.shape) <= _FEW

    def _count_passes(self) -> int:
        stages = self._stages
        ends = [
            stages[v] if self._owners.get(v, leaf) == leaf else self._numbers[v]
            for v, leaf in self._wanted
        ]
        ends += [self._numbers[value] - 1 for value in self._new_state]
        found = 1 + max(ends, default=0)
        if found <= _MOST_PASSES:
            return max(1, found)
        nodes = self.prologue.nodes
        culprit = max(nodes, key=lambda node: stages[node.outputs[0]])
        raise UnsupportedTransformError(
            f"optimizer: expected to need at most {_MOST_PASSES} passes over the "
            f"gradients, found one that needs {found}, for {culprit.name}"
            f"{origin_of(culprit)}; leave one of its norms out, or use "
            "jaxinf.smart_update"
        )

    def _find_exports(self) -> dict[Value, tuple[int, int]]:
        """Returns numbers that leaves give, each with its pass and its leaf.

        Those are of what others use, or later passes again.
        """
        found = {v: (self._stages[v] - 1, leaf) for v, leaf in self._gathered.items()}
        reads: list[tuple[Value, int | None]] = [(v, None) for v in self._new_state]
        for node in self.prologue.nodes:
            out = node.outputs[0]
            if out not in self._gathered:
                reads += [(value, self._owners.get(out)) for value in node.inputs]
        for value, leaf in dict.fromkeys((*reads, *self._wanted)):
            is_own = leaf is not None and self._is_own(value, leaf, self._last)
            if value in self._owners and not is_own:
                for root in self._roots(value):
                    found[root] = self._stages[root], self._owners[root]
        return found

    def _roots(self, value: Value) -> list[Value]:
        """Returns values from which a leaf's number follows by those on numbers."""
        stack, found = [value], dict[Value, None]()
        while stack:
            one = stack.pop()
            if one.node is not None and _is_light(one.node):
                stack += [v for v in one.node.inputs if v in self._owners]
            elif not _is_one(one) and one not in self._new_state:
                raise _too_much(one)
            else:
                found[one] = None
        return list(found)

    def _make_parts(
        self, exports: Mapping[Value, tuple[int, int]]
    ) -> dict[tuple[int, int], PassComputation]:
        given: defaultdict[tuple[int, int], list[Value]] = defaultdict(list)
        for value, at in exports.items():
            given[at].append(value)
        found = {}
        for leaf, kernel in enumerate(self.prologue.leaves):
            own = [v for v in kernel.scalars if self._is_own(v, leaf, self._last)]
            for number in range(self.num_passes):
                is_last = number == self._last
                taken = (own, kernel.arrays) if is_last else ((), ())
                outputs = given[number, leaf], *taken
                if any(outputs):
                    found[number, leaf] = self._make_part(number, leaf, *outputs)
        return found

    def _make_part(
        self,
        number: int,
        leaf: int,
        exports: Sequence[Value],
        scalars: Sequence[Value],
        arrays: Sequence[Value],
    ) -> PassComputation:
        outputs = (*exports, *scalars, *arrays)

        def is_own(value: Value) -> bool:
            return value.node is None and value in self._owners

        def is_given(value: Value) -> bool:
            is_known = value not in exports and self._is_number(value, leaf, number)
            return is_own(value) or is_known

        given, nodes = self._needed(outputs, is_given)
        own = tuple(filter(is_own, given))
        # Slices of the gradient, with leading axes kept, may be enough.
        takes_slices = own == (self.gradients[leaf],) and all(
            v in self._gathered for v in outputs if v.constant is None
        )
        return PassComputation(
            own,
            tuple(value for value in given if not is_own(value)),
            nodes,
            tuple(exports),
            tuple(dict.fromkeys(scalars)),
            tuple(dict.fromkeys(arrays)),
            leaf,
            self.prologue.leaves[leaf].info.shape,
            leaf in self._sliced and takes_slices,
        )

    def _make_before(
        self, exports: Mapping[Value, tuple[int, int]], inputs: Sequence[Value]
    ) -> list[PassComputation]:
        """Returns the computations before each pass and after the last.

        Args:
          inputs: Inputs of no leaf.
        """
        shared = [
            value
            for leaf, kernel in enumerate(self.prologue.leaves)
            for value in kernel.scalars
            if not self._is_own(value, leaf, self._last)
        ]
        before: list[PassComputation] = []
        done: set[Value] = set()
        for number in range(self.num_passes + 1):
            known = {value for value in inputs if self._stages[value] <= number}
            known |= {value for value, (n, _) in exports.items() if n < number}
            outputs = self._new_state
            if number < self.num_passes:
                known |= done
                own = [part for (n, _), part in self.parts.items() if n == number]
                outputs = [v for part in own for v in part.numbers if v not in known]
            numbers = tuple(dict.fromkeys(outputs))
            scalars = tuple(dict.fromkeys(shared if number == self._last else ()))
            given, nodes = self._needed((*numbers, *scalars), known.__contains__)
            before.append(PassComputation((), given, nodes, numbers, scalars))
            done.update(numbers)
        return before

    def _needed(
        self, outputs: Sequence[Value], is_given: Callable[[Value], bool]
    ) -> tuple[tuple[Value, ...], tuple[Node, ...]]:
        """Returns the given values that outputs follow from, and the computation.

        In the order of the prologue, so that parts of equal leaves are alike.
        """
        seen, given = set[Value](), set[Value]()
        stack = [value for value in outputs if value.constant is None]
        nodes = set[Node]()
        while stack:
            value = stack.pop()
            if value in seen:
                continue
            seen.add(value)
            if is_given(value):
                given.add(value)
            else:
                assert value.node is not None, "an input is given"
                nodes.add(value.node)
                stack += [v for v in value.node.inputs if v.constant is None]
        return (
            tuple(sorted(given, key=self._places.__getitem__)),
            tuple(sorted(nodes, key=lambda node: self._places[node.outputs[0]])),
        )


def _is_one(value: Value) -> bool:
    return math.prod(value.shape) == 1


def _is_light(node: Node) -> bool:
    return not any(value.shape for value in (*node.inputs, *node.outputs))


def _follows(node: Node, *known: Set[Value]) -> bool:
    """Whether a node maps elements of known arrays to elements of its result."""
    return is_elementwise(node) and all(
        not value.shape or any(value in arrays for arrays in known)
        for value in node.inputs
    )


def _too_much(value: Value) -> UnsupportedTransformError:
    """Makes the error for an array that other leaves would need."""
    name = "its gradient" if value.node is None else f"a result of {value.node.name}"
    where = "" if value.node is None else origin_of(value.node)
    return UnsupportedTransformError(
        "optimizer: expected to need only a few numbers of each leaf, such as its "
        f"norm, from other leaves, found {name}{where} of shape {value.shape}; use an "
        "optimizer without it, or jaxinf.smart_update"
    )
