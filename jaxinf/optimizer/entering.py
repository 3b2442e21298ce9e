"""The way of a program's arrays into `init` and `update`.

Invariant: the host is called once a step, for one run; a transformation of JAX that
would call it more often, or differentiate it, is refused while it is traced.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import NoReturn, TypeVar

import jax

from jaxinf import compat
from jaxinf.typing import PyTree

_Tree = TypeVar("_Tree", bound=PyTree)


def entering(what: str, tree: _Tree) -> _Tree:
    """Returns the arrays that enter `init` or `update`; traceable.

    A ``vmap`` over one run has no effect on what is done with them.

    Args:
      what: ``"init"`` or ``"update"``.
      tree: every array that is used; other leaves stay as they are.

    Raises:
      ValueError: `what` is called in ``pmap`` or ``shard_map``. Under ``vmap`` and
        ``grad`` JAX raises it when it transforms the computation.
    """
    axes = {name: size for name, size in compat.manual_axes().items() if size > 1}
    if axes:
        raise ValueError(
            f"smart_update: {what} is called in jax.pmap or jax.shard_map over "
            f"{axes}, so each device would make a step of its own, and a store makes "
            f"one for all. Call {what} outside, in jax.jit, with params that are "
            "sharded or replicated over the devices (NamedSharding)"
        )
    leaves, treedef = jax.tree.flatten(tree)
    places = [n for n, x in enumerate(leaves) if isinstance(x, compat.Tracer)]
    entered = compat.without_examples(
        [leaves[place] for place in places],
        refuse_examples=_refusal_of_examples(what),
        refuse_derivative=_refusal_of_derivatives(what),
    )
    for place, value in zip(places, entered, strict=True):
        leaves[place] = value
    return treedef.unflatten(leaves)


@lru_cache
def _refusal_of_examples(what: str) -> Callable[[int], NoReturn]:
    def refuse(num: int) -> NoReturn:
        raise ValueError(
            f"smart_update: {what} is called in jax.vmap over {num} examples, and a "
            "store has the state of one run. Average the gradients of examples and "
            f"call {what} outside of vmap; train several seeds one after another, each "
            "with a store of its own (a vmap over one seed works)"
        )

    return refuse


@lru_cache
def _refusal_of_derivatives(what: str) -> Callable[[], NoReturn]:
    def refuse() -> NoReturn:
        raise ValueError(
            f"smart_update: {what} is differentiated (jax.grad, jax.jvp, …), and JAX "
            "cannot follow what is computed near storage. Differentiate the loss "
            f"alone, or give {what} what jax.lax.stop_gradient returns"
        )

    return refuse
