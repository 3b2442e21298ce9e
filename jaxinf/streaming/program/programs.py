"""Segments as programs: the nodes, inputs and outputs of each, and its compilation.

Invariant: a program has the nodes of its segment, the free nodes that they need and, in
backward, the light forward nodes of the segment. All other values are inputs. Options
of compilation depend on the program and on JAX alone, so it has the same bits under any
policy and budget.
"""

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxinf import compat
from jaxinf.program import Node, Value, ancestors, aval_bytes, evaluate, graph_of
from jaxinf.streaming.program.graph import Number, Piece
from jaxinf.streaming.program.keys import Keys
from jaxinf.streaming.program.lifetimes import OrderedProgram, once
from jaxinf.streaming.program.meshes import struct, typed_sharding

# glibc keeps smaller blocks anyway, so a plan is not exact to within their size.
_LARGE_BYTES = 32 << 20
# The product of arrays with fewer axes is summed in tiles, and takes no memory
# (docs/decisions.md, "Sums of large products").
_NUM_AXES = 4
# Compiles in less time, with arrays in the same memory.
_UNOPTIMIZED = {"xla_backend_optimization_level": 0}


@dataclass(frozen=True, eq=False)
class Program:
    """One function that is compiled and called.

    Attributes:
      direction: "forward" or "backward"; "sum" adds up gradients of micro-batches, and
        "free" computes results that no segment has.
      segment: Number of its segment; -1 for none.
      key: Equal for programs that can share an executable.
    """

    direction: str
    segment: int
    inputs: tuple[Value, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Value, ...]
    key: str

    @property
    def name(self) -> str:
        number = f" {self.segment}" if self.segment >= 0 else ""
        return self.direction + number

    @cached_property
    def params(self) -> tuple[tuple[Piece, int], ...]:
        """The pieces of params that it reads, in the order of its inputs, and bytes."""
        params = (value for value in self.inputs if isinstance(value.origin, Piece))
        return tuple((value.origin, value.num_bytes) for value in params)

    @cached_property
    def input_bytes(self) -> tuple[int, ...]:
        return tuple(value.num_bytes for value in self.inputs)

    @cached_property
    def output_bytes(self) -> tuple[int, ...]:
        return tuple(value.num_bytes for value in self.outputs)

    def without_nodes(self) -> "Program":
        """Returns the program with no link to the graph, which can then be freed."""
        inputs = tuple(Value(v.aval, origin=v.origin) for v in self.inputs)
        outputs = tuple(Value(v.aval) for v in self.outputs)
        return replace(self, inputs=inputs, nodes=(), outputs=outputs)


class Programs(NamedTuple):
    """The programs of each segment, and of results that no segment has."""

    forward: tuple[Program, ...]
    backward: tuple[Program | None, ...]
    free: tuple[Program, ...]


@once
def make_programs(ordered: OrderedProgram, cuts: tuple[int, ...]) -> Programs:
    graph, free, keys = ordered.graph, ordered.free, ordered.keys
    backward_cuts = [int(ordered.backward_cuts[cut]) for cut in cuts]
    segments = [ordered.forward[start:end] for start, end in pairwise(cuts)]
    is_free = free.__contains__
    outputs = [v for v in dict.fromkeys(graph.outputs) if is_free(v.node)]
    free_programs = [program_of("free", [v], keys, is_inside=is_free) for v in outputs]
    wanted = {*graph.outputs, *(v for x in free_programs for v in x.inputs)}

    def make(
        direction: str, k: int, nodes: Sequence[Node], light: Set[Node] = frozenset()
    ) -> Program:
        inside = {*nodes, *light}
        program = program_of(
            direction,
            [v for node in nodes for v in node.outputs if v in wanted],
            keys,
            first=nodes,
            is_inside=lambda node: node in inside or node in free,
            segment=k,
        )
        wanted.update(program.inputs)
        return program

    backward = list[Program | None]()
    for k, segment in enumerate(segments):
        nodes = ordered.backward[backward_cuts[k + 1] : backward_cuts[k]]
        program = make("backward", k, nodes, ordered.light & {*segment})
        backward.append(program if program.outputs else None)
    forward = [make("forward", k, segments[k]) for k in reversed(range(len(segments)))]
    return Programs(tuple(forward[::-1]), tuple(backward), tuple(free_programs))


@once
def sum_program(
    ordered: OrderedProgram, avals: tuple[Any, ...], is_first: bool, count: int | None
) -> Program:
    """Returns the program that adds a micro-batch's gradients to those before it.

        micro-batch 1           gradient                    waits
        micro-batches 2 … k-1   sum + gradient ─► sum       in the sum's memory
        micro-batch k           (sum + gradient) / k        in the gradient's dtype

    It is a program of its own, since XLA may round a sum differently if it computes its
    terms, too. Sums are in float32, or in the gradient's dtype if that is longer; the
    first ones are a micro-batch's gradients. It takes sums, then gradients, and for the
    means the number of micro-batches.
    """
    added = [struct(aval, typed_sharding(aval)) for aval in avals]
    wide = [a.update(dtype=np.promote_types(a.dtype, np.float32)) for a in added]

    def run(
        sums: Sequence[jax.Array], added: Sequence[jax.Array], count: jax.Array | None
    ) -> Iterator[jax.Array]:
        for x, y, to, aval in zip(sums, added, wide, avals, strict=True):
            total = x.astype(to.dtype) + y.astype(to.dtype)
            if count is None:
                yield total
                continue
            # XLA would multiply by the inverse of a divisor that all elements share.
            divisor = jnp.where(jnp.isnan(total), total, count.astype(total.dtype))
            yield jnp.divide(total, divisor).astype(aval.dtype)

    number = None if count is None else jax.ShapeDtypeStruct((), np.int32)
    closed = jax.make_jaxpr(lambda *args: [*run(*args)])(
        added if is_first else wide, added, number
    )
    graph = graph_of(closed)
    if count is not None:
        graph.inputs[-1].origin = Number(count)
    key = ordered.keys.program(graph.inputs, graph.nodes, graph.outputs)
    return Program("sum", -1, graph.inputs, graph.nodes, graph.outputs, key)


def compile_program(
    program: Program,
    donated: Sequence[int] = (),
    inputs: Sequence[Any] = (),
    outputs: Sequence[Any] = (),
    *,
    is_deterministic: bool = True,
    is_run: bool = True,
) -> Any:
    """Compiles a program; blocks.

    Args:
      donated: Numbers of inputs whose memory an output may reuse.
      inputs: Shardings of its inputs; none for one device.
      outputs: Shardings that outputs must have, None where JAX chooses one.
      is_run: Whether it will run; else it is compiled for its memory analysis alone.
    """

    def run(*args: jax.Array) -> list[jax.Array]:
        env: dict[Value, Any] = dict(zip(program.inputs, args, strict=True))
        return evaluate(program.nodes, program.outputs, env)

    run.__name__ = program.name.replace(" ", "_")
    jitted = jax.jit(
        run, donate_argnums=tuple(donated), out_shardings=[*outputs] or None
    )
    pairs = zip(program.inputs, inputs or [None] * len(program.inputs), strict=True)
    traced = jitted.trace(*(struct(value.aval, sharding) for value, sharding in pairs))
    if jax.default_backend() != "cpu":
        options = compat.deterministic_options(is_deterministic)
    else:
        sums = _sums_large_products(traced.jaxpr)
        options = compat.without_library_reductions() if sums else None
        options = options if is_run else {**(options or {}), **_UNOPTIMIZED}
    return compat.compile_lowered(traced.lower(), options)


def _sums_large_products(closed: Any) -> bool:
    # As in the gradient of softmax. XLA's library for CPUs then holds the product in
    # memory of its own.
    products: set[int] = set()
    for eqn in compat.all_equations(closed):
        name, operand = eqn.primitive.name, id(eqn.invars[0]) if eqn.invars else 0
        if name == "reduce_sum" and operand in products:
            return True
        is_product = name == "mul" and all(
            len(x.aval.shape) >= _NUM_AXES and aval_bytes(x.aval) >= _LARGE_BYTES
            for x in eqn.invars
        )
        if is_product or (name == "convert_element_type" and operand in products):
            products.add(id(eqn.outvars[0]))
    return False


def bytes_beside(program: Program, executable: Any) -> int:
    """Returns the memory that a program takes beside its inputs and outputs.

    These are XLA's temporaries, and a TPU's padding of arrays to its tiles.
    """
    memory = executable.memory_analysis()
    if jax.default_backend() == "cpu":
        return memory.temp_size_in_bytes
    # On a mesh, a device's arrays are smaller than the whole.
    padding = max(0, memory.argument_size_in_bytes - sum(program.input_bytes))
    padding += max(0, memory.output_size_in_bytes - sum(program.output_bytes))
    return memory.temp_size_in_bytes + padding


def program_of(
    direction: str,
    outputs: Sequence[Value],
    keys: Keys,
    first: Sequence[Node] = (),
    is_inside: Callable[[Node], bool] = lambda node: True,
    *,
    segment: int = -1,
) -> Program:
    """Returns the program that computes values from results of nodes outside.

    Nodes of `first` come in this order; others come when they are needed.
    """
    needed = ancestors(outputs, is_inside)
    roots = [node for node in first if node in needed]
    roots += [v.node for v in outputs if v.node is not None]
    inputs = {v: None for v in outputs if v.origin is not None}
    order: dict[Node, None] = {}
    stack = roots[::-1]
    while stack:  # each node after those that it needs, in the order of its operands
        node, pending = stack[-1], list[Node]()
        for value in () if node in order else node.inputs:
            if value.constant is not None:
                continue
            if value.node is None or not is_inside(value.node):
                inputs.setdefault(value)
            elif value.node not in order:
                pending.append(value.node)
        if pending:
            stack += reversed(pending)
        else:
            order.setdefault(node)
            stack.pop()
    key = keys.program(tuple(inputs), tuple(order), outputs)
    return Program(direction, segment, (*inputs,), (*order,), (*outputs,), key)
