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
    """The structure of the extra args.

    Attributes:
      static: Per leaf, the fixed value in a 1-tuple; None for an input.
    """

    treedef: Any
    avals: tuple[jax.ShapeDtypeStruct, ...]
    static: tuple[tuple[Any] | None, ...]
    dynamic_names: tuple[str, ...]

    @classmethod
    def of(cls, extra_args: Mapping[str, Any]) -> "ExtraArgs":
        leaves, treedef = jax.tree_util.tree_flatten_with_path(dict(extra_args))
        dynamic = [(path[0].key, leaf) for path, leaf in leaves if _is_dynamic(leaf)]
        return cls(
            treedef,
            tuple(_aval(leaf) for _, leaf in dynamic),
            tuple(None if _is_dynamic(leaf) else (leaf,) for _, leaf in leaves),
            tuple(name for name, _ in dynamic),
        )

    def rebuild(self, dynamic: Sequence[jax.Array]) -> dict[str, Any]:
        values = iter(dynamic)
        leaves = [next(values) if s is None else s[0] for s in self.static]
        return self.treedef.unflatten(leaves)

    def dynamic_values(self, extra_args: Mapping[str, Any]) -> list[jax.Array]:
        """The inputs in `extra_args`, as arrays.

        Raises:
          ValueError: Names, structure, shapes or fixed values are not those traced.
        """
        leaves, treedef = jax.tree.flatten(dict(extra_args))
        if treedef != self.treedef:
            raise _mismatch(str(self.treedef), str(treedef))
        avals, values = iter(self.avals), list[jax.Array]()
        for leaf, static in zip(leaves, self.static, strict=True):
            if static is None:
                aval = next(avals)
                if not _is_dynamic(leaf) or tuple(jnp.shape(leaf)) != aval.shape:
                    raise _mismatch(str(aval), repr(leaf))
                values.append(jnp.asarray(leaf).astype(aval.dtype))
            elif leaf is not static[0] and (
                type(leaf) is not type(static[0]) or not bool(leaf == static[0])
            ):
                raise _mismatch(repr(static[0]), repr(leaf))
        return values


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
