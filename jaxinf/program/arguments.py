"""Keyword arguments of ``tx.update``, divided into program inputs and fixed values.

Invariant: a program runs only with arguments like those of its trace.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp


@dataclass(frozen=True, eq=False)
class ExtraArgs:
    """The extra args of a trace: names, with avals of inputs and other values."""

    treedef: Any
    leaves: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, extra_args: Mapping[str, Any]) -> "ExtraArgs":
        leaves, treedef = jax.tree_util.tree_flatten_with_path(dict(extra_args))
        return cls(treedef, tuple((path[0].key, _input_aval(x)) for path, x in leaves))

    @property
    def inputs(self) -> list[tuple[str, jax.ShapeDtypeStruct]]:
        return [pair for pair in self.leaves if isinstance(pair[1], _Aval)]

    def rebuild(self, inputs: Sequence[jax.Array]) -> dict[str, Any]:
        values = iter(inputs)
        leaves = [next(values) if isinstance(x, _Aval) else x for _, x in self.leaves]
        return self.treedef.unflatten(leaves)

    def input_values(self, extra_args: Mapping[str, Any]) -> list[jax.Array]:
        """Returns the inputs as arrays; refuses other arguments than those traced."""
        leaves, treedef = jax.tree.flatten(dict(extra_args))
        if treedef != self.treedef:
            raise _mismatch(str(self.treedef), str(treedef))
        values = list[jax.Array]()
        for leaf, (_, traced) in zip(leaves, self.leaves, strict=True):
            if isinstance(traced, _Aval):
                if getattr(_input_aval(leaf), "shape", None) != traced.shape:
                    raise _mismatch(str(traced), repr(leaf))
                values.append(jnp.asarray(leaf).astype(traced.dtype))
            elif leaf is not traced and (
                type(leaf) is not type(traced) or not bool(leaf == traced)
            ):
                raise _mismatch(repr(traced), repr(leaf))
        return values


_Aval = jax.ShapeDtypeStruct


def _input_aval(leaf: Any) -> Any:
    """Returns the aval of an array or a number; other leaves as they are."""
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return _Aval(tuple(leaf.shape), leaf.dtype)
    is_number = isinstance(leaf, int | float | complex) and not isinstance(leaf, bool)
    return _Aval((), jnp.result_type(leaf), weak_type=True) if is_number else leaf


def _mismatch(expected: str, found: str) -> ValueError:
    return ValueError(
        f"extra_args: expected {expected}, as the update was traced, found {found}; "
        "pass the same names, shapes and fixed values at every step"
    )


def with_missing_arguments(error: TypeError) -> TypeError:
    """Adds to an update's error how to give the arguments that it lacks."""
    if "required keyword-only argument" not in str(error):
        return error
    return TypeError(
        f"the optimizer needs more arguments ({error}). Give an example of each to "
        'smart_update or stream, such as extra_args={"value": 0.0}, and its value to '
        "each update, tx.update(grads, state, params, value=…), or step, "
        'step(batch, {"value": …}), where value is the loss by default'
    )
