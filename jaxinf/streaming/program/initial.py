"""Makes a model's first params leaf by leaf, with the user's own init function.

Invariant: each leaf has the bits of jitted `init_fn`; only one leaf at a time is in
memory.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from jaxinf import compat
from jaxinf.csd import ScalarInputs
from jaxinf.errors import BudgetError, StreamError, UnsupportedTransformError
from jaxinf.program import InitProgram, key_data, path_name
from jaxinf.program.graph import Node, Value, bind
from jaxinf.store import ScalarState, encode_path
from jaxinf.streaming.program.classify import LIGHT
from jaxinf.streaming.program.graph import (
    Batch,
    Const,
    Number,
    ProgramInliner,
)
from jaxinf.streaming.program.keys import Keys
from jaxinf.streaming.program.meshes import (
    on_one_device,
    outside_mesh,
)
from jaxinf.streaming.program.programs import Program, function_of, program_of
from jaxinf.streaming.program.trace import abstract
from jaxinf.typing import Array, PyTree

BUFFERS_SHARE = 4
"""Part of the memory that a store's buffers take while a leaf is written."""

Shard: TypeAlias = tuple[tuple[slice, ...], Array]
"""A part of a leaf: its index, and its numbers."""


def trace_params(init_fn: Callable[..., PyTree], *args: Any) -> "LeafMaker":
    """Traces ``init_fn(*args)``; nothing is computed.

    Raises:
      StreamError: `init_fn` is not a function, or has side effects.
    """
    check_init_fn(init_fn)
    flat, tree = jax.tree.flatten(args)
    flat = [on_one_device(leaf) for leaf in flat]
    make_jaxpr = jax.make_jaxpr(
        lambda *leaves: init_fn(*tree.unflatten(leaves)), return_shape=True
    )
    # Numbers do not depend on the mesh, but types with explicit axes would.
    has_explicit_axes = AxisType.Explicit in compat.mesh_in_use().axis_types
    with outside_mesh() if has_explicit_axes else contextlib.nullcontext():
        closed, out = make_jaxpr(*map(abstract, flat))
    if closed.effects:
        raise StreamError(
            "init_fn: expected a function without side effects, found "
            f"{', '.join(map(str, closed.effects))}; remove prints and stores from it"
        )
    builder = _Builder(closed.consts)
    inputs: list[Value] = [
        Value(var.aval, origin=Batch(i)) for i, var in enumerate(closed.jaxpr.invars)
    ]
    outputs = builder.inline(closed, inputs)
    return LeafMaker(flat, builder.consts, jax.tree.structure(out), outputs)


def check_init_fn(init_fn: Any) -> None:
    """Refuses what cannot be called to make params.

    Raises:
      StreamError: It is not a function.
    """
    if not callable(init_fn):
        raise StreamError(
            "step.init: expected a function that returns the params, found a "
            f"{type(init_fn).__name__}; call step.init(init_fn, key), or give params "
            "that are made already to step.load(params)"
        )


@dataclass(frozen=True)
class LeafMaker:
    """A traced init function, whose leaves can be made one at a time."""

    arguments: list[Any]
    consts: list[Any]
    tree: Any
    outputs: list[Value]

    @property
    def avals(self) -> PyTree:
        """Returns the params' shapes and dtypes."""
        return self.tree.unflatten(
            [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in self.outputs]
        )

    def compile(self, memory_bytes: int) -> Iterator[list[Shard]]:
        """Compiles the programs of all leaves; blocks.

        Args:
          memory_bytes: Memory for one leaf and temporaries. The store's buffers have a
            part of it while a leaf is written.

        Returns:
          An iterator that computes the leaves in order, each as one shard; the caller
          may drop each before the next.

        Raises:
          BudgetError: A leaf needs more; names it and the bytes.
        """
        keys, executables = Keys(), dict[str, Any]()
        programs = [program_of("leaf", [output], keys) for output in self.outputs]
        for number, program in enumerate(programs):
            if program.key not in executables:  # equal ones are compiled once
                executables[program.key] = _compile(program)
            memory = executables[program.key].memory_analysis()
            leaf_bytes = memory.output_size_in_bytes
            needed = max(
                leaf_bytes + memory.temp_size_in_bytes,
                leaf_bytes + leaf_bytes // (BUFFERS_SHARE - 1),
            )
            if needed > memory_bytes:
                raise self._refusal(number, needed, memory_bytes)
        return ([self._made(one, executables[one.key])] for one in programs)

    def _made(self, program: Program, executable: Any) -> Shard:
        (leaf,) = executable(*map(self._argument, program.inputs))
        return (slice(None),) * leaf.ndim, np.asarray(leaf)

    def _argument(self, value: Value) -> Any:
        origin = value.origin
        match origin:
            case Batch():
                return jnp.asarray(self.arguments[origin.leaf])
            case Const():
                return jnp.asarray(on_one_device(self.consts[origin.number]))
            case Number():
                return jnp.asarray(origin.number, value.dtype)
        raise AssertionError(origin)

    def _refusal(self, number: int, needed: int, memory_bytes: int) -> BudgetError:
        path, _ = jax.tree.leaves_with_path(self.avals)[number]
        return BudgetError(
            "memory_bytes",
            f"init_fn: leaf {path_name(path)} takes {needed} bytes to make, found "
            f"{memory_bytes}",
            needed - memory_bytes,
            "; or divide the leaf in the model, or load params made elsewhere "
            "(step.load)",
        )


class _Builder(ProgramInliner):
    """Inlines calls; folds counts of the calls of a random key into numbers.

    The keys of leaves differ only in a number that a key is folded with. This number
    becomes an argument, so leaves of one shape share one program.
    """

    def _equation(self, eqn: Any, inputs: list[Value]) -> list[Value]:
        callee = compat.called_jaxpr(eqn.primitive.name, eqn.params)
        if callee is not None:
            return self.inline(callee, inputs)
        if eqn.primitive.name == "sharding_constraint":
            return inputs  # a leaf is made on one device
        if eqn.primitive.name == "random_fold_in":
            inputs = [inputs[0], self._as_argument(inputs[1])]
        node = Node(eqn.primitive, tuple(inputs), eqn.params, context=eqn.ctx)
        if _is_count(node, eqn):
            (number,) = bind(node, [value.constant for value in inputs])
            return [Value(eqn.outvars[0].aval, constant=np.asarray(number)[()])]
        node.outputs = tuple(Value(var.aval, node=node) for var in eqn.outvars)
        return list(node.outputs)

    def _as_argument(self, value: Value) -> Value:
        if value.constant is None or value.dtype not in (np.uint32, np.int32):
            return value
        return self.input(Number(int(value.constant)), value.aval)


def _is_count(node: Node, eqn: Any) -> bool:
    """Whether a node computes an integer from integers within the program."""
    avals = [var.aval for var in eqn.outvars]
    return (
        node.name in LIGHT
        and len(avals) == 1
        and bool(node.inputs)
        and not avals[0].shape
        and jnp.issubdtype(avals[0].dtype, jnp.integer)
        and all(value.constant is not None for value in node.inputs)
    )


def _compile(program: Program) -> Any:
    avals = [jax.ShapeDtypeStruct(value.shape, value.dtype) for value in program.inputs]
    return jax.jit(function_of(program)).lower(*avals).compile()


def initial_inputs(
    program: InitProgram, leaves: Sequence[jax.ShapeDtypeStruct]
) -> tuple[list[ScalarState], Mapping[int, ScalarInputs]]:
    """Returns the first scalar state, and the inputs of each leaf's initial state.

    Raises:
      UnsupportedTransformError: The state depends on params.
    """
    check_init(program)

    def compute() -> Any:
        stand_ins = [jnp.zeros(leaf.shape, leaf.dtype) for leaf in leaves]
        scalars, inputs = program.prologue(stand_ins)
        return scalars, [one.scalars for one in inputs]

    scalars, inputs = jax.jit(compute)()
    paths = map(encode_path, program.layout.scalar_keys)
    state = [
        ScalarState(path, np.array(key_data(value)))
        for path, value in zip(paths, scalars, strict=True)
    ]
    return state, {
        leaf: ScalarInputs(tuple(np.asarray(scalar) for scalar in own))
        for leaf, own in enumerate(inputs)
    }


def check_init(program: InitProgram) -> None:
    """Refuses a first state that needs more than one leaf's params.

    Raises:
      UnsupportedTransformError: The state depends on all params.
    """
    if program.reads_params or any(one.kernel.array_dtypes for one in program.leaves):
        raise UnsupportedTransformError(
            "jaxinf.stream: expected an optimizer whose first state is made leaf by "
            "leaf, found one that computes something of all params first; use "
            "jaxinf.smart_update"
        )
