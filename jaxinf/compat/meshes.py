"""Meshes in use, and computations on several devices, in newer and older JAX.

Invariant: a program gets the same function whether its mesh is known when it is traced
or only when it is compiled.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import mlir
from jax.sharding import AbstractMesh


def call_by_num_devices(
    on_one: Callable[..., Any],
    on_several: Callable[[AbstractMesh], Callable[..., Any]],
    *arguments: Any,
) -> Any:
    """Calls a function for one device, or one for several; traceable.

    A trace does not tell how many devices the computation has. Its compilation does.

    Args:
      on_several: Gives the function for a mesh of all devices; its results are
        replicated over them.
      arguments: Trees of arrays.
    """
    leaves, treedef = jax.tree.flatten(arguments)
    closed, avals = jax.make_jaxpr(on_one, return_shape=True)(*arguments)

    def flat(mesh: AbstractMesh) -> Callable[..., list[Any]]:
        return lambda *xs: jax.tree.leaves(on_several(mesh)(*treedef.unflatten(xs)))

    results = _BY_NUM_DEVICES.bind(*leaves, closed=closed, several=flat)
    return jax.tree.structure(avals).unflatten(results)


def _lower_by_num_devices(
    context: Any, *values: Any, closed: ClosedJaxpr, several: Callable[..., Any]
) -> Any:
    where = context.module_context.axis_context
    num = where.num_devices if hasattr(where, "num_devices") else where.mesh.size
    if num == 1:
        function = jaxpr_as_fun(closed)
    else:
        mesh = jax.sharding.get_abstract_mesh()  # of jax.set_mesh
        if mesh.empty:
            mesh = AbstractMesh((num,), ("devices",))
        function = several(mesh)
    return mlir.lower_fun(function, multiple_results=True)(context, *values)


_BY_NUM_DEVICES = Primitive("by_num_devices")
_BY_NUM_DEVICES.multiple_results = True
_BY_NUM_DEVICES.def_impl(
    lambda *values, **params: jax.jit(lambda *xs: _BY_NUM_DEVICES.bind(*xs, **params))(
        *values
    )
)
_BY_NUM_DEVICES.def_effectful_abstract_eval(
    lambda *_, closed, **__: (list(closed.out_avals), closed.effects)
)
mlir.register_lowering(_BY_NUM_DEVICES, _lower_by_num_devices)


def mesh_in_use() -> Any:
    """Returns the mesh of ``jax.set_mesh``; empty if there is none."""
    if hasattr(jax.sharding, "get_mesh"):
        return jax.sharding.get_mesh()
    from jax._src.mesh import Mesh, get_concrete_mesh  # in JAX 0.8

    return get_concrete_mesh() or Mesh((), ())


def manual_axes() -> dict[str, int]:
    """Returns the axes, with sizes, of the ``pmap`` or ``shard_map`` being traced."""
    mesh = jax.sharding.get_abstract_mesh()
    return {name: mesh.shape[name] for name in getattr(mesh, "manual_axes", ())}
