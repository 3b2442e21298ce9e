"""Traces a loss function together with its gradient, or another function alone.

Invariant: an unsupported function is refused here, before anything is planned or
stored, and the error names what is not supported.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxinf.compat import ClosedJaxpr, all_equations, inner_jaxprs
from jaxinf.errors import StreamError
from jaxinf.program import path_name
from jaxinf.streaming.program.meshes import (
    mesh_in_program,
    mesh_of,
    on_mesh,
    sharding_of,
)
from jaxinf.typing import PyTree


@dataclass(frozen=True, kw_only=True)
class Traced:
    """A traced `value_and_grad`, or another function.

    Attributes:
      params: Abstract values of the params' leaves, on a mesh with shardings.
      batch: The same of the batch's leaves.
      mesh: The devices; None for one.
      consts: The arrays of `closed_over`.
      seed_dtype: Dtype of the loss and its cotangent; None if there is no loss.
    """

    names: tuple[str, ...]
    params: tuple[Any, ...]
    params_tree: Any
    batch: tuple[Any, ...]
    mesh: Mesh | None
    consts: tuple[Any, ...]
    aux_tree: Any
    seed_dtype: Any


def check_params(params: PyTree) -> list[jax.ShapeDtypeStruct]:
    """Returns the leaves of params as abstract values.

    Raises:
      StreamError: A leaf is not an array of floating-point numbers.
    """
    for path, leaf in jax.tree.leaves_with_path(params):
        dtype = leaf.dtype if _is_array(leaf) else type(leaf).__name__
        if not _is_array(leaf) or not jnp.issubdtype(dtype, jnp.floating):
            raise StreamError(
                f"params leaf {path_name(path)}: expected an array of floating-point "
                f"numbers, which have a gradient, found {dtype}; put other values into "
                "the batch, and return new ones as aux, or close over them (Equinox: "
                "equinox.partition(model, equinox.is_inexact_array); NNX: "
                "nnx.split(model, nnx.Param, ...))"
            )
    return jax.tree.leaves(abstract(params))


def abstract(tree: PyTree) -> PyTree:
    """Returns a tree's shapes and dtypes, with shardings of arrays on several devices.

    Raises:
      StreamError: An array is on several devices without a NamedSharding.
    """

    def aval_of(path: tuple[Any, ...], leaf: Any) -> jax.ShapeDtypeStruct:
        if not _is_array(leaf):
            leaf = np.asarray(leaf, jax.dtypes.result_type(leaf))
        sharding = sharding_of(path_name(path, "the array"), leaf)
        if isinstance(leaf, jax.ShapeDtypeStruct) and sharding is leaf.sharding:
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree_util.tree_map_with_path(aval_of, tree)


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def trace(
    fn: Callable[..., Any],
    params: PyTree,
    batch: PyTree,
    *,
    has_loss: bool = True,
    has_aux: bool = False,
) -> tuple[Traced, Any]:
    """Traces `fn(params, batch)`: a loss function and its gradient by params.

    Args:
      fn: Returns a scalar loss; with `has_aux` a pair of it and any pytree; without
        `has_loss` any pytree, and has no gradient.
      params, batch: Trees of arrays or abstract values.

    Returns:
      The traced function, and its jaxpr: from params, batch and seed to loss, aux and
      gradients; of another function from params and batch to aux.

    Raises:
      StreamError: A leaf of params is not a floating array, the loss is not a scalar,
        or the function has side effects.
    """
    leaves, params_tree = check_params(params), jax.tree.structure(params)
    batch_leaves, batch_tree = jax.tree.flatten(abstract(batch))
    mesh = mesh_of(params, batch)

    def flat(params: Sequence[Any], batch: Sequence[Any]) -> Any:
        return fn(params_tree.unflatten(params), batch_tree.unflatten(batch))

    def loss_and_gradients(
        params: Sequence[Any], batch: Sequence[Any], seed: jax.Array
    ) -> tuple[Any, ...]:
        def pair(params: Sequence[Any]) -> tuple[jax.Array, PyTree]:
            return _check_result(flat(params, batch), has_aux)

        value, pull_back, aux = jax.vjp(pair, params, has_aux=True)
        return value, aux, pull_back(seed.astype(value.dtype))

    args, seed_dtype = (on_mesh(leaves, mesh), on_mesh(batch_leaves, mesh)), None
    make = jax.make_jaxpr(loss_and_gradients if has_loss else flat, return_shape=True)

    def make_with_seed(dtype: Any) -> Any:
        return make(*args, *on_mesh([jax.ShapeDtypeStruct((), dtype)], mesh))

    if has_loss:
        closed, (loss, aux, _) = make_with_seed(np.float32)
        if loss.dtype != np.float32:  # again, so that no cotangent is cast
            closed, (loss, aux, _) = make_with_seed(loss.dtype)
        seed_dtype = loss.dtype
    else:
        closed, aux = make(*args)
    mesh = mesh_in_program(closed, mesh)  # the program alone may name one
    check_effects(closed)
    traced = Traced(
        names=tuple(path_name(path) for path, _ in jax.tree.leaves_with_path(params)),
        params=tuple(on_mesh(args[0], mesh)),
        params_tree=params_tree,
        batch=tuple(on_mesh(args[1], mesh)),
        mesh=mesh,
        consts=closed_over(closed),
        aux_tree=jax.tree.structure(aux),
        seed_dtype=seed_dtype,
    )
    return traced, closed


def _check_result(out: Any, has_aux: bool) -> tuple[Any, PyTree]:
    is_pair = isinstance(out, tuple) and len(out) == 2
    if has_aux and not is_pair:
        raise StreamError(
            "the loss function: expected a pair (loss, aux) because of has_aux=True, "
            f"found {_describe(out)}; return the pair, or leave has_aux out"
        )
    result: tuple[Any, PyTree] = out if has_aux else (out, ())
    loss, aux = result
    if isinstance(loss, (int, float)):
        loss = jnp.asarray(loss)
    is_array = hasattr(loss, "shape")
    if not is_array or loss.shape or not jnp.issubdtype(loss.dtype, jnp.floating):
        hint = "take its mean or sum" if is_array else "return its value alone"
        if is_pair and not has_aux:
            hint = "pass has_aux=True if it returns (loss, aux)"
        raise StreamError(
            "the loss function: expected a floating-point scalar, found "
            f"{_describe(loss)}; {hint}"
        )
    return loss, aux


def _describe(out: Any) -> str:
    if not hasattr(out, "shape"):
        return f"a {type(out).__name__}"
    return f"an array of {out.dtype} of shape {out.shape}"


def check_effects(closed: Any, name: str = "the function") -> None:
    """Refuses side effects: StreamError."""
    if not closed.effects:
        return
    names = {
        eqn.primitive.name
        for eqn in all_equations(closed)
        if eqn.effects and not any(i.effects for i in inner_jaxprs(eqn.params))
    }
    raise StreamError(
        f"{name}: expected no side effects, because parts of it run at other times, or "
        f"twice, found {', '.join(sorted(names)) or 'effects'}; remove them, or return "
        "values to print or store as aux (has_aux=True)"
    )


def closed_over(closed: Any) -> tuple[Any, ...]:
    """Returns the arrays that a function, and the functions it calls, close over.

    The innermost come first: kept plans number constants in this order.
    """
    inner = [x for eqn in closed.jaxpr.eqns for x in inner_jaxprs(eqn.params)]
    called = [closed_over(x) for x in inner if isinstance(x, ClosedJaxpr)]
    consts = *chain.from_iterable(called[::-1]), *closed.consts
    return tuple({id(const): const for const in consts}.values())
