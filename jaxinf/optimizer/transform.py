"""`smart_update`: an optax transformation whose state and update live on storage.

    prologue (jitted JAX): scalars ─┐
    gradient leaf ──────────────────┼─► host callback ─► CSD: read ► update ► write
    update u, or new 16-bit params ◄┘          all leaves ─► one commit

Invariant: the store advances by exactly one committed step for each update that is not
refused; the update returned is the very value that was added to the master params.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding

from jaxinf import compat
from jaxinf.compress import TopK
from jaxinf.csd import ScalarInputs
from jaxinf.engine import LeafDescription, Store, StoreDescription, open_store
from jaxinf.errors import StaleStateError
from jaxinf.optimizer.callback import (
    Host,
    call_on_shards,
    call_once,
    check_device_configuration,
)
from jaxinf.optimizer.host_side import (
    COMMITTED,
    FAILED,
    SKIPPED,
    HostSide,
    NonFinitePolicy,
)
from jaxinf.optimizer.leaf_updates import LeafUpdates
from jaxinf.optimizer.sending import Sending
from jaxinf.optimizer.sharding import distinct_shards, on_one_mesh, shard_counts
from jaxinf.program import InitProgram, UpdateProgram, trace_init, trace_update
from jaxinf.store import ERROR_FEEDBACK, MASTER_PARAMS, StateRecord
from jaxinf.typing import PathLikeStr, PyTree

__all__ = ["SmartUpdateState", "Stored", "smart_update"]

_Initialised: TypeAlias = tuple[Sequence[jax.Array], Sequence[Any], list[jax.Array]]
"""Initial scalar state, what the store holds of it, error feedback."""


class Stored(NamedTuple):
    """Stands in the transform's state where optax has an array that is on storage."""


class SmartUpdateState(NamedTuple):
    """State of `smart_update`: what is not on storage.

    Attributes:
      step: int32, the store's committed step that this state belongs to.
      skipped_steps: int32, steps skipped for a non-finite gradient.
      optimizer: optax's own state, with `Stored` in the place of each stored array;
        counts and hyperparameters are there to read (and hyperparameters to set).
      error_feedback: float32, a tree like the params: what compression has left out of
        the gradients so far; empty without error feedback.
    """

    step: jax.Array
    skipped_steps: jax.Array
    optimizer: PyTree
    error_feedback: PyTree = ()


def smart_update(
    tx: optax.GradientTransformation | optax.MultiSteps,
    store: Store | PathLikeStr,
    *,
    compress: TopK | None = None,
    nonfinite: NonFinitePolicy = "error",
    shardings: PyTree | None = None,
    extra_args: Mapping[str, Any] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optax optimizer so that its state lives in a store on drives.

    Use it as any optax transformation: under ``jit``, in ``lax.scan``, in Flax's
    ``nnx.Optimizer`` and ``TrainState``, last in an ``optax.chain``. Each update is one
    durable step of the store. Gradient accumulation goes inside:
    ``smart_update(optax.MultiSteps(tx, k), store)``.

    Args:
      tx: any transformation that is elementwise over its stored state.
      store: from `jaxinf.open_store`, or a path to open with its defaults.
      compress: `jaxinf.top_k`: only the largest elements of each gradient are sent, the
        rest counts as zero. What `tx` computes from all gradients, such as their norm,
        it computes from the dense ones.
      nonfinite: what a gradient with NaN or Inf does. ``"error"``: the step is refused
        and the store stops. ``"skip"``: zero updates, counted in `skipped_steps`.
        ``"allow"``: nothing is checked (for chains that treat NaN themselves).
      shardings: tree of ``NamedSharding`` like the params, for when `init` runs under
        ``jit`` or ``eval_shape``; by default those of the params that `init` is given.
      extra_args: example values for a transformation whose `update` needs extra
        arguments; only shapes and dtypes count.

    Returns:
      The transformation. Its `init` makes the store, or resumes one that agrees with
      the optimizer, the tree and the params. Its `update` returns fp32 updates for
      fp32 params, to be applied with ``optax.apply_updates`` unchanged; for bfloat16
      and float16 params, fp32 updates that bring them exactly to the master params
      rounded.

    Raises:
      UnsupportedTransformError: from `init` and `update`, when `tx` is not elementwise.
      ValueError: an argument is out of range, or the store cannot keep the error
        feedback that is asked for.
    """
    if nonfinite not in ("error", "skip", "allow"):
        raise ValueError(
            f'nonfinite={nonfinite!r}: expected "error", "skip" or "allow"'
        )
    owned = store if isinstance(store, Store) else open_store(store)
    wrapped = _SmartUpdate(
        optax.with_extra_args_support(_as_transformation(tx)),
        HostSide(owned, nonfinite),
        compress,
        shardings,
        dict(extra_args or {}),
    )
    return optax.GradientTransformationExtraArgs(wrapped.init, wrapped.update)


class _SmartUpdate:
    """The two functions of the transformation and what they share."""

    def __init__(
        self,
        tx: optax.GradientTransformationExtraArgs,
        host: HostSide,
        compression: TopK | None,
        shardings: PyTree | None,
        example_args: Mapping[str, Any],
    ) -> None:
        self._tx = tx
        self._host = host
        self._sending = Sending(host, compression)
        self._leaves = LeafUpdates(host, self._sending)
        self._shardings = on_one_mesh(jax.tree.leaves(shardings))
        self._example_args = example_args
        self._jitted = jax.jit(self._update, static_argnums=(4,))

    # --- init ----------------------------------------------------------------------

    def init(self, params: PyTree) -> SmartUpdateState:
        """See `smart_update`."""
        _refuse_outer_multi_steps()
        check_device_configuration()
        leaves = jax.tree.leaves(params)
        is_traced = any(not hasattr(x, "__array__") or _is_tracer(x) for x in leaves)
        if not self._shardings and not is_traced:
            self._shardings = on_one_mesh(
                [getattr(leaf, "sharding", None) for leaf in leaves]
            )
        program = trace_init(self._tx, params)
        update = trace_update(self._tx, params, self._example_args)
        self._sending.check(update)
        description = self._describe(update, program)
        initialised = self._init_traced if is_traced else self._init_eagerly
        initial, held, feedback = initialised(description, program, leaves)
        structure = jax.tree.structure(params if self._sending.has_feedback else ())
        return _make_state(program, initial, held, structure.unflatten(feedback))

    def _init_eagerly(
        self, description: StoreDescription, program: InitProgram, leaves: Sequence[Any]
    ) -> _Initialised:
        store = self._host.store
        is_new = store.training.bind(description, may_create=True)
        store.wait()
        initial, inputs = jax.jit(program.prologue)(leaves)
        for number, leaf in enumerate(leaves):
            scalars = tuple(np.asarray(s) for s in inputs[number].scalars)
            for index, shard in distinct_shards(leaf):
                arrays = tuple(np.asarray(a)[index] for a in inputs[number].arrays)
                own = ScalarInputs(scalars, arrays)
                origin = [s.start or 0 for s in index]
                self._host.place(description, number, shard, origin, own, is_new=is_new)
        raw = [np.asarray(_raw(value)) for value in initial]
        held = self._host.held_state(description, raw)
        if not self._sending.has_feedback:
            return initial, held, []
        feedback = [jnp.zeros_like(leaf, jnp.float32) for leaf in leaves]
        if not is_new:
            records = store.manifest.leaves
            feedback = [
                store.read_leaf(number, like, len(records[number].states) - 1)
                for number, like in enumerate(feedback)
            ]
        return initial, held, feedback

    def _init_traced(
        self,
        description: StoreDescription,
        program: InitProgram,
        leaves: Sequence[jax.Array],
    ) -> _Initialised:
        initial, inputs = program.prologue(leaves)
        statuses, feedback = [], []
        for number, (leaf, own) in enumerate(zip(leaves, inputs, strict=True)):
            host = partial(self._host.init_leaf, description, number, len(own.scalars))
            left, status, _ = call_on_shards(
                self._guarded(host),
                self._leaf_sharding(number),
                own.scalars,
                [leaf, *own.arrays],
                jax.ShapeDtypeStruct(leaf.shape, np.float32)
                if self._sending.has_feedback
                else None,
            )
            statuses.append(status)
            feedback += [] if left is None else [left]
        raw = [_raw(value) for value in initial]
        counter = jax.ShapeDtypeStruct((), np.int32)
        avals = [
            counter,
            counter,
            *(jax.ShapeDtypeStruct(v.shape, v.dtype) for v in raw),
        ]
        held = call_once(
            self._guarded(partial(self._host.finish_init, description)),
            self._mesh,
            [jnp.stack(statuses), *raw],
            avals,
        )
        return initial, held, feedback

    # --- update --------------------------------------------------------------------

    def update(
        self,
        updates: PyTree,
        state: optax.OptState,
        params: PyTree | None = None,
        **extra_args: Any,
    ) -> tuple[PyTree, SmartUpdateState]:
        """See `smart_update`."""
        if not isinstance(state, SmartUpdateState):
            raise TypeError(
                "update: expected the SmartUpdateState that init gives, found "
                f"{type(state).__name__}; make it with state = tx.init(params)"
            )
        _refuse_outer_multi_steps()
        check_device_configuration()
        everything = jax.tree.leaves((updates, state, params, extra_args))
        if any(map(_is_tracer, everything)):
            return self._update(updates, state, params, extra_args)
        dynamic = {k: v for k, v in extra_args.items() if not callable(v)}
        static = tuple((k, v) for k, v in extra_args.items() if callable(v))
        try:
            result = self._jitted(updates, state, params, dynamic, static)
            return jax.block_until_ready(result)
        except jax.errors.JaxRuntimeError:
            self._host.store.check()
            raise

    def _update(
        self,
        updates: PyTree,
        state: SmartUpdateState,
        params: PyTree | None,
        extra_args: Mapping[str, Any],
        static_args: tuple[tuple[str, Any], ...] = (),
    ) -> tuple[PyTree, SmartUpdateState]:
        extra_args = {**extra_args, **dict(static_args)}
        gradients, treedef = jax.tree.flatten(updates)
        known = updates if params is None else params
        program = trace_update(self._tx, known, extra_args)
        self._sending.check(program)
        description = self._describe(program, trace_init(self._tx, known))
        old = jax.tree.leaves(state.optimizer)
        held = jax.tree.leaves(state.error_feedback)
        _check_state(state, old, description)
        _check_feedback(held, len(gradients) if self._sending.has_feedback else 0)
        device = self._device_params(updates, params, extra_args)
        stand_ins = [jnp.zeros(g.shape, g.dtype) for g in gradients]
        new, inputs = program.prologue(gradients, device or stand_ins, old, extra_args)
        results = self._leaves.run(
            description, self._shardings, gradients, device, inputs, held, state.step
        )
        changes = [
            _change(one.result, p)
            for one, p in zip(results, device or [None] * len(inputs), strict=True)
        ]
        statuses = jnp.stack([one.status for one in results])
        inexact = jnp.stack([flag for _, flag in changes])
        left = [kept for one in results for kept in one.feedback]
        verdict = self._commit(description, state, statuses, inexact, new)
        return (
            jax.tree.unflatten(treedef, [_applied(verdict, u) for u, _ in changes]),
            _next_state(state, verdict, [*old, *held], [*new, *left]),
        )

    def _device_params(
        self, updates: PyTree, params: PyTree | None, extra_args: Mapping[str, Any]
    ) -> list[jax.Array]:
        """The params' leaves; none, where the optimizer can do without.

        Raises:
          ValueError: optax's own, where it cannot; ours for 16-bit params.
        """
        if params is not None:
            return jax.tree.leaves(params)
        if any(leaf.dtype != jnp.float32 for leaf in jax.tree.leaves(updates)):
            raise ValueError(
                "16-bit params must be given to update, tx.update(grads, state, "
                "params): what it returns is the difference to them"
            )
        jax.eval_shape(
            lambda g: self._tx.update(g, self._tx.init(g), None, **extra_args), updates
        )
        return []

    def _commit(
        self,
        description: StoreDescription,
        state: SmartUpdateState,
        statuses: jax.Array,
        inexact: jax.Array,
        scalars: Sequence[jax.Array],
    ) -> jax.Array:
        """Ends the step; int32: committed, skipped or failed."""
        avals = [jax.ShapeDtypeStruct((), np.int32)]
        (verdict,) = call_once(
            self._guarded(partial(self._host.commit, description)),
            self._mesh,
            [state.step, state.skipped_steps, statuses, inexact, *map(_raw, scalars)],
            avals,
        )
        return verdict

    # --- shared --------------------------------------------------------------------

    def _describe(self, update: UpdateProgram, init: InitProgram) -> StoreDescription:
        leaves = []
        for number, (leaf, first) in enumerate(
            zip(update.leaves, init.leaves, strict=True)
        ):
            slots = [StateRecord(slot.name, slot.dtype.name) for slot in leaf.slots]
            if self._sending.has_feedback:
                slots.append(StateRecord(ERROR_FEEDBACK, "float32"))
            leaves.append(
                LeafDescription(
                    path=leaf.info.path,
                    shape=leaf.info.shape,
                    dtype=leaf.info.dtype.name,
                    states=(StateRecord(MASTER_PARAMS, "float32"), *slots),
                    kernel=leaf.kernel,
                    init_kernel=first.kernel,
                    shard_counts=shard_counts(
                        self._leaf_sharding(number), leaf.info.shape
                    ),
                    gradients=self._sending.forms(leaf.info.dtype),
                )
            )
        return StoreDescription(tuple(leaves), init.layout.scalar_paths)

    def _leaf_sharding(self, number: int) -> NamedSharding | None:
        return self._shardings[number] if self._shardings else None

    @property
    def _mesh(self) -> Mesh | None:
        if not self._shardings:
            return None
        mesh = self._shardings[0].mesh
        assert isinstance(mesh, Mesh)
        return mesh

    def _guarded(self, host: Host) -> Host:
        return self._host.guarded(host, may_raise=self._mesh is None)


def _as_transformation(
    tx: optax.GradientTransformation | optax.MultiSteps,
) -> optax.GradientTransformation:
    return tx.gradient_transformation() if isinstance(tx, optax.MultiSteps) else tx


def _refuse_outer_multi_steps() -> None:
    """``MultiSteps(smart_update(…))`` would run the drive on every micro-step."""
    if compat.is_inside_multi_steps():
        raise ValueError(
            "optax.MultiSteps(jaxinf.smart_update(tx, store), k) cannot work: optax "
            "runs the inner update at every micro-step and throws most results away, "
            "while the store keeps them. Nest them the other way: "
            "jaxinf.smart_update(optax.MultiSteps(tx, k), store)"
        )


def _is_tracer(value: Any) -> bool:
    return isinstance(value, compat.Tracer)


def _raw(value: jax.Array) -> jax.Array:
    """Typed PRNG keys as the numbers that they are."""
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(value)
    return value


def _typed(raw: Any, like: jax.Array) -> jax.Array:
    """The reverse of `_raw`."""
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(raw, impl=jax.random.key_impl(like))
    return jnp.asarray(raw, like.dtype)


def _make_state(
    program: InitProgram,
    initial: Sequence[jax.Array],
    held: Sequence[Any],
    feedback: PyTree,
) -> SmartUpdateState:
    step, skipped, *scalars = held
    layout = program.layout
    leaves: list[Any] = [Stored()] * layout.treedef.num_leaves
    for index, raw, like in zip(layout.scalar_indices, scalars, initial, strict=True):
        leaves[index] = _typed(raw, like)
    return SmartUpdateState(
        jnp.asarray(step, jnp.int32),
        jnp.asarray(skipped, jnp.int32),
        jax.tree.unflatten(layout.treedef, leaves),
        feedback,
    )


def _check_state(
    state: SmartUpdateState, scalars: Sequence[Any], description: StoreDescription
) -> None:
    if len(scalars) != len(description.scalar_paths):
        raise StaleStateError(
            f"the state given to update has {len(scalars)} scalars "
            f"({jax.tree.structure(state.optimizer)}), the optimizer's has "
            f"{list(description.scalar_paths)}; make it with the init of the same "
            "transformation"
        )


def _check_feedback(held: Sequence[Any], expected: int) -> None:
    if len(held) != expected:
        raise StaleStateError(
            f"the state given to update has error feedback of {len(held)} leaves, this "
            f"compression's has {expected}; make it with the init of the same "
            "transformation"
        )


def _change(result: jax.Array, params: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """The fp32 update that a host's result means, and whether it is inexact.

    For 16-bit params it is the difference to the new ones. In rare cases no float32
    number leads from the old to the new (from a power of two to far below its last bit,
    or between denormals): then the params that the update makes are one rounding away
    from those of the store, whose next step must not take them for its own.
    """
    if result.dtype == jnp.float32:
        return result, jnp.bool_(False)
    assert params is not None
    change = result.astype(jnp.float32) - params.astype(jnp.float32)
    reached = (params + change).astype(result.dtype)
    bits = [lax.bitcast_convert_type(x, jnp.uint16) for x in (reached, result)]
    return change, jnp.any(bits[0] != bits[1])


def _applied(verdict: jax.Array, update: jax.Array) -> jax.Array:
    """The update of a committed step, zero for a skipped one, NaN after a failure."""
    filler = jnp.where(verdict == FAILED, jnp.nan, 0.0).astype(update.dtype)
    return jnp.where(verdict == COMMITTED, update, filler)


def _next_state(
    state: SmartUpdateState,
    verdict: jax.Array,
    old: Sequence[jax.Array],
    new: Sequence[jax.Array],
) -> SmartUpdateState:
    is_committed = verdict == COMMITTED
    kept = [jnp.where(is_committed, n, o) for n, o in zip(new, old, strict=True)]
    optimizer = jax.tree.structure(state.optimizer)
    num = optimizer.num_leaves
    return SmartUpdateState(
        state.step + is_committed.astype(jnp.int32),
        state.skipped_steps + (verdict == SKIPPED).astype(jnp.int32),
        optimizer.unflatten(kept[:num]),
        jax.tree.structure(state.error_feedback).unflatten(kept[num:]),
    )
