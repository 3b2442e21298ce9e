"""Segments as programs: the nodes, inputs and outputs of each, and its compilation.

Invariant: a program has the nodes of its own segment, the free nodes that they need,
and, in backward, the cheap forward nodes of the segment. All other values are inputs.
Options of compilation depend on the program and on JAX alone, not on a policy or a
budget, so all plans that run a program run it with the same bits.
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
from jaxinf.program import Node, Value, ancestors, evaluate, graph_of
from jaxinf.streaming.program.graph import Number, Piece, aval_bytes
from jaxinf.streaming.program.keys import Keys
from jaxinf.streaming.program.lifetimes import OrderedProgram, once
from jaxinf.streaming.program.meshes import struct, typed_sharding

# glibc keeps smaller blocks anyway, so a plan is not exact to within their size.
_LARGE_BYTES = 32 << 20
# The product of arrays with fewer axes is summed in tiles, and takes no memory
# (docs/decisions.md, "Sums of large products").
_NUM_AXES = 4
# Machine code in less time, for arrays in the same memory.
_UNOPTIMIZED = {"xla_backend_optimization_level": 0}


@dataclass(frozen=True, eq=False)
class Program:
    """One function that is compiled and called.

    Attributes:
      direction: "forward" or "backward", or what else it is for: "sum" adds up
        gradients of parts, and "free" makes results that no segment makes.
      segment: Number of its segment; -1 for none.
      inputs: Values that it reads: params, batch, other programs' outputs.
      nodes: Nodes in order; none in a program `without_nodes`.
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
        """The parts of params that it reads, in the order of its inputs, and bytes."""
        own = (v for v in self.inputs if isinstance(v.origin, Piece))
        return tuple((value.origin, value.num_bytes) for value in own)

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
    """The programs of segments.

    Attributes:
      backward: One for each segment; None for a segment without backward nodes.
      free: Programs of results and gradients that no segment makes.
    """

    forward: tuple[Program, ...]
    backward: tuple[Program | None, ...]
    free: tuple[Program, ...]


@once
def make_programs(ready: OrderedProgram, cuts: tuple[int, ...]) -> Programs:
    """Makes the programs of the segments between `cuts`."""
    graph, free, keys = ready.graph, ready.free, ready.keys
    back = [int(ready.backward_cuts[cut]) for cut in cuts]
    segments = [ready.forward[start:end] for start, end in pairwise(cuts)]
    made = [v for v in dict.fromkeys(graph.outputs) if v.node in free]
    alone = [program_of("free", [v], keys, is_own=free.__contains__) for v in made]
    wanted = {*graph.outputs, *(v for program in alone for v in program.inputs)}

    def make(
        direction: str, k: int, nodes: Sequence[Node], light: Set[Node] = frozenset()
    ) -> Program:
        own = {*nodes, *light}
        program = program_of(
            direction,
            [v for node in nodes for v in node.outputs if v in wanted],
            keys,
            first=nodes,
            is_own=lambda node: node in own or node in free,
            segment=k,
        )
        wanted.update(program.inputs)
        return program

    backward = list[Program | None]()
    for k, segment in enumerate(segments):
        nodes, light = ready.backward[back[k + 1] : back[k]], ready.light & {*segment}
        program = make("backward", k, nodes, light)
        backward.append(program if program.outputs else None)
    forward = [make("forward", k, segments[k]) for k in reversed(range(len(segments)))]
    return Programs(tuple(forward[::-1]), tuple(backward), tuple(alone))


@once
def sum_program(
    ready: OrderedProgram, avals: tuple[Any, ...], is_first: bool, count: int | None
) -> Program:
    """Returns what adds the gradients of a part to those before it.

        part 1          gradient                    waits
        parts 2 … k-1   sum + gradient ─► sum       in the sum's memory
        part k          (sum + gradient) / k        the mean, in the gradient's dtype

    It is a program of its own, since XLA may round a sum differently if it computes its
    terms, too. Sums are in float32, or in the gradient's dtype if that is longer. It
    takes sums, then gradients, and the number of parts at the last.

    Args:
      avals: Types of the gradients.
      is_first: Whether the sums are one part's gradients.
      count: Number of parts, for the means; None for sums.
    """
    added = [struct(aval, typed_sharding(aval)) for aval in avals]
    wide = [a.update(dtype=np.promote_types(a.dtype, np.float32)) for a in added]

    def run(
        sums: Sequence[jax.Array], added: Sequence[jax.Array], count: jax.Array | None
    ) -> Iterator[jax.Array]:
        for one, other, to, aval in zip(sums, added, wide, avals, strict=True):
            total = one.astype(to.dtype) + other.astype(to.dtype)
            if count is None:
                yield total
                continue
            # XLA would multiply by the inverse of a number that is the same for all.
            each = jnp.where(jnp.isnan(total), total, count.astype(total.dtype))
            yield jnp.divide(total, each).astype(aval.dtype)

    number = None if count is None else jax.ShapeDtypeStruct((), np.int32)
    closed = jax.make_jaxpr(lambda *args: [*run(*args)])(
        added if is_first else wide, added, number
    )
    graph = graph_of(closed)
    if count is not None:
        graph.inputs[-1].origin = Number(count)
    key = ready.keys.program(graph.inputs, graph.nodes, graph.outputs)
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
    """Compiles `program`; blocks.

    Args:
      donated: Inputs whose memory an output may reuse.
      inputs: Shardings of its inputs; none for one device.
      outputs: Shardings that outputs must have, None where JAX chooses one.
      is_run: Whether it is compiled to run, not only for the memory that it takes.
    """

    def run(*args: jax.Array) -> list[jax.Array]:
        env: dict[Value, Any] = dict(zip(program.inputs, args, strict=True))
        return evaluate(program.nodes, program.outputs, env)

    run.__name__ = program.name.replace(" ", "_")
    jitted = jax.jit(
        run, donate_argnums=tuple(donated), out_shardings=[*outputs] or None
    )
    pairs = zip(program.inputs, inputs or [None] * len(program.inputs), strict=True)
    traced = jitted.trace(*(struct(value.aval, own) for value, own in pairs))
    if jax.default_backend() != "cpu":
        options = compat.deterministic_options(is_deterministic)
    else:
        sums = _sums_large_products(traced.jaxpr)
        options = compat.without_library_reductions() if sums else None
        options = options if is_run else {**(options or {}), **_UNOPTIMIZED}
    return compat.compile_lowered(traced.lower(), options)


def _sums_large_products(closed: Any) -> bool:
    """Whether two large arrays are multiplied and the product summed, as in softmax's
    backward part; XLA's library on a CPU then holds the product in its own memory."""
    products: set[int] = set()
    for eqn in compat.all_equations(closed):
        name, operand = eqn.primitive.name, id(eqn.invars[0]) if eqn.invars else 0
        if name == "reduce_sum" and operand in products:
            return True
        is_product = name == "mul" and all(_is_large(x.aval) for x in eqn.invars)
        if is_product or (name == "convert_element_type" and operand in products):
            products.add(id(eqn.outvars[0]))
    return False


def _is_large(aval: Any) -> bool:
    return len(aval.shape) >= _NUM_AXES and aval_bytes(aval) >= _LARGE_BYTES


def bytes_beside(program: Program, executable: Any) -> int:
    """Returns the memory that a program takes beside its inputs and outputs.

    Temporaries, as XLA reports them; and what a TPU adds to arrays to fill its tiles.
    """
    memory = executable.memory_analysis()
    if jax.default_backend() == "cpu":
        return memory.temp_size_in_bytes
    padding = (
        memory.argument_size_in_bytes - sum(program.input_bytes),
        memory.output_size_in_bytes - sum(program.output_bytes),
    )
    # Of a mesh's device these are parts of the arrays.
    return memory.temp_size_in_bytes + sum(max(0, one) for one in padding)


def program_of(
    direction: str,
    outputs: Sequence[Value],
    keys: Keys,
    first: Sequence[Node] = (),
    is_own: Callable[[Node], bool] = lambda node: True,
    *,
    segment: int = -1,
) -> Program:
    """Returns the program of `outputs`.

    Args:
      first: Nodes that come in this order; others come when they are needed.
      is_own: Whether a node is computed here; results of others are inputs.
    """
    needed = ancestors(outputs, is_own)
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
            if value.node is None or not is_own(value.node):
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
