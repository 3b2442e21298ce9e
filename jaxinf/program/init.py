"""The first optimizer state, divided like the update.

Invariant: prologue and kernels together give what ``tx.init`` gives on float32 params.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
import optax

from jaxinf.program.graph import graph_of
from jaxinf.program.ir import Input
from jaxinf.program.kernel import Kernel
from jaxinf.program.prologue import LeafInputs, Prologue
from jaxinf.program.split import BodyBuilder
from jaxinf.program.state import (
    LeafKernel,
    StateLayout,
    as_transform,
    float32_avals,
    layout_of,
)
from jaxinf.program.tree import leaf_infos
from jaxinf.typing import FLOAT32, PyTree


@dataclass(frozen=True, eq=False)
class InitProgram:
    """``tx.init``, divided between JAX and the storage.

    Attributes:
      layout: The layout of the state.
      leaves: One per params leaf.
    """

    layout: StateLayout
    leaves: tuple[LeafKernel, ...]
    _prologue: Prologue = field(repr=False)

    @property
    def needed_params(self) -> list[int]:
        """Numbers of the leaves that the prologue needs, not only their shapes."""
        read = self._prologue.read
        return [n for n, v in enumerate(self._prologue.inputs) if v in read]

    def prologue(
        self, params: Sequence[jax.Array]
    ) -> tuple[list[jax.Array], list[LeafInputs]]:
        """The first scalar state and, per leaf, its kernel's inputs; traceable.

        Args:
          params: Flat leaves, each in its own dtype; widened if they are needed.
        """
        return self._prologue(params)


def trace_init(
    tx: optax.GradientTransformation | optax.MultiSteps, params: PyTree
) -> InitProgram:
    """Traces ``tx.init`` on float32 params and divides it.

    Raises:
      TypeError, ValueError: See `leaf_infos`.
      UnsupportedTransformError: More than 64 KiB of state is not of a leaf's shape,
        or a value is of a 64-bit dtype.
    """
    tx = as_transform(tx)
    infos, avals = leaf_infos(params), float32_avals(params)
    closed, state = jax.make_jaxpr(tx.init, return_shape=True)(avals)
    layout = layout_of(state, avals)
    graph = graph_of(closed)
    kernels: dict[Kernel, Kernel] = {}
    leaves, builders = [], []
    for info, slots, own in zip(infos, layout.slots, graph.inputs, strict=True):
        builder = BodyBuilder(info, {own: Input("params", 0, FLOAT32)})
        first = [builder.operand(graph.results[slot.state_index]) for slot in slots]
        kernel = builder.kernel(slots, None, first)
        leaves.append(LeafKernel(info, slots, kernels.setdefault(kernel, kernel)))
        builders.append(builder)
    scalar_state = [graph.results[index] for index in layout.scalar_indices]
    prologue = Prologue.of(graph.nodes, graph.inputs, scalar_state, builders)
    return InitProgram(layout, tuple(leaves), prologue)
