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
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property

from jaxinf.errors import UnsupportedTransformError
from jaxinf.program.flow import Flow, flow_of, is_light, is_one, too_much
from jaxinf.program.graph import Node, Value, prune
from jaxinf.program.parts import Combination, LeafPart
from jaxinf.program.prologue import Prologue
from jaxinf.program.split import origin_of
from jaxinf.program.state import StateSlot

MAX_PASSES = 3
"""Passes over the gradients, of which the last one updates."""

# Values of no leaf up to this many elements are computed once, not by each part.
_FEW = 64


@dataclass(frozen=True, eq=False)
class Passes:
    """A prologue in passes.

    Args:
      prologue: Its inputs are gradients, params, scalar state, extra arguments and
        recalled slots.
      gradients, params: The inputs that are gradients and params, by leaf.
      recalled: The inputs that are stored state, each with its leaf and its slot.
      late: Numbers that are known after the first pass only, such as the loss.
      sliced: Leaves whose gradients arrive in slices along leading axes.

    Raises:
      UnsupportedTransformError: More than a few numbers of a leaf are needed together
        with others, or more than `MAX_PASSES` passes.
    """

    prologue: Prologue
    gradients: Sequence[Value]
    params: Sequence[Value]
    recalled: Mapping[Value, tuple[int, StateSlot]]
    late: Set[Value] = frozenset()
    sliced: Set[int] = frozenset()

    def __post_init__(self) -> None:
        if self.num_passes > MAX_PASSES:
            raise UnsupportedTransformError(
                f"optimizer: expected to need at most {MAX_PASSES} passes over the "
                f"gradients, found one that needs {self.num_passes}, for "
                f"{self._culprit}; leave one of its norms out, or use "
                "jaxinf.smart_update"
            )

    # --- the passes ----------------------------------------------------------------

    @cached_property
    def owners(self) -> Mapping[Value, int]:
        """The leaf of each input that is a leaf's own; the others are numbers."""
        found = {value: leaf for leaf, value in enumerate(self.gradients)}
        found |= {value: leaf for leaf, value in enumerate(self.params)}
        return found | {value: leaf for value, (leaf, _) in self.recalled.items()}

    @cached_property
    def num_passes(self) -> int:
        """Number of passes; with one no gradient waits."""
        stages = [self._known_at(value, leaf) for value, leaf in self._wanted]
        ends = [self._flow.numbers[value] - 1 for value in self._new_state]
        return 1 + max([0, *stages, *ends])

    @cached_property
    def whole(self) -> Set[int]:
        """Leaves in slices that have to be gathered before a pass."""
        parts = [
            part
            for number in range(self.num_passes)
            for leaf in self.sliced
            if (part := self.part(number, leaf)) is not None
        ]
        return {part.leaf for part in parts if not part.is_sliced}

    @cached_property
    def computed(self) -> Set[int]:
        """Leaves of which the last pass computes something; they are needed whole."""
        last = self.num_passes - 1
        return {leaf for number, leaf in self._parts if number == last}

    def part(self, number: int, leaf: int) -> LeafPart | None:
        """Returns the computation of a pass on a leaf; None if there is none."""
        return self._parts.get((number, leaf))

    def combination(self, number: int) -> Combination:
        """Returns the computation before a pass, from the exports of all before it."""
        return self._combinations[number]

    @cached_property
    def closing(self) -> Combination:
        """Returns the computation of the new scalar state, after the last pass."""
        known = self._known_before(self.num_passes)
        return self._combine(known, tuple(dict.fromkeys(self._new_state)), ())

    # --- the flow ------------------------------------------------------------------

    @cached_property
    def _flow(self) -> Flow:
        prologue = self.prologue
        return flow_of(
            prologue.nodes,
            prologue.inputs,
            self.owners,
            self.gradients,
            self.late,
            self.sliced,
        )

    @property
    def _owners(self) -> Mapping[Value, int]:
        return self._flow.owners

    @property
    def _stages(self) -> Mapping[Value, int]:
        return self._flow.stages

    @property
    def _new_state(self) -> list[Value]:
        return [v for v in self.prologue.scalar_state if v.constant is None]

    @cached_property
    def _wanted(self) -> list[tuple[Value, int]]:
        """Values that kernels take, with their leaves."""
        return [
            (value, number)
            for number, leaf in enumerate(self.prologue.leaves)
            for value in leaf.values
            if value.constant is None
        ]

    def _known_at(self, value: Value, leaf: int) -> int:
        """The first pass in which a leaf's part can have a value."""
        if self._owners.get(value, leaf) == leaf:
            return self._stages[value]
        return self._flow.numbers[value]

    def _is_own(self, value: Value, leaf: int, number: int) -> bool:
        """Whether a leaf's part in a pass computes a value by itself."""
        if self._owners.get(value) != leaf:
            return False
        return not is_one(value) or self._flow.numbers[value] > number

    @cached_property
    def _exports(self) -> Mapping[Value, tuple[int, int]]:
        """Numbers that leaves give, each with its leaf and its pass."""
        found: dict[Value, tuple[int, int]] = {}
        for value, leaf in self._flow.gathered.items():
            found[value] = leaf, self._stages[value] - 1
        for value in self._given_away():
            for root in self._roots(value):
                found[root] = self._owners[root], self._stages[root]
        return found

    def _given_away(self) -> list[Value]:
        """Values of one leaf that others use, or later passes again."""
        last = self.num_passes - 1
        found = dict.fromkeys(self._new_state)
        for node in self.prologue.nodes:
            out = node.outputs[0]
            leaf = self._owners.get(out)
            if leaf is None and out not in self._flow.gathered:
                found |= dict.fromkeys(node.inputs)
            elif leaf is not None:
                found |= dict.fromkeys(
                    v for v in node.inputs if not self._is_own(v, leaf, last)
                )
        found |= dict.fromkeys(
            value for value, leaf in self._wanted if not self._is_own(value, leaf, last)
        )
        return [value for value in found if value in self._owners]

    def _roots(self, value: Value) -> list[Value]:
        """The values from which a leaf's number follows by operations on numbers."""
        stack, found = [value], dict[Value, None]()
        while stack:
            one = stack.pop()
            if one.node is not None and is_light(one.node):
                stack += [v for v in one.node.inputs if v in self._owners]
            elif not is_one(one) and one not in self._new_state:
                raise too_much(one)
            else:
                found[one] = None
        return list(found)

    # --- parts ---------------------------------------------------------------------

    @cached_property
    def _parts(self) -> Mapping[tuple[int, int], LeafPart]:
        last = self.num_passes - 1
        outputs: dict[tuple[int, int], list[Value]] = {}
        for value, (leaf, stage) in self._exports.items():
            outputs.setdefault((stage, leaf), []).append(value)
        found = {}
        for leaf, kernel in enumerate(self.prologue.leaves):
            for number in range(self.num_passes):
                exports = outputs.get((number, leaf), [])
                scalars = [v for v in kernel.scalars if self._is_own(v, leaf, last)]
                arrays = list(kernel.arrays)
                if number != last:
                    scalars, arrays = [], []
                if exports or scalars or arrays:
                    part = self._part(number, leaf, exports, scalars, arrays)
                    found[number, leaf] = part
        return found

    def _part(
        self,
        number: int,
        leaf: int,
        exports: Sequence[Value],
        scalars: Sequence[Value],
        arrays: Sequence[Value],
    ) -> LeafPart:
        def is_own(value: Value) -> bool:
            return value.node is None and value in self.owners

        def is_given(value: Value) -> bool:
            is_export = value in exports
            return is_own(value) or (
                not is_export and self._is_number(value, number, leaf)
            )

        given, nodes = self._needed((*exports, *scalars, *arrays), is_given)
        own = tuple(value for value in given if is_own(value))
        outputs = [v for v in (*exports, *scalars, *arrays) if v.constant is None]
        # Slices of the gradient, with leading axes kept, may be enough.
        takes_slices = own == (self.gradients[leaf],) and all(
            value in self._flow.gathered for value in outputs
        )
        return LeafPart(
            leaf,
            self.prologue.leaves[leaf].shape,
            own,
            tuple(value for value in given if not is_own(value)),
            nodes,
            tuple(exports),
            tuple(dict.fromkeys(scalars)),
            tuple(dict.fromkeys(arrays)),
            leaf in self.sliced and takes_slices,
        )

    def _needed(
        self, outputs: Sequence[Value], is_given: Callable[[Value], bool]
    ) -> tuple[tuple[Value, ...], tuple[Node, ...]]:
        """Returns the given values that outputs follow from, and the computation."""
        given: set[Value] = set()
        nodes: set[Node] = set()
        stack, seen = list(outputs), set[Value]()
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
        places = self._places
        return (
            tuple(sorted(given, key=places.__getitem__)),
            tuple(sorted(nodes, key=lambda node: places[node.outputs[0]])),
        )

    @cached_property
    def _places(self) -> Mapping[Value, int]:
        """The position of each value, so that parts of equal leaves are alike."""
        values = [
            *self.prologue.inputs,
            *(value for node in self.prologue.nodes for value in node.outputs),
        ]
        return {value: place for place, value in enumerate(values)}

    def _is_number(self, value: Value, number: int, leaf: int) -> bool:
        """Whether a part gets a value as a number, instead of computing it."""
        if value in self._owners:
            return not self._is_own(value, leaf, number)
        if value.node is None or value in self._flow.mixed:
            return True
        return value not in self._flow.spread and math.prod(value.shape) <= _FEW

    # --- combinations --------------------------------------------------------------

    @cached_property
    def _combinations(self) -> Sequence[Combination]:
        last = self.num_passes - 1
        made: list[Combination] = []
        done: set[Value] = set()
        for number in range(self.num_passes):
            parts = [p for (n, _), p in self._parts.items() if n == number]
            known = self._known_before(number) | done
            needed = dict.fromkeys(
                v for part in parts for v in part.numbers if v not in known
            )
            scalars: dict[Value, None] = {}
            if number == last:
                scalars = dict.fromkeys(
                    value
                    for leaf, own in enumerate(self.prologue.leaves)
                    for value in own.scalars
                    if not self._is_own(value, leaf, last)
                )
            combination = self._combine(known, tuple(needed), tuple(scalars))
            done.update(needed)
            made.append(combination)
        return made

    def _known_before(self, number: int) -> set[Value]:
        """Numbers that need no computation: inputs, and exports of earlier passes."""
        inputs = {
            value
            for value in self.prologue.inputs
            if value not in self.owners and self._stages[value] <= number
        }
        return inputs | {v for v, (_, n) in self._exports.items() if n < number}

    def _combine(
        self, known: Set[Value], numbers: tuple[Value, ...], scalars: tuple[Value, ...]
    ) -> Combination:
        inputs, nodes = self._needed((*numbers, *scalars), known.__contains__)
        return Combination(inputs, nodes, numbers, scalars)

    @property
    def _culprit(self) -> str:
        """The computation that needs the most passes, in words."""
        value = max(
            [*(value for value, _ in self._wanted), *self._new_state],
            key=lambda value: self._stages[value],
        )
        nodes = prune(self.prologue.nodes, [value])
        latest = max((self._stages[n.outputs[0]] for n in nodes), default=0)
        first = next(n for n in nodes if self._stages[n.outputs[0]] == latest)
        return f"{first.name}{origin_of(first)}"
