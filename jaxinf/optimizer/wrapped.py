"""The arguments of `smart_update`, and the way of a program's arrays into it.

The optimizer's leaves are the floating-point arrays of the params. A leaf for which the
program has None instead of a gradient stays as it is, and so do others.

Invariant: nothing here changes but the last trace, which is kept for the next call; the
store keeps the data that `init` gets from a run.
The host is called once a step, for one run; a transformation of JAX that would call it
more often, or differentiate it, is refused while it is traced.
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
    flat, treedef = jax.tree.flatten(updates, is_leaf=lambda x: x is None)
    pairs = _pairs(flat, treedef, params)
    parts = [(g, jax.tree.leaves(part)) for g, part in pairs]

    def put_back(made: PyTree) -> PyTree:
        updates = iter(jax.tree.leaves(made))
        found = []
        for gradient, leaves in parts:
            if gradient is None:
                found.append(None)
            elif leaves and is_trained(leaves[0]):
                found.append(next(updates))
            else:
                found.append(jax.tree.map(jnp.zeros_like, leaves[0]))
        return treedef.unflatten(found)

    known = keep_trained(params)
    leaves = [g for g, part in parts for leaf in part if is_trained(leaf)]
    return jax.tree.structure(known).unflatten(leaves), known, put_back


def _pairs(
    flat: Sequence[Any], treedef: Any, params: PyTree
) -> list[tuple[Any, PyTree]]:
    """Pairs each gradient with the part of the params that has its place."""
    leaves = jax.tree.leaves(params)
    if len(leaves) == len(flat) and not any(x is None for x in flat):
        return list(zip(flat, leaves, strict=True))  # whatever contains them
    pairs = list(zip(flat, treedef.flatten_up_to(params), strict=True))
    if any(g is not None and not jax.tree_util.all_leaves([p]) for g, p in pairs):
        raise ValueError(
            "update: expected a gradient, or None, for each leaf of the params, found "
            f"gradients of the structure {treedef} and params of "
            f"{jax.tree.structure(params)}"
        )
    return pairs


_Tree = TypeVar("_Tree", bound=PyTree)


def entering(what: str, tree: _Tree) -> _Tree:
    """Returns the arrays that enter `init` or `update`; traceable.

    A ``vmap`` over one run has no effect on what is done with them.

    Raises:
      ValueError: `what` is called in ``pmap`` or ``shard_map``. Under ``vmap`` and
        ``grad`` JAX raises it when it transforms the computation.
    """
    axes = {name: size for name, size in compat.manual_axes().items() if size > 1}
    if axes:
        raise ValueError(
            f"smart_update: {what} is called in jax.pmap or jax.shard_map over "
            f"{axes}, so each device would make a step of its own, and a store makes "
            f"one for all. Call {what} outside, in jax.jit, with params that are "
            "sharded or replicated over the devices (NamedSharding)"
        )
    leaves, treedef = jax.tree.flatten(tree)
    places = [n for n, x in enumerate(leaves) if isinstance(x, compat.Tracer)]
    entered = _OF_ONE_RUN[what]([leaves[place] for place in places])
    for place, value in zip(places, entered, strict=True):
        leaves[place] = value
    return treedef.unflatten(leaves)


def _of_one_run(what: str) -> Callable[[list[jax.Array]], list[jax.Array]]:
    """Returns a function that returns arrays as they are; see `entering`."""

    @jax.custom_batching.custom_vmap
    def alone(values: list[jax.Array]) -> list[jax.Array]:
        return values

    @alone.def_vmap
    def _(num: int, is_mapped: list[list[bool]], values: list[jax.Array]) -> Any:
        if num != 1:
            _refuse(what, num)
        pairs = zip(values, is_mapped[0], strict=True)
        squeezed = [jnp.squeeze(x, 0) if mapped else x for x, mapped in pairs]
        return alone(squeezed), [False] * len(values)

    differentiated = jax.custom_jvp(alone)
    differentiated.defjvp(lambda primals, tangents: _refuse(what))
    return differentiated


def _refuse(what: str, num_examples: int | None = None) -> NoReturn:
    if num_examples is None:
        raise ValueError(
            f"smart_update: {what} is differentiated (jax.grad, jax.jvp, …), and JAX "
            "cannot follow what is computed near storage. Differentiate the loss "
            f"alone, or give {what} what jax.lax.stop_gradient returns"
        )
    raise ValueError(
        f"smart_update: {what} is called in jax.vmap over {num_examples} examples, and "
        "a store has the state of one run. Average the gradients of examples and call "
        f"{what} outside of vmap; train several seeds one after another, each with a "
        "store of its own (a vmap over one seed works)"
    )


_OF_ONE_RUN = {what: _of_one_run(what) for what in ("init", "update")}


OnExisting: TypeAlias = Literal["resume", "restart", "error"]
"""The action of `init` on a store that has steps; see `jaxinf.smart_update`."""

UpdateDtype: TypeAlias = Literal["gradient", "float32"]
"""The dtype of updates of 16-bit params; see `jaxinf.smart_update`."""


@dataclass(frozen=True, eq=False)
class OffloadedOptimizer:
    """An optimizer and the store of its state.

    Attributes:
      compression: compression of its gradients; None for dense ones.
      given_shardings: shardings of the params' leaves from the caller; may be empty.
      example_args: examples of other arguments of the optimizer's update.
      on_existing: the action of `init` on a store that has steps.
      updates: the dtype of updates of 16-bit params.
    """

    tx: optax.GradientTransformationExtraArgs
    host: HostFunctions
    compression: TopK | None
    given_shardings: tuple[NamedSharding, ...]
    example_args: Mapping[str, Any]
    on_existing: OnExisting = "resume"
    updates: UpdateDtype = "gradient"
    average: Average | None = None
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
        """Returns the dtype of a leaf's update, if its params are of 16 bits."""
        if self.updates == "float32" or gradient is None:
            return np.dtype(np.float32)
        is_own = gradient.dtype == params.dtype
        return gradient.dtype if is_own else np.dtype(np.float32)

    def check(self) -> None:
        """Raises the exception that stopped the store, if any."""
        if self.engine.health.error is not None:
            self.engine.health.raise_to_program()

    def trace(
        self, params: PyTree, extra_args: Mapping[str, Any]
    ) -> tuple[InitProgram, UpdateProgram]:
        """Traces the optimizer and divides it between JAX and the store.

        A trace takes as long as optax's, so that of `init` serves the first update.
        """
        leaf_infos(params)
        leaves, treedef = jax.tree.flatten(params)
        avals = [(leaf.shape, leaf.dtype) for leaf in leaves]
        key = [treedef, avals, compat.trace_context()]
        if not extra_args and self._last_trace[:3] == key:
            return self._last_trace[3]
        update = trace_update(self.tx, params, extra_args, may_read="sums")
        traced = trace_init(self.tx, params), update
        if not extra_args:
            self._last_trace[:] = [*key, traced]
        return traced

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

    def describe(
        self,
        init: InitProgram,
        update: UpdateProgram,
        shardings: tuple[NamedSharding, ...],
    ) -> StoreDescription:
        """Describes the store that the optimizer needs.

        Raises:
          DeviceConfigurationError: the mesh is not one of all processes of the run.
        """
        group = self.engine.group
        check_processes(group, shardings[0].mesh if shardings else None)
        places = shardings or [None] * len(update.leaves)
        pairs = [
            (sharding, leaf.info.shape)
            for sharding, leaf in zip(places, update.leaves, strict=True)
        ]
        return describe_store(
            update,
            init,
            [shard_counts(*pair) for pair in pairs],
            shards=() if group.is_alone else [held_shards(*pair) for pair in pairs],
            average=self.average,
            compression=self.compression,
        )
