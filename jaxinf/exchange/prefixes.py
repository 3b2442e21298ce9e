"""Names of a checkpoint's arrays, divided into a prefix and a leaf's path.

Invariant: a name is keys joined by ``.``, and whole keys are compared.
"""

import re
from collections.abc import Iterable, Sequence

from jaxinf.store import path_keys

__all__ = [
    "is_below",
    "join",
    "params_prefix",
    "prefix_of",
    "prefixes_of_leaf",
    "scalar_keys",
    "state_prefixes",
]

_OPTIMIZER_KEYS = {"opt_state", "opt_states", "optimizer_state"}
_PARAMS_KEYS = ("params", "model")


def join(keys: Iterable[str]) -> str:
    """Joins keys by ``.``; empty ones are left out."""
    return ".".join(key for key in keys if key)


def is_below(name: str, prefix: str) -> bool:
    """Whether a name begins with the keys of a prefix."""
    return name == prefix or name.startswith(prefix + ".")


def prefix_of(name: str, tail: str) -> str | None:
    """Returns the part of a name before its tail; None if it does not end so."""
    if not tail:
        return name
    if name == tail:
        return ""
    return name.removesuffix("." + tail) if name.endswith("." + tail) else None


def scalar_keys(path: str) -> str:
    """Converts the path of a scalar in a store to keys joined by ``.``."""
    keys = path_keys(path)
    return join(keys[:-1] if keys[-1:] == ("value",) and len(keys) > 1 else keys)


def prefixes_of_leaf(leaf: str, names: Sequence[str]) -> list[str]:
    """Returns the prefix of every array whose name ends with a leaf's."""
    found = (prefix_of(name, leaf) for name in names)
    return [prefix for prefix in found if prefix is not None]


def state_prefixes(
    state: str, states: Sequence[str], leaves: Sequence[str], names: Sequence[str]
) -> list[list[str]]:
    """Returns for each leaf that has a state the possible prefixes of its array.

    Args:
      state: the state's name in the store: that of an optax field, with a number if
        several fields have this name.
      states: all states of the store except the params.
      leaves: names of the leaves that have the state.
      names: names of the checkpoint's arrays.
    """
    base, number = _numbered(state, states)
    known = set(names)
    by_leaf = [
        [p for p in prefixes_of_leaf(leaf, names) if _is_state(p, base)]
        for leaf in leaves
    ]
    common = [
        prefix
        for prefix in dict.fromkeys(p for choice in by_leaf for p in choice)
        if all(join([prefix, leaf]) in known for leaf in leaves)
    ]
    siblings = [s for s in states if _numbered(s, states)[0] == base]
    if len(common) == len(siblings):
        return [[common[number]]] * len(leaves)
    return [common] * len(leaves) if common else by_leaf


def _numbered(state: str, states: Sequence[str]) -> tuple[str, int]:
    """Splits off a state's number: ``mu_1`` is the second ``mu``, if there is one."""
    base, _, number = state.rpartition("_")
    if number.isdigit() and base in states:
        return base, int(number)
    return state, 0


def _is_state(prefix: str, base: str) -> bool:
    """Whether a prefix ends with a state's name, or with its keys joined by ``_``."""
    keys = prefix.split(".")
    tails = ("_".join(keys[start:]) for start in range(len(keys)))
    return any(re.sub(r"[^A-Za-z0-9_]+", "_", tail) == base for tail in tails)


def params_prefix(
    leaves: Sequence[str], taken: set[str], names: Sequence[str]
) -> list[str]:
    """Returns the possible prefixes of the params, or only the likeliest of them.

    Args:
      leaves: names of all leaves.
      taken: prefixes of other states.
      names: names of the checkpoint's arrays.
    """
    counts: dict[str, int] = {}
    for leaf in leaves:
        for prefix in prefixes_of_leaf(leaf, names):
            if prefix not in taken:
                counts[prefix] = counts.get(prefix, 0) + 1
    most = max(counts.values(), default=0)
    candidates = [prefix for prefix, count in counts.items() if count == most]
    outside = [p for p in candidates if not _OPTIMIZER_KEYS.intersection(p.split("."))]
    candidates = outside or candidates
    for key in _PARAMS_KEYS:
        named = [p for p in candidates if p.split(".")[-1] == key]
        if len(candidates) > 1 and len(named) == 1:
            return named
    return candidates
