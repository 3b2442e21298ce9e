"""Keyword arguments of ``tx.update``, divided into program inputs and fixed values.

Invariant: a program runs only with the kind of arguments with which it was traced.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp


@dataclass(frozen=True, eq=False)
class ExtraArgs:
    """The structure of the extra args; of inputs the shapes, of others the values."""

    treedef: Any
    leaves: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, extra_args: Mapping[str, Any]) -> "ExtraArgs":
        leaves, treedef = jax.tree_util.tree_flatten_with_path(dict(extra_args))
        known = [(p[0].key, _aval(x) if _is_dynamic(x) else x) for p, x in leaves]
        return cls(treedef, tuple(known))

    @property
    def dynamic(self) -> list[tuple[str, jax.ShapeDtypeStruct]]:
        """The inputs' names and shapes."""
        return [pair for pair in self.leaves if _is_input(pair[1])]

    def rebuild(self, dynamic: Sequence[jax.Array]) -> dict[str, Any]:
        values = iter(dynamic)
        leaves = [next(values) if _is_input(x) else x for _, x in self.leaves]
        return self.treedef.unflatten(leaves)

    def dynamic_values(self, extra_args: Mapping[str, Any]) -> list[jax.Array]:
        """Returns the inputs as arrays; refuses other arguments than those traced."""
        leaves, treedef = jax.tree.flatten(dict(extra_args))
        if treedef != self.treedef:
            raise _mismatch(str(self.treedef), str(treedef))
        values = list[jax.Array]()
        for leaf, (_, known) in zip(leaves, self.leaves, strict=True):
            if _is_input(known):
                if not _is_dynamic(leaf) or tuple(jnp.shape(leaf)) != known.shape:
                    raise _mismatch(str(known), repr(leaf))
                values.append(jnp.asarray(leaf).astype(known.dtype))
            elif leaf is not known and (
                type(leaf) is not type(known) or not bool(leaf == known)
            ):
                raise _mismatch(repr(known), repr(leaf))
        return values


def _is_input(known: Any) -> bool:
    return isinstance(known, jax.ShapeDtypeStruct)


def _is_dynamic(leaf: Any) -> bool:
    numbers = (int, float, complex)
    is_number = isinstance(leaf, numbers) and not isinstance(leaf, bool)
    return is_number or (hasattr(leaf, "shape") and hasattr(leaf, "dtype"))


def _aval(leaf: Any) -> jax.ShapeDtypeStruct:
    if hasattr(leaf, "dtype"):
        return jax.ShapeDtypeStruct(tuple(leaf.shape), leaf.dtype)
    array = jax.eval_shape(lambda: jnp.asarray(leaf))
    return jax.ShapeDtypeStruct(array.shape, array.dtype, weak_type=True)


def _mismatch(expected: str, found: str) -> ValueError:
    return ValueError(
        f"extra_args: expected {expected}, as the update was traced, found {found}; "
        "pass the same names, shapes and fixed values at every step"
    )


def told_what_to_give(error: TypeError) -> TypeError:
    """Returns an update's error; if it lacked arguments, with what to give."""
    if "required keyword-only argument" not in str(error):
        return error
    return TypeError(
        f"the optimizer needs more arguments ({error}). Give an example of each to "
        'smart_update or stream, such as extra_args={"value": 0.0}, and its value to '
        "each update, tx.update(grads, state, params, value=…), or step, "
        'step(batch, {"value": …}), where value is the loss by default'
    )
