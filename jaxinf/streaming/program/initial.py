"""Makes a model's first params leaf by leaf, with the user's own init function.

Invariant: each leaf has the bits of jitted `init_fn`; only one leaf at a time is in
memory.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from jaxinf import compat
from jaxinf.compat import LIGHT
from jaxinf.errors import BudgetError, StreamError
from jaxinf.program import Graph, Value, evaluate_node, path_name
from jaxinf.streaming.program.graph import Batch, Number, graph_of_init
from jaxinf.streaming.program.keys import Keys
from jaxinf.streaming.program.meshes import on_one_device, outside_mesh
from jaxinf.streaming.program.programs import compile_program, program_of
from jaxinf.streaming.program.trace import abstract, check_effects, closed_over
from jaxinf.terminal import format_bytes
from jaxinf.typing import Array, PyTree

BUFFERS_SHARE = 4
"""A store's buffers take one of so many parts of the memory while a leaf is written."""

MakeLeaves: TypeAlias = Callable[[int], Iterable[Any]]
"""Compiles the programs of all leaves for so many bytes of memory; blocks. Returns an
iterator that computes the leaves in order; the caller may drop each before the next."""


def trace_params(
    init_fn: Callable[..., PyTree], *args: Any
) -> tuple[PyTree, MakeLeaves]:
    """Traces ``init_fn(*args)``; returns shapes and dtypes, and the `MakeLeaves`.

    Nothing is computed. `MakeLeaves` raises BudgetError if a leaf leaves no room for
    temporaries, or for the store's buffers that write it.

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
    check_effects(closed, "init_fn")
    consts = closed_over(closed)
    graph = _with_numbers(graph_of_init(closed, consts))
    shapes = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in graph.results]
    avals = jax.tree.structure(out).unflatten(shapes)

    def argument(value: Value) -> Any:
        origin = value.origin
        if isinstance(origin, Number):
            return jnp.asarray(origin.number, value.dtype)
        if isinstance(origin, Batch):
            return jnp.asarray(flat[origin.leaf])
        return jnp.asarray(on_one_device(consts[origin.number]))

    def make(memory_bytes: int) -> Iterator[Array]:
        keys, executables = Keys(), dict[str, Any]()
        programs = [program_of("leaf", [output], keys) for output in graph.results]
        leaves = jax.tree.leaves_with_path(avals)
        for program, (path, _) in zip(programs, leaves, strict=True):
            if program.key not in executables:  # equal ones are compiled once
                executables[program.key] = compile_program(program)
            memory = executables[program.key].memory_analysis()
            _check_room(path, memory, memory_bytes)
        return (
            np.asarray(executables[program.key](*map(argument, program.inputs))[0])
            for program in programs
        )

    return avals, make


def _check_room(path: Any, memory: Any, memory_bytes: int) -> None:
    leaf_bytes = memory.output_size_in_bytes
    buffers_bytes = leaf_bytes // (BUFFERS_SHARE - 1)
    needed = leaf_bytes + max(memory.temp_size_in_bytes, buffers_bytes)
    if needed > memory_bytes:
        raise BudgetError(
            "memory_bytes",
            f"init_fn: leaf {path_name(path)} takes {format_bytes(needed)} to make, "
            f"found {format_bytes(memory_bytes)}",
            needed - memory_bytes,
            "; or divide the leaf in the model, or load params made elsewhere "
            "(step.load)",
        )


def check_init_fn(init_fn: Any) -> None:
    if not callable(init_fn):
        raise StreamError(
            "step.init: expected a function that returns the params, found a "
            f"{type(init_fn).__name__}; call step.init(init_fn, key), or give params "
            "that are made already to step.load(params)"
        )


def _with_numbers(graph: Graph) -> Graph:
    """Makes the numbers that random keys are folded with arguments of a program.

    The keys of leaves differ only in such a number, often the count of the calls before
    it, so leaves of one shape share one program.
    """
    replaced: dict[Value, Value] = {}
    arguments: dict[tuple[Number, Any], Value] = {}
    for node in graph.nodes:
        node.inputs = tuple(replaced.get(value, value) for value in node.inputs)
        constants = [value.constant for value in node.inputs]
        is_constant = bool(constants) and all(x is not None for x in constants)
        types = [(v.shape, jnp.issubdtype(v.dtype, jnp.integer)) for v in node.outputs]
        if node.name == "sharding_constraint":  # a leaf is made on one device
            replaced[node.outputs[0]] = node.inputs[0]
        elif node.name == "random_fold_in" and constants[1] is not None:
            key, aval = node.inputs[0], node.inputs[1].aval
            number = Number(int(constants[1]))
            argument = Value(aval, origin=number)
            node.inputs = key, arguments.setdefault((number, aval.dtype), argument)
        elif is_constant and node.name in LIGHT and types == [((), True)]:  # a count
            (count,) = evaluate_node(node, constants)
            constant = Value(node.outputs[0].aval, constant=np.asarray(count)[()])
            replaced[node.outputs[0]] = constant
    results = tuple(replaced.get(value, value) for value in graph.results)
    return replace(graph, results=results)
