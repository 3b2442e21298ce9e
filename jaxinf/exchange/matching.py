"""Matches the arrays of a checkpoint with leaves, states and scalars of a store.

A leaf's arrays are found by name: the name ends with the leaf's path. The rest of the
name, its *prefix*, distinguishes the states: the prefix of optax's ``mu`` ends with
``mu``, wherever it is in the optimizer's state.

Invariant: nothing is guessed; every doubt is a line of one error.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxinf.errors import ExchangeError
from jaxinf.exchange.prefixes import (
    is_below,
    join,
    params_prefix,
    prefix_of,
    state_prefixes,
)
from jaxinf.exchange.scalars import find_step, match_scalars
from jaxinf.exchange.sources import SourceArray
from jaxinf.store import (
    MASTER_PARAMS,
    CommitRecord,
    LeafRecord,
    Manifest,
    ScalarState,
    StateRecord,
    dtype_of,
)
from jaxinf.store.names import encode_key

__all__ = ["Match", "MatchOptions", "match"]

_MAX_LINES = 40


@dataclass(frozen=True)
class MatchOptions:
    """The user's options for a checkpoint.

    Attributes:
      names: state → prefix of its arrays in the checkpoint, if names are ambiguous.
      ignored: prefixes of arrays to ignore.
      step: the step to commit, if the checkpoint has none.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    ignored: Sequence[str] = ()
    step: int | None = None


@dataclass(frozen=True)
class Match:
    """The result of a match.

    Attributes:
      arrays: arrays by number of the leaf and name of the state.
      fresh_states: states that the checkpoint lacks; they keep their initial values.
      scalars: the optimizer's scalar state to commit.
      step: the step to commit.
      unused: names of unused arrays.
    """

    arrays: Mapping[tuple[int, str], SourceArray]
    fresh_states: tuple[str, ...]
    scalars: tuple[ScalarState, ...]
    step: int
    unused: tuple[str, ...]


def match(
    manifest: Manifest,
    commit: CommitRecord,
    found: Mapping[str, SourceArray],
    options: MatchOptions,
    *,
    where: str,
) -> Match:
    """Finds every leaf, state and scalar of a store in a checkpoint.

    Args:
      manifest: the store's manifest.
      commit: the record of its step 0, with the scalars.
      found: the checkpoint's arrays by name.
      options: the user's options.
      where: names the checkpoint in messages.

    Raises:
      ExchangeError: arrays are missing, ambiguous or of another shape or dtype; lists
        them all.
      ValueError: an option has an unknown name.
    """
    matcher = _Matcher(manifest, commit, _wanted(found, options), options)
    result = matcher.run()
    if matcher.problems:
        lines = matcher.problems[:_MAX_LINES]
        more = len(matcher.problems) - len(lines)
        shown = "\n  - ".join([*lines, *([f"and {more} more"] if more else [])])
        raise ExchangeError(
            f"{where}: expected every leaf, state and scalar of the store in the "
            f"checkpoint, found:\n  - {shown}\nNothing was written. Give the place of "
            "a state in the checkpoint, ignore arrays, or make the store with the "
            "optimizer and the params of the checkpoint"
        )
    return result


def _wanted(
    found: Mapping[str, SourceArray], options: MatchOptions
) -> dict[str, SourceArray]:
    ignored = [_dotted(prefix) for prefix in options.ignored]
    for prefix in ignored:
        if not any(is_below(name, prefix) for name in found):
            raise ValueError(
                f"ignored {prefix!r}: the checkpoint has no array of that name or "
                f"below it; it has {', '.join(list(found)[:8])}, …"
            )
    return {
        name: array
        for name, array in found.items()
        if not any(is_below(name, prefix) for prefix in ignored)
    }


def _dotted(text: str) -> str:
    """Converts a user's name, with keys joined by ``/`` or ``.``."""
    return text.strip("/.").replace("/", ".")


class _Matcher:
    """Does the work of `match`, and collects problems."""

    def __init__(
        self,
        manifest: Manifest,
        commit: CommitRecord,
        found: Mapping[str, SourceArray],
        options: MatchOptions,
    ) -> None:
        self._leaves = manifest.leaves
        self._states = manifest.state_names
        self._commit = commit
        self._found = found
        self._options = options
        self._names = {state: _dotted(p) for state, p in options.names.items()}
        self._used: set[str] = set()
        self._doubtful: set[tuple[int, str]] = set()
        self.problems: list[str] = []
        for state in self._names:
            if state not in self._states:
                raise ValueError(
                    f"names: the store has no state {state!r}; it has "
                    f"{', '.join(self._states)}"
                )

    def run(self) -> Match:
        dotted = [join(map(encode_key, leaf.path)) for leaf in self._leaves]
        others = [state for state in self._states if state != MASTER_PARAMS]
        prefixes: dict[str, Sequence[str | None]] = {
            state: self._state_prefixes(state, others, dotted) for state in others
        }
        has_states = any(
            p is not None for by_leaf in prefixes.values() for p in by_leaf
        )
        taken = {p for by_leaf in prefixes.values() for p in by_leaf if p is not None}
        fresh = () if has_states else tuple(others)
        if not has_states:
            prefixes = {}
        prefixes[MASTER_PARAMS] = self._params_prefixes(dotted, taken)
        arrays = self._arrays(prefixes, dotted)
        scalars, step = self._scalars(taken, is_fresh=bool(fresh))
        self._check_left_over(dotted)
        unused = tuple(name for name in self._found if name not in self._used)
        return Match(arrays, fresh, scalars, step, unused)

    # --- prefixes ------------------------------------------------------------------

    def _leaves_with(self, state: str) -> list[int]:
        return [
            number
            for number, leaf in enumerate(self._leaves)
            if any(s.name == state for s in leaf.states)
        ]

    def _state_prefixes(
        self, state: str, others: Sequence[str], dotted: Sequence[str]
    ) -> list[str | None]:
        """Returns the prefix of the array of each leaf that has the state."""
        numbers = self._leaves_with(state)
        if state in self._names:
            return [self._names[state]] * len(numbers)
        names = [dotted[number] for number in numbers]
        result = state_prefixes(state, others, names, list(self._found))
        for number, choice in zip(numbers, result, strict=True):
            if len(choice) > 1:
                names = ", ".join(join([p, dotted[number]]) for p in choice)
                self._doubt(number, state, f"could be {names}")
        return [choice[0] if len(choice) == 1 else None for choice in result]

    def _doubt(self, number: int, state: str, text: str) -> None:
        self._doubtful.add((number, state))
        self.problems.append(f"{state} of {_shown(self._leaves[number])}: {text}")

    def _params_prefixes(self, dotted: Sequence[str], taken: set[str]) -> list[str]:
        if MASTER_PARAMS in self._names:
            return [self._names[MASTER_PARAMS]] * len(dotted)
        choice = params_prefix(dotted, taken, list(self._found))
        if len(choice) > 1:
            self.problems.append(
                f"params: could be {', '.join(p or 'the root' for p in choice)}"
            )
        return [choice[0] if choice else ""] * len(dotted)

    # --- arrays --------------------------------------------------------------------

    def _arrays(
        self, prefixes: Mapping[str, Sequence[str | None]], dotted: Sequence[str]
    ) -> dict[tuple[int, str], SourceArray]:
        arrays = {}
        for state, by_leaf in prefixes.items():
            numbers = self._leaves_with(state)
            for number, prefix in zip(numbers, by_leaf, strict=True):
                name = None if prefix is None else join([prefix, dotted[number]])
                array = self._array(number, state, name)
                if array is not None:
                    arrays[number, state] = array
        return arrays

    def _array(self, number: int, state: str, name: str | None) -> SourceArray | None:
        leaf = self._leaves[number]
        record = next(s for s in leaf.states if s.name == state)
        array = self._found.get(name) if name is not None else None
        if array is None:
            if (number, state) not in self._doubtful:
                at = "" if name is None else f" (no {name})"
                self._doubt(number, state, f"missing{at}")
            return None
        self._used.add(array.name)
        if array.shape != leaf.shape:
            text = f"shape {leaf.shape} in the store, {array.shape} in {name}"
            self._doubt(number, state, text)
        elif not _is_exact(array.dtype, record):
            text = f"{record.dtype} in the store, {array.dtype} in {name}"
            self._doubt(number, state, text)
        return array

    def _scalars(
        self, taken: Iterable[str], *, is_fresh: bool
    ) -> tuple[tuple[ScalarState, ...], int]:
        """Returns the scalar state and the step to commit."""
        held = tuple(self._commit.scalar_state)
        if is_fresh:
            return held, self._options.step or 0
        left = {n: a for n, a in self._found.items() if n not in self._used}
        result = match_scalars(held, left, taken, may_lack=len(self._states) == 1)
        step = self._options.step
        if step is None:
            step, name = find_step(left, result.scalars)
            self._used |= {name} if name else set()
        if step is None:
            self.problems.append(
                "step: the checkpoint has neither a step nor a count; say which step "
                "it is of"
            )
        self._used |= result.used
        self.problems += result.problems
        return result.scalars, step or 0

    def _check_left_over(self, dotted: Sequence[str]) -> None:
        """Refuses state of leaves that would be dropped silently."""
        by_name = dict(zip(dotted, self._leaves, strict=True))
        left: dict[str, int] = {}
        for name, array in self._found.items():
            if name in self._used or not array.shape:
                continue
            for leaf_name, leaf in by_name.items():
                prefix = prefix_of(name, leaf_name)
                if prefix is not None and leaf.shape == array.shape:
                    left[prefix] = left.get(prefix, 0) + 1
                    break
        self.problems += [
            f"{prefix or 'the root'}: {count} arrays of the shapes of leaves, for "
            "which the store's optimizer has no state"
            for prefix, count in left.items()
        ]


def _shown(leaf: LeafRecord) -> str:
    return leaf.name or "the params"


def _is_exact(dtype: np.dtype, record: StateRecord) -> bool:
    """Whether the stored dtype represents every value of a dtype."""
    return dtype == dtype_of(record.dtype) or (
        record.dtype == "float32" and dtype.name in ("bfloat16", "float16")
    )
