"""A prologue divided by leaf: it gathers scalars of the gradients one by one.

    gradient of a leaf ─► a few scalars ─┐
    gradient of a leaf ─► a few scalars ─┴─► combine ─► scalars of the kernels

Invariant: a gradient is read once, by its own leaf's part. Its pieces along leading
  axes may arrive one after another if the part only takes sums, maxima or minima.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxinf.errors import UnsupportedTransformError
from jaxinf.program.graph import Node, Value, bind, prune
from jaxinf.program.prologue import LeafInputs, Prologue
from jaxinf.program.split import is_elementwise

__all__ = ["DividedPrologue", "divide_prologue"]

_MIXED = -1
_COMBINE: Mapping[str, Callable[..., jax.Array]] = {
    "reduce_sum": jnp.add,
    "reduce_max": jnp.maximum,
    "reduce_min": jnp.minimum,
    "reduce_and": jnp.logical_and,
    "reduce_or": jnp.logical_or,
}


@dataclass(frozen=True)
class _Part:
    """The computation on one gradient: nodes, and the scalars among their values."""

    nodes: tuple[Node, ...]
    scalars: tuple[Value, ...]


@dataclass(frozen=True, eq=False)
class DividedPrologue:
    """A prologue whose gradients arrive one by one.

    Attributes:
      num_leaves: Leaves of the params.
    """

    num_leaves: int
    _prologue: Prologue
    _parts: Mapping[int, _Part]
    _rest: tuple[Node, ...]
    _scalar_inputs: tuple[Value, ...]

    def reads(self, leaf: int) -> bool:
        """Whether the prologue uses a leaf's gradient."""
        return leaf in self._parts

    def can_gather(self, leaf: int) -> bool:
        """Whether a gradient may arrive in parts, with its leading axes kept."""
        nodes = self._parts[leaf].nodes
        made = {value: node for node in nodes for value in node.outputs}
        inner = {made.get(value) for node in nodes for value in node.inputs}
        return all(
            made[scalar].name in _COMBINE and made[scalar] not in inner
            for scalar in self._parts[leaf].scalars
        ) and all(
            node.name in _COMBINE or is_elementwise(node) or _is_spread(node)
            for node in nodes
        )

    def program(self, leaf: int) -> tuple[Value, tuple[Node, ...], tuple[Value, ...]]:
        """Returns a leaf's gradient, the nodes of `part`, and its scalars."""
        own = self._parts[leaf]
        return self._prologue.inputs[leaf], own.nodes, own.scalars

    def part(self, leaf: int, gradient: jax.Array) -> list[jax.Array]:
        """Computes a leaf's scalars, also of a part if `can_gather`; traceable."""
        own, source = self._parts[leaf], self._prologue.inputs[leaf]
        env: dict[Value, Any] = {source: gradient.astype(source.dtype)}
        for node in own.nodes:
            operands = [
                env[value] if value.constant is None else value.constant
                for value in node.inputs
            ]
            if _is_spread(node):  # as long as the part that arrived
                env[node.outputs[0]] = lax.broadcast(operands[0], gradient.shape)
            else:
                env.update(zip(node.outputs, bind(node, operands), strict=True))
        return [env[value] for value in own.scalars]

    def gather(
        self, leaf: int, some: Sequence[jax.Array], more: Sequence[jax.Array]
    ) -> list[jax.Array]:
        """Combines the scalars of two parts of a gradient; traceable."""
        own = self._parts[leaf]
        made = {value: node for node in own.nodes for value in node.outputs}
        return [
            _COMBINE[made[scalar].name](one, other)
            for scalar, one, other in zip(own.scalars, some, more, strict=True)
        ]

    def combine(
        self,
        parts: Mapping[int, Sequence[jax.Array]],
        scalar_state: Sequence[jax.Array],
    ) -> tuple[list[jax.Array], list[LeafInputs]]:
        """Computes the prologue's results; traceable.

        Args:
          parts: The scalars of each leaf for which `reads` is true.
          scalar_state: The flat state leaves that are not slots.
        """
        env: dict[Value, Any] = dict(
            zip(self._scalar_inputs, scalar_state, strict=True)
        )
        for leaf, own in self._parts.items():
            env.update(zip(own.scalars, parts[leaf], strict=True))
        return self._prologue.outputs_from(self._rest, env)


def divide_prologue(
    prologue: Prologue, num_leaves: int, num_scalars: int
) -> DividedPrologue:
    """Divides a prologue by the leaf whose gradient a value depends on.

    Args:
      prologue: Its inputs are gradients, params, scalar state and extra arguments.
      num_leaves: Leaves of the params.
      num_scalars: Scalars of the state.

    Raises:
      UnsupportedTransformError: More than scalars of a gradient is needed together with
        others, or it depends on a value that is not known yet.
    """
    gradients = prologue.inputs[:num_leaves]
    scalars = prologue.inputs[2 * num_leaves : 2 * num_leaves + num_scalars]
    owners = _owners(prologue.nodes, gradients)
    outputs = prologue.wanted()
    rest = prune((n for n in prologue.nodes if n.outputs[0] not in owners), outputs)
    parts: dict[int, list[Value]] = {}
    for value in dict.fromkeys(
        [*(value for node in rest for value in node.inputs), *outputs]
    ):
        if value in owners:
            if value.shape:
                raise _refusal(value)
            parts.setdefault(owners[value], []).append(value)
    return DividedPrologue(
        num_leaves,
        prologue,
        {
            leaf: _Part(prune(prologue.nodes, values), tuple(values))
            for leaf, values in parts.items()
        },
        rest,
        scalars,
    )


def _owners(nodes: Sequence[Node], gradients: Sequence[Value]) -> Mapping[Value, int]:
    """Maps a value to the one leaf on whose gradient it depends."""
    owners = {value: leaf for leaf, value in enumerate(gradients)}
    numbers: set[Value] = set()
    for node in nodes:
        read = [v for v in node.inputs if v.constant is None and v not in numbers]
        if not read:
            numbers.update(node.outputs)
            continue
        found = {owners.get(value, _MIXED) for value in read}
        # Nodes on scalars alone are computed when all scalars are known.
        is_leafs = any(value.shape for value in read)
        if is_leafs and len(found) == 1 and found != {_MIXED}:
            owners.update(dict.fromkeys(node.outputs, found.pop()))
    return owners


def _is_spread(node: Node) -> bool:
    return node.name == "broadcast_in_dim" and not node.inputs[0].shape


def _refusal(value: Value) -> UnsupportedTransformError:
    name = "its gradient" if value.node is None else f"a result of {value.node.name}"
    return UnsupportedTransformError(
        "optimizer: expected to need only scalars of each gradient, such as its norm, "
        f"from other leaves, found {name} of shape {value.shape}; use an optimizer "
        "without it, or jaxinf.smart_update"
    )
