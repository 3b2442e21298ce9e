"""An optimizer as streaming needs it: traced, in passes over gradients.

Invariant: what is refused is refused before a store is made or changed.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import optax

from jaxinf.errors import UnsupportedTransformError
from jaxinf.program import Passes, UpdateProgram, missing_arguments, trace_update
from jaxinf.streaming.program.graph import Piece
from jaxinf.typing import PyTree

LATE = frozenset({"value"})
"""Arguments of an optimizer's update that are known after the first pass: the loss."""


def trace_optimizer(
    tx: optax.GradientTransformation,
    params: PyTree,
    extra_args: Mapping[str, Any] | None = None,
) -> UpdateProgram:
    """Traces an optimizer; nothing is computed.

    Raises:
      UnsupportedTransformError: Its updates cannot be made leaf by leaf.
      TypeError: Its update needs arguments that are not given.
    """
    try:
        return trace_update(
            tx, params, extra_args, may_recall=True, may_recall_all=True
        )
    except TypeError as error:
        names = missing_arguments(error)
        if not names:
            raise
        examples = ", ".join(f'"{name}": 0.0' for name in names)
        raise TypeError(
            f"jaxinf.stream: the optimizer's update needs {', '.join(names)} ({error})."
            f" Give examples: jaxinf.stream(…, extra_args={{{examples}}}); a step's "
            "own values are step(batch, {…}), and value is its loss by default"
        ) from None


def passes_for(
    program: UpdateProgram, pieces: Iterable[Piece] = (), *, is_alone: bool = True
) -> Passes:
    """Returns an optimizer's passes over gradients.

    Args:
      program: The optimizer.
      pieces: The parts of params whose gradients arrive; by default whole leaves.
      is_alone: Whether the process has all chunks of the store.

    Raises:
      UnsupportedTransformError: It needs too much of all leaves, or too many passes;
        or it needs whole leaves, of which other processes have chunks.
    """
    sliced: Set[int] = {piece.leaf for piece in pieces if piece.index}
    passes = program.passes(sliced=sliced, late=LATE)
    if not is_alone:
        _check_chunks_suffice(program, passes)
    return passes


def _check_chunks_suffice(program: UpdateProgram, passes: Passes) -> None:
    """Refuses parts that read a leaf's params or state beside its gradient."""
    stored = {*passes.params, *passes.recalled}
    for number, leaf in enumerate(program.leaves):
        parts = (passes.part(n, number) for n in range(passes.num_passes))
        if any(stored.intersection(part.own) for part in parts if part is not None):
            raise UnsupportedTransformError(
                "jaxinf.stream: expected an optimizer that computes nothing of whole "
                "params or states in a run of several processes, found one that does "
                f"for {leaf.info.name}, as for a trust ratio; use jaxinf.smart_update, "
                "or one process"
            )


def arrivals_of(
    pieces: Iterable[Piece],
    shapes: Sequence[tuple[int, ...]],
    whole: Set[int],
) -> Mapping[int, list[tuple[int, ...]]]:
    """Returns the shapes in which each leaf's gradients are given to the passes."""
    found: dict[int, list[tuple[int, ...]]] = {}
    for piece in pieces:
        shape, depth = shapes[piece.leaf], len(piece.index)
        if piece.leaf not in whole:
            shape = (*(1,) * depth, *shape[depth:])
        found.setdefault(piece.leaf, []).append(shape)
    return found
