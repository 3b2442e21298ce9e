"""Programs that add up the gradients of a batch's parts, on the device.

    part 1          gradient                    waits
    parts 2 … k-1   sum + gradient ─► sum       in the sum's memory
    part k          (sum + gradient) / k        the mean, in the gradient's dtype

Invariant: sums are in float32, or in the gradient's dtype if that is longer, and in the
order of parts. They are programs of their own, since XLA may round a sum differently if
it computes its terms, too.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinf.program.graph import Graph, graph_of
from jaxinf.streaming.program.graph import Number, struct
from jaxinf.streaming.program.keys import Keys
from jaxinf.streaming.program.meshes import typed_sharding
from jaxinf.streaming.program.programs import Program, Programs


def sum_programs(
    programs: Programs, graph: Graph, num_parts: int, keys: Keys
) -> Mapping[Program, Sequence[Program]]:
    """Returns, by the program that makes gradients, what adds up those of parts.

    One for each part but the first: it adds gradients to those of the parts before.
    """
    if num_parts == 1:
        return {}

    def made(avals: tuple[Any, ...], *, is_first: bool, is_last: bool) -> Program:
        count = num_parts if is_last else None
        return keys.once(  # other cuts have the same ones
            ("sum", avals, is_first, count),
            lambda: _program(avals, keys, is_first=is_first, count=count),
        )

    gradients, sums = set(graph.gradients.values()), {}
    for program in (*programs.forward, *programs.backward, *programs.free):
        if program is None or gradients.isdisjoint(program.outputs):
            continue
        avals = tuple(v.aval for v in program.outputs if v in gradients)
        sums[program] = tuple(
            made(avals, is_first=part == 1, is_last=part == num_parts - 1)
            for part in range(1, num_parts)
        )
    return sums


def _quotient(total: jax.Array, count: jax.Array) -> jax.Array:
    """Divides an array by a number; XLA would multiply by the number's inverse."""
    each = jnp.where(jnp.isnan(total), total, count.astype(total.dtype))
    return jnp.divide(total, each)


def _program(
    avals: Sequence[Any], keys: Keys, *, is_first: bool, count: int | None
) -> Program:
    """Returns what takes sums, then gradients, and the number of parts at the last.

    Args:
      is_first: Whether the sums are one part's gradients.
      count: Number of parts, for the means; None for sums.
    """
    added = [struct(aval, typed_sharding(aval)) for aval in avals]
    wide = [a.update(dtype=np.promote_types(a.dtype, np.float32)) for a in added]

    def run(
        sums: Sequence[jax.Array], added: Sequence[jax.Array], count: jax.Array | None
    ) -> list[jax.Array]:
        totals = [
            one.astype(aval.dtype) + other.astype(aval.dtype)
            for one, other, aval in zip(sums, added, wide, strict=True)
        ]
        if count is None:
            return totals
        return [
            _quotient(total, count).astype(aval.dtype)
            for total, aval in zip(totals, avals, strict=True)
        ]

    number = None if count is None else jax.ShapeDtypeStruct((), np.int32)
    closed = jax.make_jaxpr(run)(added if is_first else wide, added, number)
    graph = graph_of(closed)
    if count is not None:
        graph.inputs[-1].origin = Number(count)
    key = keys.program(graph.inputs, graph.nodes, graph.outputs)
    return Program("sum", graph.inputs, graph.nodes, graph.outputs, key)
