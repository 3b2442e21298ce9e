"""The pass over gradients in which each value of a prologue can be computed.

Invariant: a value has an owner if it depends on the arrays of one leaf alone. Other
values are numbers, or do not depend on any leaf.
"""

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxinf.errors import UnsupportedTransformError
from jaxinf.program.graph import Node, Value
from jaxinf.program.split import is_elementwise, origin_of

TOTALS: Mapping[str, Callable[..., jax.Array]] = {
    "reduce_sum": jnp.add,
    "reduce_max": jnp.maximum,
    "reduce_min": jnp.minimum,
    "reduce_and": jnp.logical_and,
    "reduce_or": jnp.logical_or,
}
"""Reductions of slices, and how their results are combined."""

# Values of no leaf up to this many elements are computed once, not by each part.
_FEW = 64


@dataclass(frozen=True)
class PassAnalysis:
    """The passes in which values can be computed.

    Attributes:
      owners: The leaf of each value that depends on one leaf alone.
      stages: The first pass in which a value can be computed by its leaf's part; by any
        part, if it has no owner.
      numbers: The first pass in which any part can have a value, as a number.
      gathered: Sums, maxima and minima of leaves in slices, with their leaves.
      mixed: Values without an owner that depend on leaves.
      spread: Arrays without an owner whose elements are equal, as long as any slice.
    """

    owners: dict[Value, int]
    stages: dict[Value, int]
    numbers: dict[Value, int]
    gathered: dict[Value, int]
    mixed: set[Value]
    spread: set[Value]

    def known_at(self, value: Value, leaf: int) -> int:
        """The first pass in which a leaf's part can have a value."""
        is_own = self.owners.get(value, leaf) == leaf
        return self.stages[value] if is_own else self.numbers[value]

    def is_own(self, value: Value, leaf: int, number: int) -> bool:
        """Whether a leaf's part in a pass computes a value by itself."""
        if self.owners.get(value) != leaf:
            return False
        return not is_one(value) or self.numbers[value] > number

    def is_number(self, value: Value, leaf: int, number: int) -> bool:
        """Whether a leaf's part in a pass gets a value as a number."""
        if value in self.owners:
            return not self.is_own(value, leaf, number)
        if value.node is None or value in self.mixed:
            return True
        return value not in self.spread and math.prod(value.shape) <= _FEW


def flow_of(
    nodes: Sequence[Node],
    inputs: Sequence[Value],
    owners: Mapping[Value, int],
    gradients: Sequence[Value],
    late: Set[Value],
    sliced: Set[int],
) -> PassAnalysis:
    """Follows values through a prologue.

    Args:
      owners: The leaf of each input that is a leaf's own.
      late: Numbers that are known after the first pass only.

    Raises:
      UnsupportedTransformError: Arrays of several leaves meet.
    """
    flow = PassAnalysis(dict(owners), {}, {}, {}, set(), set())
    for value in inputs:
        _put(flow, value, int(value in late))
    from_slices = {gradients[leaf] for leaf in sliced}
    for node in nodes:
        read = [value for value in node.inputs if value.constant is None]
        own = {v: flow.owners[v] for v in read if v in flow.owners}
        stage = max((flow.stages[value] for value in read), default=0)
        if len(leaves := set(own.values())) == 1:
            if _is_total(node) and from_slices.issuperset(own):
                flow.gathered.update(dict.fromkeys(node.outputs, next(iter(leaves))))
                leaves, stage = set(), stage + 1
            elif leaves <= sliced and _follows(node, from_slices, flow.spread):
                from_slices.update(node.outputs)
        elif leaves:
            leaves = {leaf for value, leaf in own.items() if not is_one(value)}
            if len(leaves) > 1:
                raise too_much(next(v for v in own if not is_one(v)))
            foreign = (v for v, leaf in own.items() if leaf not in leaves)
            stage = max([stage, *(flow.numbers[value] for value in foreign)])
        if not leaves and (node.is_spread or _follows(node, flow.spread)):
            flow.spread.update(value for value in node.outputs if value.shape)
        if not leaves and (own or not flow.mixed.isdisjoint(read)):
            flow.mixed.update(node.outputs)
        for value in node.outputs:
            flow.owners.update((value, leaf) for leaf in leaves)
            _put(flow, value, stage)
    return flow


def _put(flow: PassAnalysis, value: Value, stage: int) -> None:
    """Notes a value whose owner is known."""
    flow.stages[value] = stage
    if value not in flow.owners:
        flow.numbers[value] = stage
    elif value.node is None or not is_light(value.node):
        flow.numbers[value] = stage + 1
    else:
        read = (v for v in value.node.inputs if v.constant is None)
        flow.numbers[value] = max(flow.numbers[v] for v in read)


def is_one(value: Value) -> bool:
    return math.prod(value.shape) == 1


def is_light(node: Node) -> bool:
    return not any(value.shape for value in (*node.inputs, *node.outputs))


def _is_total(node: Node) -> bool:
    """Whether a node takes a sum, maximum or minimum of all of a gradient."""
    return node.name in TOTALS and not node.outputs[0].shape


def _follows(node: Node, *known: Set[Value]) -> bool:
    """Whether an element of a node's result follows from those of known arrays."""
    return is_elementwise(node) and all(
        not value.shape or any(value in arrays for arrays in known)
        for value in node.inputs
    )


def too_much(value: Value) -> UnsupportedTransformError:
    """Makes the error for an array that other leaves would need."""
    name = "its gradient" if value.node is None else f"a result of {value.node.name}"
    where = "" if value.node is None else origin_of(value.node)
    return UnsupportedTransformError(
        "optimizer: expected to need only a few numbers of each leaf, such as its "
        f"norm, from other leaves, found {name}{where} of shape {value.shape}; use an "
        "optimizer without it, or jaxinf.smart_update"
    )
