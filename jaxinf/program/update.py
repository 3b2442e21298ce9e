"""An optax transformation as a prologue in JAX and one elementwise kernel per leaf.

Invariant: prologue and kernels together compute what ``tx.update`` and ``tx.init`` on
float32 params and gradients compute, an update up to rounding; leaves with equal bodies
share one `Kernel`.
"""

import contextlib
import itertools
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
from jaxinf.program.kernel import Constant, Input, Kernel
from jaxinf.program.passes import Passes
from jaxinf.program.prologue import LeafInputs, Prologue, make_prologue, typed_like
from jaxinf.program.split import BodyBuilder, is_elementwise, not_elementwise_error
from jaxinf.program.state import (
    LeafKernel,
    PrologueState,
    ReadableState,
    StateLayout,
    StateSlot,
    divide_state,
    find_prologue_state,
    float32_avals,
)
from jaxinf.program.tree import LeafInfo, leaf_infos
from jaxinf.typing import AVERAGE, FLOAT32, PyTree


class _PrologueInputs(NamedTuple):
    gradients: tuple[Value, ...]
    params: tuple[Value, ...]
    scalar_state: tuple[Value, ...]
    extra_args: tuple[Value, ...]
    slots: tuple[Value, ...]


@dataclass(frozen=True, eq=False)
class UpdateProgram:
    """One step of an optimizer, divided between JAX and the storage.

    Attributes:
      leaves: One per params leaf, in flattening order.
      prologue_state: The slots that the prologue needs; None if it needs none.
    """

    leaves: tuple[LeafKernel, ...]
    _extra_args: ExtraArgs = field(repr=False)
    _inputs: _PrologueInputs = field(repr=False)
    _prologue: Prologue = field(repr=False)
    prologue_state: PrologueState | None = None

    def prologue(
        self,
        gradients: Sequence[jax.Array],
        params: Sequence[jax.Array],
        scalar_state: Sequence[jax.Array],
        extra_args: Mapping[str, Any] | None = None,
        *,
        slots: Sequence[jax.Array] = (),
    ) -> tuple[list[jax.Array], list[LeafInputs]]:
        """Computes the prologue; traceable, and meant for jit.

        Reductions over params use the params on the JAX device, widened to float32, not
        the master params; likewise for gradients. Values that no output needs are not
        computed, and only arrays that are reduced are copied to float32.

        Args:
          gradients, params: Leaves, each in its own dtype.

        Returns:
          The new scalar state and, per leaf, the inputs of its kernel.
        """
        extra = self._extra_args.input_values(extra_args or {})
        return self._prologue([*gradients, *params, *scalar_state, *extra, *slots])

    @property
    def reads_gradients(self) -> bool:
        """Whether the prologue depends on gradients, such as their norm."""
        return not self._prologue.read.isdisjoint(self._inputs.gradients)

    def passes(
        self, *, sliced: Set[int] = frozenset(), late: Set[str] = frozenset()
    ) -> Passes:
        """Returns the prologue for gradients that arrive one by one; see `Passes`.

        Extra arguments named in `late` are known after the first pass only.
        """
        inputs, stored = self._inputs, self.prologue_state
        named = zip(inputs.extra_args, self._extra_args.inputs, strict=True)
        slots = stored.slots if stored else ()
        return Passes(
            self._prologue,
            gradients=inputs.gradients,
            params=inputs.params,
            prologue_state=dict(zip(inputs.slots, slots, strict=True)),
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
        arrays = [*scalar_state, *self._extra_args.input_values(extra_args or {})]
        inputs = self._inputs.scalar_state + self._inputs.extra_args
        pairs = zip(inputs, arrays, strict=True)
        return {value: typed_like(array, value) for value, array in pairs}


@dataclass(frozen=True, eq=False)
class InitProgram:
    """``tx.init``, divided between JAX and the storage.

    Attributes:
      prologue: Makes the first scalar state and the inputs of each leaf's kernel from
        the leaves, each in its own dtype. Traceable.
    """

    layout: StateLayout
    leaves: tuple[LeafKernel, ...]
    prologue: Prologue = field(repr=False)

    @property
    def needed_params(self) -> list[int]:
        """Numbers of the leaves whose elements the prologue needs, not only shapes."""
        read = self.prologue.read
        return [n for n, v in enumerate(self.prologue.inputs) if v in read]

    def compute(
        self, leaves: Sequence[Any]
    ) -> tuple[list[jax.Array], list[LeafInputs]]:
        """Runs the prologue, compiled.

        Args:
          leaves: The params' leaves, deferred or not; shapes of those not needed.
        """
        needed = {
            n: leaf if isinstance(leaf := leaves[n], jax.Array) else np.asarray(leaf)
            for n in self.needed_params
        }

        def run(needed: dict[int, Any]) -> Any:  # others are not read
            return self.prologue([needed.get(n, x) for n, x in enumerate(leaves)])

        return jax.jit(run)(needed)


def trace_update(
    tx: optax.GradientTransformation,
    params: PyTree,
    extra_args: Mapping[str, Any] | None = None,
    *,
    may_read: ReadableState = "",
) -> UpdateProgram:
    """Traces ``tx.update`` and divides it; nothing is computed on real data.

    Args:
      params: Arrays, tracers or avals: float32, bfloat16 or float16. The trace has
        float32 params and gradients in every case, because the master is float32.
      extra_args: Keyword arguments of ``tx.update``. Arrays, avals, int and float are
        inputs of the program; other values (bool, str, callables) are fixed here.
      may_read: The slots that the prologue may read if the update cannot be divided
        otherwise; see `PrologueState`.

    Raises:
      TypeError, ValueError: See `leaf_infos`; or the update needs arguments that are
        not given.
      UnsupportedTransformError: The update is not elementwise in stored state, or
        has more than 64 KiB of scalar state.
    """
    tx = optax.with_extra_args_support(tx)
    avals = float32_avals(params)
    layout = divide_state(jax.eval_shape(tx.init, avals), avals)
    extra = ExtraArgs.of(extra_args or {})
    try:
        closed = _trace_jaxpr(tx, avals, layout, extra)
    except TypeError as error:
        raise with_missing_arguments(error) from None
    infos = leaf_infos(params)
    try:
        return _divide(closed, layout, infos, extra, None)
    except UnsupportedTransformError:
        for prologue_state in find_prologue_state(layout, may_read):
            with contextlib.suppress(UnsupportedTransformError):
                return _divide(closed, layout, infos, extra, prologue_state)
        raise


def trace_init(tx: optax.GradientTransformation, params: PyTree) -> InitProgram:
    """Traces ``tx.init`` on float32 params and divides it; raises as `trace_update`."""
    infos, avals = leaf_infos(params), float32_avals(params)
    closed, state = jax.make_jaxpr(tx.init, return_shape=True)(avals)
    layout = divide_state(state, avals)
    graph = graph_of(closed)
    leaves, builders = [], []
    triples = zip(infos, layout.slots, graph.inputs, strict=True)
    for info, slots, params_input in triples:
        builder = BodyBuilder(info, {params_input: Input("params", 0, FLOAT32)})
        new_slots = [builder.operand(graph.results[slot.state_index]) for slot in slots]
        kernel = builder.kernel(slots, update=None, new_slots=new_slots)
        leaves.append(LeafKernel(info, slots, kernel))
        builders.append(builder)
    scalar_state = [graph.results[index] for index in layout.scalar_indices]
    prologue = make_prologue(graph.nodes, graph.inputs, scalar_state, builders)
    return InitProgram(layout, tuple(leaves), prologue)


def _divide(
    closed: compat.ClosedJaxpr,
    layout: StateLayout,
    infos: Sequence[LeafInfo],
    extra: ExtraArgs,
    prologue_state: PrologueState | None,
) -> UpdateProgram:
    """Divides a traced update into a kernel for each leaf and their prologue."""
    read_first = prologue_state.slots if prologue_state else ()
    leaf_of = {slot.state_index: leaf for leaf, slot in read_first}
    indices = {slot.state_index for slots in layout.slots for slot in slots}
    first_state = 2 * len(infos)  # among the inputs, after gradients and params
    graph = graph_of(closed, {first_state + index for index in indices - {*leaf_of}})
    gradients, params, state, extra_args = _split_inputs(graph.inputs, layout, infos)
    updates, new_state = graph.results[: len(infos)], graph.results[len(infos) :]
    scalar_state = _new_scalar_state(layout, new_state)
    read_slots = {state[index]: leaf for index, leaf in leaf_of.items()}
    local = _local_values(graph, infos, read_slots)
    nodes = prune(graph.nodes, graph.results)
    uses = _count_uses(nodes, graph.results)
    leaves, builders = [], []
    for number, (info, slots) in enumerate(zip(infos, layout.slots, strict=True)):
        inputs = {
            gradients[number]: Input("gradient", 0, FLOAT32),
            params[number]: Input("params", 0, FLOAT32),
        }
        for index, slot in enumerate(slots):
            inputs[state[slot.state_index]] = Input("slot", index, slot.dtype)
        builder = BodyBuilder(info, inputs, local.get(number, set()))
        new_slots = [new_state[slot.state_index] for slot in slots]
        results = updates[number], *new_slots
        reduced_by = nodes if read_slots else ()
        kernel = _build_kernel(builder, slots, results, uses, reduced_by)
        leaves.append(LeafKernel(info, slots, kernel))
        builders.append(builder)
    scalars = tuple(state[index] for index in layout.scalar_indices)
    groups = _PrologueInputs(gradients, params, scalars, extra_args, tuple(read_slots))
    flat = [value for group in groups for value in group]
    prologue = make_prologue(graph.nodes, flat, scalar_state, builders)
    return UpdateProgram(tuple(leaves), extra, groups, prologue, prologue_state)


def _new_scalar_state(layout: StateLayout, new_state: Sequence[Value]) -> list[Value]:
    values = [new_state[index] for index in layout.scalar_indices]
    for path, value in zip(layout.scalar_paths, values, strict=True):
        if value.stored:
            raise not_elementwise_error(f"optimizer state{path}", value)
    return values


def _build_kernel(
    builder: BodyBuilder,
    slots: Sequence[StateSlot],
    results: Sequence[Value],
    uses: Mapping[Value, int],
    reduced_by: Sequence[Node],
) -> Kernel:
    """Makes a leaf's kernel from its update and its new slots, the `results`."""
    update, *new_slots = map(builder.operand, results)
    reduced = builder.equations_used_by(reduced_by)
    if isinstance(update, Constant) and np.all(update.value == 0):
        update = None
        for index, slot in enumerate(slots):
            if slot.name == AVERAGE:  # that of frozen params stays
                new_slots[index] = Input("slot", index, slot.dtype)
    return builder.kernel(
        slots,
        update=update,
        new_slots=new_slots,
        reciprocals=_reciprocals(builder, uses),
        reduced=reduced,
    )


def _trace_jaxpr(
    tx: optax.GradientTransformationExtraArgs,
    params: PyTree,
    layout: StateLayout,
    extra: ExtraArgs,
) -> compat.ClosedJaxpr:
    """Traces an update, from the inputs of `_split_inputs` to updates and state."""
    leaves, treedef = jax.tree.flatten(params)

    def update(*flat: jax.Array) -> list[jax.Array]:
        gradients, values, state, extra_args = _split_inputs(flat, layout, leaves)
        updates, new_state = tx.update(
            treedef.unflatten(gradients),
            layout.treedef.unflatten(state),
            treedef.unflatten(values),
            **extra.rebuild(extra_args),
        )
        new_leaves = _flatten_state(new_state, layout)
        flat_updates = [
            jnp.zeros(aval.shape, FLOAT32)
            if leaf is None
            else jnp.broadcast_to(jnp.asarray(leaf).astype(FLOAT32), aval.shape)
            for leaf, aval in zip(treedef.flatten_up_to(updates), leaves, strict=True)
        ]
        return [*flat_updates, *new_leaves]

    extra_avals = [aval for _, aval in extra.inputs]
    return jax.make_jaxpr(update)(*leaves, *leaves, *layout.avals, *extra_avals)


def _split_inputs(
    flat: Sequence[Any], layout: StateLayout, leaves: Sequence[object]
) -> tuple[tuple[Any, ...], ...]:
    """Splits an update's inputs: gradients, params, state, extra arguments."""
    remaining, num = iter(flat), len(leaves)
    lengths = num, num, len(layout.avals), None  # None: all that remain
    return tuple(tuple(itertools.islice(remaining, length)) for length in lengths)


def _flatten_state(state: PyTree, layout: StateLayout) -> list[jax.Array]:
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
    graph: Graph, infos: Sequence[LeafInfo], read_slots: Mapping[Value, int]
) -> dict[int, set[Value]]:
    """Returns values of 0-d leaves that are elementwise in the leaf's inputs.

    Shapes cannot tell these values from the prologue's scalars; in the body they
    read the master params, and the body is that of other leaves.
    """
    num, mixed = len(infos), -1
    leaf_of = {value: n % num for n, value in enumerate(graph.inputs[: 2 * num])}
    leaf_of |= read_slots
    leaf_of = {value: leaf for value, leaf in leaf_of.items() if not infos[leaf].shape}
    for node in graph.nodes:
        leaves = {leaf_of[value] for value in node.inputs if value in leaf_of}
        if leaves:
            leaves -= {mixed}
            is_local = len(leaves) == 1 and is_elementwise(node)
            leaf_of |= dict.fromkeys(node.outputs, leaves.pop() if is_local else mixed)
    local: dict[int, set[Value]] = {}
    for value, leaf in leaf_of.items():
        local.setdefault(leaf, set()).add(value)
    return local


def _count_uses(nodes: Sequence[Node], results: Sequence[Value]) -> Mapping[Value, int]:
    """Counts the uses of each value as an operand or a result.

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
        builder.scalar_input(index) in divisors and uses[value] == 1
        for index, value in enumerate(builder.scalars)
    )
    return flags if any(flags) else ()
