"""The optimizer's scalar state in a checkpoint: counts, hyperparameters, the step.

Invariant: a scalar is used only if its place is certain and its value fits.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from jaxinf.exchange.prefixes import is_below, join, prefix_of, scalar_keys
from jaxinf.exchange.sources import SourceArray, read_whole
from jaxinf.store import ScalarState

__all__ = ["ScalarMatch", "find_step", "match_scalars"]

_STEP = "step"


@dataclass(frozen=True)
class ScalarMatch:
    """The result of a match.

    Attributes:
      scalars: the scalars to commit.
      used: names of the arrays that they came from.
      problems: doubts, one line each.
    """

    scalars: tuple[ScalarState, ...]
    used: frozenset[str] = frozenset()
    problems: tuple[str, ...] = ()


def match_scalars(
    held: Sequence[ScalarState],
    found: Mapping[str, SourceArray],
    taken: Iterable[str],
    *,
    may_lack: bool,
) -> ScalarMatch:
    """Finds the scalars of a store in a checkpoint, by the ends of their paths.

    Args:
      held: the store's scalars.
      found: arrays without another use, by name.
      taken: prefixes of the optimizer's other state; the scalars are below them, too.
      may_lack: whether the checkpoint may have no scalars at all.
    """
    keys = [scalar_keys(scalar.path) for scalar in held]
    choices = [[n for n in found if prefix_of(n, key) is not None] for key in keys]
    if may_lack and not any(choices):
        return ScalarMatch(tuple(held))
    roots = _common_roots(keys, choices, taken)
    scalars, used, problems = [], set(), []
    for scalar, key, choice in zip(held, keys, choices, strict=True):
        names = [join([roots[0], key])] if len(roots) == 1 else choice
        if len(names) != 1:
            text = f"could be {', '.join(names)}" if names else "missing"
            problems.append(f"scalar {scalar.path}: {text}")
            continue
        array = found[names[0]]
        used.add(array.name)
        value, problem = _read(scalar, array)
        scalars.append(value)
        problems += [problem] if problem else []
    return ScalarMatch(tuple(scalars), frozenset(used), tuple(problems))


def _common_roots(
    keys: Sequence[str], choices: Sequence[Sequence[str]], taken: Iterable[str]
) -> list[str]:
    """Returns prefixes that all scalars have in common.

    If some of them also have the other state below them, only those.
    """
    sets = [
        {p for p in (prefix_of(name, key) for name in names) if p is not None}
        for key, names in zip(keys, choices, strict=True)
    ]
    common = set.intersection(*sets) if sets else set()
    states = list(taken)
    holding = {r for r in common if all(not r or is_below(s, r) for s in states)}
    return sorted(holding or common)


def _read(held: ScalarState, array: SourceArray) -> tuple[ScalarState, str | None]:
    """Returns the value in the store's dtype, and the problem with it, if any."""
    where, wanted = f"scalar {held.path}", held.value
    if array.shape != wanted.shape:
        return held, (
            f"{where}: shape {wanted.shape} in the store, {array.shape} in {array.name}"
        )
    value = read_whole(array)
    cast = value.astype(wanted.dtype)
    is_integer = value.dtype.kind in "iu" and cast.dtype.kind in "iu"
    if value.dtype != cast.dtype and not (is_integer and (value == cast).all()):
        return held, (
            f"{where}: {wanted.dtype} in the store, {value.dtype} in {array.name}"
        )
    return ScalarState(held.path, cast), None


def find_step(
    found: Mapping[str, SourceArray], scalars: Sequence[ScalarState]
) -> tuple[int | None, str | None]:
    """Returns a checkpoint's step, and the name of the array that gives it.

    Args:
      found: arrays that are neither params nor per-leaf state.
      scalars: the optimizer's scalars; without another source, the step is their
        largest count.
    """
    for name in (_STEP, *(n for n in found if n.endswith("." + _STEP))):
        array = found.get(name)
        if array is not None and not array.shape and array.dtype.kind in "iu":
            return int(read_whole(array)), name
    counts = [
        int(s.value)
        for s in scalars
        if s.value.shape == () and s.value.dtype.kind in "iu"
    ]
    return (max(counts), None) if counts else (None, None)
