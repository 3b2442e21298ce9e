"""The arguments of `smart_update`, and how a program's arrays enter it.

The optimizer's leaves are the floating-point arrays of the params. Other leaves, and
those for which the program has None instead of a gradient, stay as they are.

Invariant: nothing here changes but the last trace, which is kept for the next call; the
store keeps the data that `init` gets from a run. The host is called once a step, for
one run; a transformation of JAX that would call it more often, or differentiate it, is
refused while it is traced.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding

from jaxinf import compat
from jaxinf.compress import TopK
from jaxinf.engine import (
    Engine,
    StoreDescription,
    check_processes,
    describe_store,
    held_shards,
    keeps_feedback,
    shard_counts,
)
from jaxinf.optimizer.host_side import HostFunctions
from jaxinf.program import (
    Average,
    InitProgram,
    UpdateProgram,
    is_trained,
    keep_trained,
    leaf_infos,
    trace_init,
    trace_update,
)
from jaxinf.typing import PyTree


def align(
    updates: PyTree, params: PyTree
) -> tuple[PyTree, PyTree, Callable[[PyTree], PyTree]]:
    """Lines up gradients and params by the optimizer's leaves.

    None may stand for the gradient of a leaf or of a subtree, which has no update then.

    Returns:
      Gradients, None where there is none, and params, each a tree of the optimizer's
      leaves; and a function that puts updates into the tree of the program's gradients.
    """
    gradients, treedef = jax.tree.flatten(updates, is_leaf=lambda x: x is None)
    pairs = [
        (gradient, jax.tree.leaves(part))
        for gradient, part in _pair_with_params(gradients, treedef, params)
    ]

    def put_back(updates: PyTree) -> PyTree:
        updates = iter(jax.tree.leaves(updates))
        flat = []
        for gradient, leaves in pairs:
            if gradient is None:
                flat.append(None)
            elif leaves and is_trained(leaves[0]):
                flat.append(next(updates))
            else:
                flat.append(jax.tree.map(jnp.zeros_like, leaves[0]))
        return treedef.unflatten(flat)

    trained = keep_trained(params)
    leaves = [g for g, part in pairs for leaf in part if is_trained(leaf)]
    return jax.tree.structure(trained).unflatten(leaves), trained, put_back


def _pair_with_params(
    gradients: Sequence[Any], treedef: Any, params: PyTree
) -> list[tuple[Any, PyTree]]:
    leaves = jax.tree.leaves(params)
    if len(leaves) == len(gradients) and not any(x is None for x in gradients):
        return list(zip(gradients, leaves, strict=True))  # in whatever containers
    pairs = list(zip(gradients, treedef.flatten_up_to(params), strict=True))
    if any(g is not None and not jax.tree_util.all_leaves([p]) for g, p in pairs):
        raise ValueError(
            "update: expected a gradient, or None, for each leaf of the params, found "
            f"gradients of the structure {treedef} and params of "
            f"{jax.tree.structure(params)}"
        )
    return pairs


_Tree = TypeVar("_Tree", bound=PyTree)


def guard_arrays(name: str, tree: _Tree) -> _Tree:
    """Returns the arrays of a call of `name` as ones that ``vmap`` and ``grad`` refuse.

    A ``vmap`` over one run has no effect on them. Traceable.

    Raises:
      ValueError: The call is in ``pmap`` or ``shard_map``. Under ``vmap`` and ``grad``
        JAX raises it when it transforms the computation.
    """
    axes = {axis: size for axis, size in compat.manual_axes().items() if size > 1}
    if axes:
        raise ValueError(
            f"smart_update: {name} is called in jax.pmap or jax.shard_map over "
            f"{axes}, so each device would make a step of its own, and a store makes "
            f"one for all. Call {name} outside, in jax.jit, with params that are "
            "sharded or replicated over the devices (NamedSharding)"
        )
    leaves, treedef = jax.tree.flatten(tree)
    places = [n for n, x in enumerate(leaves) if isinstance(x, compat.Tracer)]
    guarded = _GUARDS[name]([leaves[place] for place in places])
    for place, value in zip(places, guarded, strict=True):
        leaves[place] = value
    return treedef.unflatten(leaves)


def _make_guard(name: str) -> Callable[[list[jax.Array]], list[jax.Array]]:
    """Returns an identity that JAX's transformations refuse; see `guard_arrays`."""

    @jax.custom_batching.custom_vmap
    def guard(values: list[jax.Array]) -> list[jax.Array]:
        return values

    @guard.def_vmap
    def _(num: int, is_mapped: list[list[bool]], values: list[jax.Array]) -> Any:
        if num != 1:
            _refuse(name, num)
        pairs = zip(values, is_mapped[0], strict=True)
        squeezed = [jnp.squeeze(x, 0) if mapped else x for x, mapped in pairs]
        return guard(squeezed), [False] * len(values)

    with_jvp = jax.custom_jvp(guard)
    with_jvp.defjvp(lambda primals, tangents: _refuse(name))
    return with_jvp


def _refuse(name: str, num_examples: int | None = None) -> NoReturn:
    if num_examples is None:
        raise ValueError(
            f"smart_update: {name} is differentiated (jax.grad, jax.jvp, …), and JAX "
            "cannot follow what is computed near storage. Differentiate the loss "
            f"alone, or give {name} what jax.lax.stop_gradient returns"
        )
    raise ValueError(
        f"smart_update: {name} is called in jax.vmap over {num_examples} examples, and "
        "a store has the state of one run. Average the gradients of examples and call "
        f"{name} outside of vmap; train several seeds one after another, each with a "
        "store of its own (a vmap over one seed works)"
    )


_GUARDS = {name: _make_guard(name) for name in ("init", "update")}

OnExisting: TypeAlias = Literal["resume", "restart", "error"]
"""The action of `init` on a store that has steps; see `jaxinf.smart_update`."""

UpdateDtype: TypeAlias = Literal["gradient", "float32"]
"""The dtype of updates of 16-bit params; see `jaxinf.smart_update`."""


@dataclass(frozen=True, eq=False)
class OffloadedOptimizer:
    """An optimizer and the store of its state.

    Attributes:
      given_shardings: The caller's shardings of the params' leaves; may be empty.
      example_args: Examples of extra arguments of the optimizer's update.
    """

    tx: optax.GradientTransformationExtraArgs
    host: HostFunctions
    compression: TopK | None
    given_shardings: tuple[NamedSharding, ...]
    example_args: Mapping[str, Any]
    on_existing: OnExisting
    updates: UpdateDtype
    average: Average | None
    _last_trace: list[Any] = field(default_factory=list)

    @property
    def engine(self) -> Engine:
        return self.host.engine

    @property
    def has_feedback(self) -> bool:
        return keeps_feedback(self.compression)

    @property
    def shardings(self) -> tuple[NamedSharding, ...]:
        """Shardings of the params' leaves, on one mesh; empty if they are not known.

        They are the caller's, or those of the params in the last `init` on the store.
        """
        return self.given_shardings or self.engine.shardings

    def update_dtype(self, gradient: jax.Array | None, params: jax.Array) -> np.dtype:
        """Returns the dtype of the update of a leaf whose params have 16 bits."""
        if self.updates == "float32" or gradient is None:
            return np.dtype(np.float32)
        is_same = gradient.dtype == params.dtype
        return gradient.dtype if is_same else np.dtype(np.float32)

    def check(self) -> None:
        if self.engine.health.error is not None:  # a closed store is refused elsewhere
            self.engine.health.raise_to_program()

    def trace(
        self,
        params: PyTree,
        extra_args: Mapping[str, Any],
        shardings: tuple[NamedSharding, ...],
    ) -> tuple[InitProgram, UpdateProgram, StoreDescription]:
        """Divides the optimizer between JAX and the store, and describes the store.

        Raises:
          DeviceConfigurationError: The mesh is not one of all processes of the run.
        """
        init, update = self._trace_programs(params, extra_args)
        group = self.engine.group
        check_processes(group, shardings[0].mesh if shardings else None)
        shapes = [leaf.info.shape for leaf in update.leaves]
        pairs = [*zip(shardings or [None] * len(shapes), shapes, strict=True)]
        description = describe_store(
            update,
            init,
            [shard_counts(*pair) for pair in pairs],
            shards=() if group.is_alone else [held_shards(*pair) for pair in pairs],
            average=self.average,
            compression=self.compression,
        )
        return init, update, description

    def _trace_programs(
        self, params: PyTree, extra_args: Mapping[str, Any]
    ) -> tuple[InitProgram, UpdateProgram]:
        # A trace takes as long as optax's, so init's serves the first update, too.
        leaf_infos(params)
        leaves, treedef = jax.tree.flatten(params)
        avals = [(leaf.shape, leaf.dtype) for leaf in leaves]
        key = [treedef, avals, compat.trace_context()]
        if not extra_args and self._last_trace[:3] == key:
            return self._last_trace[3]
        update = trace_update(self.tx, params, extra_args, may_read="sums")
        programs = trace_init(self.tx, params), update
        if not extra_args:
            self._last_trace[:] = [*key, programs]
        return programs

    def check_shards(
        self, description: StoreDescription, shardings: Sequence[NamedSharding]
    ) -> None:
        """Refuses shards that cross the chunks of the store."""
        leaves = zip(description.leaves, shardings, strict=bool(shardings))
        for number, (leaf, sharding) in enumerate(leaves):
            local = sharding.shard_shape(leaf.record.shape)
            for place in np.ndindex(*shard_counts(sharding, leaf.record.shape)):
                origin = [n * extent for n, extent in zip(place, local, strict=True)]
                self.engine.files.subgroups.chunks_of(number, origin, local)
