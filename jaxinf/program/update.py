"""An optax transformation as a prologue in JAX and one elementwise kernel per leaf.

Invariant: prologue and kernels together compute what ``tx.update`` and ``tx.init`` on
float32 params and gradients compute, an update up to rounding; leaves with equal bodies
share one `Kernel`.
"""

import contextlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxinf import compat
from jaxinf.errors import UnsupportedTransformError
from jaxinf.program.arguments import ExtraArgs, with_missing_arguments
from jaxinf.program.graph import Graph, Node, Value, graph_of, prune
from jaxinf.program.kernel import Constant, Input, Operand
from jaxinf.program.passes import Passes
from jaxinf.program.prologue import LeafInputs, Prologue, make_prologue, typed_like
from jaxinf.program.split import BodyBuilder, is_elementwise, refusal
from jaxinf.program.state import (
    LeafKernel,
    PrologueState,
    ReadableState,
    StateLayout,
    StateSlot,
    find_prologue_state,
    float32_avals,
    layout_of,
)
from jaxinf.program.tree import LeafInfo, leaf_infos
from jaxinf.typing import AVERAGE, FLOAT32, PyTree


class _Inputs(NamedTuple):
    """The inputs of an update's prologue."""

    gradients: tuple[Value, ...]
    params: tuple[Value, ...]
    scalar_state: tuple[Value, ...]
    extra: tuple[Value, ...]
    prologue_state: tuple[Value, ...]


@dataclass(frozen=True, eq=False)
class UpdateProgram:
    """One step of an optimizer, divided between JAX and the storage.

    Attributes:
      leaves: One per params leaf, in flattening order.
      prologue_state: Stored state that the prologue needs; None if it needs none.
    """

    leaves: tuple[LeafKernel, ...]
    _extra_args: ExtraArgs = field(repr=False)
    _inputs: _Inputs = field(repr=False)
    _prologue: Prologue = field(repr=False)
    prologue_state: PrologueState | None = None

    def prologue(
        self,
        gradients: Sequence[jax.Array],
        params: Sequence[jax.Array],
        scalar_state: Sequence[jax.Array],
        extra_args: Mapping[str, Any] | None = None,
        prologue_state: Sequence[jax.Array] = (),
    ) -> tuple[list[jax.Array], list[LeafInputs]]:
        """Computes the update's part outside the kernels; traceable; for jit.

        Reductions over params use the params on the JAX device, widened to float32, not
        the master params; likewise for gradients. Values that no output needs are not
        computed, and only arrays that are reduced are copied to float32.

        Args:
          gradients, params: Flat leaves, each in its own dtype.
          scalar_state: The flat state leaves that are not slots.
          extra_args: Arguments given to `trace_update`, with this step's values.
          prologue_state: Arrays of the slots in `prologue_state`, if there are any.

        Returns:
          The new scalar state and, per leaf, the inputs of its kernel.
        """
        extra = self._extra_args.dynamic_values(extra_args or {})
        return self._prologue(
            [*gradients, *params, *scalar_state, *extra, *prologue_state]
        )

    @property
    def reads_gradients(self) -> bool:
        """Whether the prologue depends on gradients, such as their norm."""
        return not self._prologue.read.isdisjoint(self._inputs.gradients)

    def passes(
        self, *, sliced: Set[int] = frozenset(), late: Set[str] = frozenset()
    ) -> Passes:
        """Returns the prologue for gradients that arrive one by one.

        Args:
          sliced: Leaves whose gradients arrive in slices along leading axes.
          late: Names of extra arguments that are known after the first pass only.
        """
        inputs, stored = self._inputs, self.prologue_state
        named = zip(inputs.extra, self._extra_args.dynamic, strict=True)
        slots = zip(stored.leaves, stored.slots, strict=True) if stored else ()
        return Passes(
            self._prologue,
            inputs.gradients,
            inputs.params,
            dict(zip(inputs.prologue_state, slots, strict=True)),
            late={value for value, (name, _) in named if name in late},
            sliced=sliced,
        )

    def shared_inputs(
        self,
        scalar_state: Sequence[jax.Array],
        extra_args: Mapping[str, Any] | None = None,
    ) -> dict[Value, jax.Array]:
        """Returns the inputs of `passes` that belong to no leaf.

        Typed PRNG keys of the scalar state may be plain numbers.
        """
        given = [*scalar_state, *self._extra_args.dynamic_values(extra_args or {})]
        inputs = self._inputs.scalar_state + self._inputs.extra
        pairs = zip(inputs, given, strict=True)
        return {value: typed_like(array, value) for value, array in pairs}


@dataclass(frozen=True, eq=False)
class InitProgram:
    """``tx.init``, divided between JAX and the storage.

    Attributes:
      leaves: One per params leaf.
      prologue: Makes the first scalar state and, per leaf, its kernel's inputs from
        flat leaves, each in its own dtype; widened if they are needed. Traceable.
    """

    layout: StateLayout
    leaves: tuple[LeafKernel, ...]
    prologue: Prologue = field(repr=False)

    @property
    def needed_params(self) -> list[int]:
        """Numbers of the leaves that the prologue needs, not only their shapes."""
        read = self.prologue.read
        return [n for n, v in enumerate(self.prologue.inputs) if v in read]

    def compute(
        self, leaves: Sequence[Any]
    ) -> tuple[list[jax.Array], list[LeafInputs]]:
        """Runs the prologue, compiled; reads only the leaves that it needs.

        Args:
          leaves: The params' leaves, deferred or not; shapes of those not needed.
        """
        given = {
            n: leaf if isinstance(leaf := leaves[n], jax.Array) else np.asarray(leaf)
            for n in self.needed_params
        }

        def run(given: dict[int, Any]) -> Any:  # others are not read
            return self.prologue([given.get(n, x) for n, x in enumerate(leaves)])

        return jax.jit(run)(given)


def trace_update(
    tx: optax.GradientTransformation,
    params: PyTree,
    extra_args: Mapping[str, Any] | None = None,
    *,
    may_read: ReadableState = "",
) -> UpdateProgram:
    """Traces ``tx.update`` and divides it; nothing is computed on real data.

    Args:
      tx: Any transformation of optax's protocol.
      params: Arrays, tracers or avals: float32, bfloat16 or float16. The trace has
        float32 params and gradients in every case, because the master is float32.
      extra_args: Keyword arguments of ``tx.update``. Arrays, avals, int and float are
        inputs of the program; other values (bool, str, callables) are fixed here.
      may_read: The stored state that the prologue may read, if the update cannot be
        divided otherwise; see `PrologueState`.

    Raises:
      TypeError, ValueError: See `leaf_infos`; or the update needs arguments that are
        not given.
      UnsupportedTransformError: The update is not elementwise in stored state, or
        has more than 64 KiB of state that is not stored per leaf.
    """
    tx = optax.with_extra_args_support(tx)
    avals = float32_avals(params)
    layout = layout_of(jax.eval_shape(tx.init, avals), avals)
    extra = ExtraArgs.of(extra_args or {})
    infos = leaf_infos(params)
    try:
        closed = _update_jaxpr(tx, avals, layout, extra)
    except TypeError as error:
        raise with_missing_arguments(error) from None
    try:
        return _divided(closed, layout, extra, infos, None)
    except UnsupportedTransformError:
        for prologue_state in find_prologue_state(layout, may_read):
            with contextlib.suppress(UnsupportedTransformError):
                return _divided(closed, layout, extra, infos, prologue_state)
        raise


def trace_init(tx: optax.GradientTransformation, params: PyTree) -> InitProgram:
    """Traces ``tx.init`` on float32 params and divides it.

    Raises as `trace_update`.
    """
    infos, avals = leaf_infos(params), float32_avals(params)
    closed, state = jax.make_jaxpr(tx.init, return_shape=True)(avals)
    layout = layout_of(state, avals)
    graph = graph_of(closed)
    leaves, builders = [], []
    for info, slots, own in zip(infos, layout.slots, graph.inputs, strict=True):
        builder = BodyBuilder(info, {own: Input("params", 0, FLOAT32)})
        first = [builder.operand(graph.results[slot.state_index]) for slot in slots]
        leaves.append(LeafKernel(info, slots, builder.kernel(slots, None, first)))
        builders.append(builder)
    scalar_state = [graph.results[index] for index in layout.scalar_indices]
    prologue = make_prologue(graph.nodes, graph.inputs, scalar_state, builders)
    return InitProgram(layout, tuple(leaves), prologue)


def _divided(
    closed: compat.ClosedJaxpr,
    layout: StateLayout,
    extra: ExtraArgs,
    infos: Sequence[LeafInfo],
    prologue_state: PrologueState | None,
) -> UpdateProgram:
    num, num_state = len(infos), len(layout.avals)
    leaf_of: dict[StateSlot, int] = {}
    if prologue_state is not None:
        pairs = zip(prologue_state.slots, prologue_state.leaves, strict=True)
        leaf_of = dict(pairs)
    stored = {
        2 * num + slot.state_index
        for slots in layout.slots
        for slot in slots
        if slot not in leaf_of
    }
    graph = graph_of(closed, stored)
    state = graph.inputs[2 * num : 2 * num + num_state]
    new_state = graph.results[num:]
    scalar_state = [new_state[index] for index in layout.scalar_indices]
    for path, value in zip(layout.scalar_paths, scalar_state, strict=True):
        if value.stored:
            raise refusal(f"optimizer state{path}", value)
    read_first = {state[slot.state_index]: leaf for slot, leaf in leaf_of.items()}
    local = _local_values(graph, infos, read_first)
    nodes = prune(graph.nodes, graph.results)
    uses = _uses(nodes, graph.results)
    leaves, builders = [], []
    for index, (info, slots) in enumerate(zip(infos, layout.slots, strict=True)):
        inputs = {
            graph.inputs[index]: Input("gradient", 0, FLOAT32),
            graph.inputs[num + index]: Input("params", 0, FLOAT32),
        }
        own = [Input("slot", n, slot.dtype) for n, slot in enumerate(slots)]
        places = [slot.state_index for slot in slots]
        inputs |= zip([state[place] for place in places], own, strict=True)
        builder = BodyBuilder(info, inputs, local.get(index, set()))
        update: Operand | None = builder.operand(graph.results[index])
        new: list[Operand] = [builder.operand(new_state[place]) for place in places]
        if isinstance(update, Constant) and np.all(update.value == 0):
            update = None  # and the average of frozen params are these
            triples = zip(slots, own, new, strict=True)
            new = [old if slot.name == AVERAGE else n for slot, old, n in triples]
        reduced = builder.also_used_by(nodes) if read_first else ()
        flags = _reciprocals(builder, uses)
        kernel = builder.kernel(slots, update, new, flags, reduced)
        leaves.append(LeafKernel(info, slots, kernel))
        builders.append(builder)
    groups = _Inputs(
        graph.inputs[:num],
        graph.inputs[num : 2 * num],
        tuple(state[index] for index in layout.scalar_indices),
        graph.inputs[2 * num + num_state :],
        tuple(read_first),
    )
    flat = [value for group in groups for value in group]
    prologue = make_prologue(graph.nodes, flat, scalar_state, builders)
    return UpdateProgram(tuple(leaves), extra, groups, prologue, prologue_state)


def _update_jaxpr(
    tx: optax.GradientTransformationExtraArgs,
    params: PyTree,
    layout: StateLayout,
    extra: ExtraArgs,
) -> compat.ClosedJaxpr:
    """Inputs: gradients, params, state, extra args; outputs: updates, new state."""
    leaves, treedef = jax.tree.flatten(params)
    num, num_state = len(leaves), len(layout.avals)

    def update(*flat: jax.Array) -> list[jax.Array]:
        gradients, values = flat[:num], flat[num : 2 * num]
        state = jax.tree.unflatten(layout.treedef, flat[2 * num : 2 * num + num_state])
        updates, new_state = tx.update(
            treedef.unflatten(gradients),
            state,
            treedef.unflatten(values),
            **extra.rebuild(flat[2 * num + num_state :]),
        )
        new_leaves = _state_leaves(new_state, layout)
        return [*_update_leaves(updates, treedef, leaves), *new_leaves]

    given = [aval for _, aval in extra.dynamic]
    avals = [*leaves, *leaves, *layout.avals, *given]
    return jax.make_jaxpr(update)(*avals)


def _update_leaves(updates: PyTree, treedef: Any, avals: Sequence[Any]) -> list[Any]:
    """Returns the updates as float32 in the leaves' shapes; zero if there is none."""

    def of(leaf: Any, aval: Any) -> Any:
        if leaf is None:
            return jnp.zeros(aval.shape, FLOAT32)
        return jnp.broadcast_to(jnp.asarray(leaf).astype(FLOAT32), aval.shape)

    flat = treedef.flatten_up_to(updates)
    return [of(leaf, aval) for leaf, aval in zip(flat, avals, strict=True)]


def _state_leaves(state: PyTree, layout: StateLayout) -> list[jax.Array]:
    leaves, treedef = jax.tree_util.tree_flatten_with_path(state)
    if treedef != layout.treedef:
        raise UnsupportedTransformError(
            "optimizer state: expected the structure that tx.init gives, found another "
            f"structure after tx.update: {layout.treedef} against {treedef}; a "
            "transformation must keep its state's structure"
        )
    for (path, leaf), aval in zip(leaves, layout.avals, strict=True):
        found = (jnp.shape(leaf), jnp.result_type(leaf))
        if found != (aval.shape, aval.dtype):
            raise UnsupportedTransformError(
                f"optimizer state{compat.keystr(path)}: expected "
                f"{aval.dtype}{list(aval.shape)} as tx.init gives, found "
                f"{found[1]}{list(found[0])} after tx.update; a transformation must "
                "keep its state's dtypes and shapes"
            )
    return [leaf for _, leaf in leaves]


def _local_values(
    graph: Graph, infos: Sequence[LeafInfo], read_first: Mapping[Value, int]
) -> dict[int, set[Value]]:
    """Returns values of 0-d leaves that are elementwise in their own inputs.

    Shapes cannot tell these values from the prologue's scalars; in the body they
    read the master params, and the body is that of other leaves.
    """
    num, mixed = len(infos), -1
    own = {value: n % num for n, value in enumerate(graph.inputs[: 2 * num])}
    own |= read_first
    found = {value: leaf for value, leaf in own.items() if not infos[leaf].shape}
    for node in graph.nodes:
        sources = {found[value] for value in node.inputs if value in found}
        if sources:
            only = sources - {mixed}
            is_local = len(only) == 1 and is_elementwise(node)
            found |= dict.fromkeys(node.outputs, only.pop() if is_local else mixed)
    local: dict[int, set[Value]] = {}
    for value, leaf in found.items():
        local.setdefault(leaf, set()).add(value)
    return local


def _uses(nodes: Sequence[Node], results: Sequence[Value]) -> Mapping[Value, int]:
    """Counts the uses of each value as an operand or an output of needed nodes.

    As XLA does, which drops what has no elements before it looks at them.
    """
    uses = Counter(results)
    for node in nodes:
        if any(math.prod(value.shape) for value in node.outputs):
            uses.update(node.inputs)
    return uses


def _reciprocals(builder: BodyBuilder, uses: Mapping[Value, int]) -> tuple[bool, ...]:
    if math.prod(builder.info.shape) == 1:
        return ()
    divisors = {e.inputs[1] for e in builder.equations if e.op == "div"}
    flags = tuple(
        builder.scalar(index) in divisors and uses[value] == 1
        for index, value in enumerate(builder.scalars)
    )
    return flags if any(flags) else ()
