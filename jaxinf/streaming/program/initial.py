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
from jaxinf.program import Graph, Node, Value, evaluate_node, path_name
from jaxinf.streaming.program.graph import Batch, graph_of_init
from jaxinf.streaming.program.keys import Keys
from jaxinf.streaming.program.meshes import on_one_device, outside_mesh
from jaxinf.streaming.program.programs import Program, compile_program, program_of
from jaxinf.streaming.program.trace import abstract, check_effects, closed_over
from jaxinf.terminal import format_bytes
from jaxinf.typing import Array, PyTree

_MAX_SEED_BYTES = 1 << 16  # more are computed in the program of their leaf

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
    graph = _on_one_device(graph_of_init(closed, consts))
    shapes = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in graph.results]
    avals = jax.tree.structure(out).unflatten(shapes)

    def argument(value: Value) -> Any:
        if isinstance(value.origin, Batch):
            return jnp.asarray(flat[value.origin.leaf])
        return jnp.asarray(on_one_device(consts[value.origin.number]))

    keys, executables = Keys(), dict[str, Any]()

    def make(memory_bytes: int) -> Iterator[Array]:
        # Keys of an explicit mesh have its type, so their programs stay whole.
        seeds = {} if has_explicit_axes else _compute_seeds(graph, argument)

        def is_inside(node: Node) -> bool:
            return seeds.keys().isdisjoint(node.outputs)

        programs = [
            program_of("leaf", [output], keys, is_inside=is_inside)
            for output in graph.results
        ]
        leaves = jax.tree.leaves_with_path(avals)
        for program, (path, _) in zip(programs, leaves, strict=True):
            if program.key not in executables:  # equal ones are compiled once
                executables[program.key] = compile_program(program)
            memory = executables[program.key].memory_analysis()
            _check_room(path, memory, memory_bytes)

        def leaf(program: Program) -> Array:
            inputs = (seeds[v] if v in seeds else argument(v) for v in program.inputs)
            return np.asarray(executables[program.key](*inputs)[0])

        return map(leaf, programs)

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


def _on_one_device(graph: Graph) -> Graph:
    """Leaves out the constraints of shardings: a leaf is made on one device."""
    replaced: dict[Value, Value] = {}
    for node in graph.nodes:
        node.inputs = tuple(replaced.get(value, value) for value in node.inputs)
        if node.name == "sharding_constraint":
            replaced[node.outputs[0]] = node.inputs[0]
    results = tuple(replaced.get(value, value) for value in graph.results)
    return replace(graph, results=results)


def _compute_seeds(
    graph: Graph, argument: Callable[[Value], Any]
) -> dict[Value, jax.Array]:
    """Computes the random keys of leaves, one operation after the other.

    As arguments of a leaf's program, they let leaves of one shape share one: their keys
    differ in the number that they are folded with, or in how they are split. These are
    integers, so their bits do not depend on the program that computes them.
    """
    known: dict[Value, Any] = {}

    def is_known(value: Value) -> bool:
        if value.constant is not None:
            known[value] = value.constant
        elif value.origin is not None and value not in known and _is_seed(value):
            known[value] = argument(value)
        return value in known

    for node in graph.nodes:
        is_light = node.name in LIGHT and node.name != "random_bits"
        if (
            is_light
            and all(map(is_known, node.inputs))
            and all(map(_is_seed, node.outputs))
        ):
            results = evaluate_node(node, [known[value] for value in node.inputs])
            known.update(zip(node.outputs, results, strict=True))
    return {v: key for v, key in known.items() if v.node is not None and _is_key(v)}


def _is_key(value: Value) -> bool:
    return jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def _is_seed(value: Value) -> bool:
    """Whether it is a few keys, or integers that they may be made of."""
    is_whole = _is_key(value) or jnp.issubdtype(value.dtype, jnp.integer)
    return is_whole and value.num_bytes <= _MAX_SEED_BYTES
