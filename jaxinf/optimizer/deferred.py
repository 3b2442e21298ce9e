"""`init` on leaves that are read one at a time.

Invariant: a deferred leaf is in memory only while its own state is made, unless the
  optimizer's init needs all its elements in the prologue.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinf.program import InitProgram, LeafInputs
from jaxinf.typing import DeferredArray


def run_prologue(
    program: InitProgram, leaves: Sequence[Any]
) -> tuple[list[jax.Array], list[LeafInputs]]:
    """`InitProgram.prologue`, compiled; reads only the deferred leaves that it needs.

    Args:
      leaves: the params' leaves, deferred or not.
    """
    if not any(isinstance(leaf, DeferredArray) for leaf in leaves):
        return jax.jit(program.prologue)(leaves)
    avals = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
    needed = _needed(program, avals)
    given = {n: np.asarray(leaves[n]) for n in needed}

    def run(given: dict[int, Any]) -> Any:
        # Leaves that are not needed are only shapes, which XLA drops.
        stand_ins = [jnp.zeros(aval.shape, aval.dtype) for aval in avals]
        return program.prologue(
            [given.get(n, other) for n, other in enumerate(stand_ins)]
        )

    return jax.jit(run)(given)


def _needed(program: InitProgram, avals: Sequence[Any]) -> list[int]:
    """Returns numbers of the leaves whose elements the prologue needs."""
    jaxpr = jax.make_jaxpr(program.prologue)(avals).jaxpr
    read = {id(var) for equation in jaxpr.eqns for var in equation.invars}
    read |= {id(var) for var in jaxpr.outvars}
    return [n for n, var in enumerate(jaxpr.invars) if id(var) in read]
