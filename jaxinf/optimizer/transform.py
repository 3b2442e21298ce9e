"""`smart_update`: an optax transformation with state and update on storage.

Invariant: the pair of functions has no state of a run; the store has it.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import jax
import optax
from jax.sharding import NamedSharding

from jaxinf import compat
from jaxinf.compress import TopK
from jaxinf.engine import (
    Store,
    carried_leaves,
    check_compression,
    engine_of,
    open_store,
)
from jaxinf.optimizer.callback import check_device_configuration
from jaxinf.optimizer.host_side import HostFunctions
from jaxinf.optimizer.init import init_state
from jaxinf.optimizer.leaf_call import on_one_mesh
from jaxinf.optimizer.offloaded import (
    OffloadedOptimizer,
    OnExisting,
    UpdateDtype,
    align,
)
from jaxinf.optimizer.state import SmartUpdateState
from jaxinf.optimizer.update import UpdateArguments, run_update
from jaxinf.program import Average, NonFinitePolicy, with_average
from jaxinf.terminal import check_choice
from jaxinf.typing import PathLikeStr, PyTree


def smart_update(
    tx: optax.GradientTransformation | optax.MultiSteps,
    store: Store | PathLikeStr,
    *,
    average: Average | None = None,
    compress: TopK | None = None,
    nonfinite: NonFinitePolicy = "error",
    on_existing: OnExisting = "resume",
    shardings: PyTree | None = None,
    extra_args: Mapping[str, Any] | None = None,
    updates: UpdateDtype = "gradient",
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optax optimizer so that its state lives in a store on drives.

    Use it as any optax transformation: under ``jit``, in ``lax.scan``, in Flax's
    ``nnx.Optimizer`` and ``TrainState``, last in an ``optax.chain``. Each update is one
    durable step of the store. Gradient accumulation goes inside:
    ``smart_update(optax.MultiSteps(tx, k), store)``.

    Args:
      tx: Any transformation that is elementwise over its stored state.
      store: From `jaxinf.open_store`, or a path to open with its defaults.
      average: `jaxinf.ema`: a moving average of the params, kept in the store and
        updated with them. `Store.params` reads it with ``average=True``.
      compress: `jaxinf.top_k`: only the largest elements of each gradient are sent, the
        rest counts as zero. Quantities that `tx` computes from all gradients, such as
        their norm, are computed from the dense ones.
      nonfinite: The effect of a gradient with NaN or Inf. ``"error"``: the step is
        refused and the store stops. ``"skip"``: updates are zero, and the step counts
        in `skipped_steps`; for a loss scale such as Flax's ``DynamicScale``, whose
        first gradients may be Inf. ``"allow"``: gradients are not checked, for chains
        that treat NaN themselves, such as with ``optax.apply_if_finite`` around them.
      on_existing: The action of `init` on a store that has steps. ``"resume"`` returns
        the state of the store's last step. A program may also restore params and state
        of that step from its own checkpoint, which the first `update` compares with the
        store's. ``"restart"`` keeps the existing run as a checkpoint and starts anew,
        with the same leaves and optimizer. ``"error"`` raises.
      shardings: Tree of ``NamedSharding`` like the params, for when `init` runs under
        ``jit`` or ``eval_shape``; by default those of the params that `init` is given.
      extra_args: Example values for a transformation whose `update` needs extra
        arguments; only shapes and dtypes count.
      updates: The dtype of updates of 16-bit params. ``"gradient"``: the gradient's, as
        optax promises, if that is also the params'. Where such an update cannot lead
        exactly to the rounded master (an element loses more than half of its magnitude,
        or changes its sign), the params are one rounding of the update away from it
        until the next step. ``"float32"``: they are the rounded master.

    Returns:
      The transformation. Its `init` makes the store, or gives the state of one that
      agrees with the optimizer and the tree; only one leaf of type
      `jaxinf.typing.DeferredArray` at a time is in memory. Its `update` needs the
      params, and returns updates to be applied unchanged with ``optax.apply_updates``.
      For fp32 params they are fp32; for others see `updates`. With ``carry=tree`` it
      commits further arrays with the step, 64 MiB at most: batch statistics, typed
      keys, counters; `Store.carried` returns them.

    Raises:
      UnsupportedTransformError: From `init` and `update`, if `tx` is not elementwise.
      ValueError: An argument is out of range, or the store cannot keep the requested
        error feedback.
    """
    check_choice("nonfinite", nonfinite, NonFinitePolicy)
    check_choice("on_existing", on_existing, OnExisting)
    check_choice("updates", updates, UpdateDtype)
    store = store if isinstance(store, Store) else open_store(store)
    check_compression(compress, engine_of(store).options)
    optimizer = OffloadedOptimizer(
        with_average(tx, average),
        HostFunctions(store, nonfinite),
        compression=compress,
        given_shardings=on_one_mesh(jax.tree.leaves(shardings)),
        example_args=dict(extra_args or {}),
        on_existing=on_existing,
        updates=updates,
        average=average,
    )
    return optax.GradientTransformationExtraArgs(
        partial(init_state, optimizer), _update_function(optimizer)
    )


_Updated: TypeAlias = tuple[PyTree, SmartUpdateState]


def _update_function(optimizer: OffloadedOptimizer) -> Any:
    """Makes `update`, which is traced into the caller's computation, or jitted."""

    def traced(
        arguments: UpdateArguments,
        callables: tuple[tuple[str, Any], ...],
        shardings: tuple[NamedSharding, ...],
    ) -> _Updated:
        extra_args = {**arguments.extra_args, **dict(callables)}
        return run_update(
            optimizer, arguments._replace(extra_args=extra_args), shardings
        )

    jitted = jax.jit(traced, static_argnums=(1, 2))

    def update(
        updates: PyTree,
        state: PyTree,
        params: PyTree | None = None,
        *,
        carry: PyTree = None,
        **extra_args: Any,
    ) -> _Updated:
        _check_arguments(optimizer, state, params)
        gradients, trained, put_back = align(updates, params)
        arguments = UpdateArguments(gradients, state, trained, extra_args, carry)
        leaves = jax.tree.leaves(arguments)
        if any(isinstance(leaf, compat.Tracer) for leaf in leaves):
            updates, state = traced(arguments, (), optimizer.shardings)
        else:
            carried_leaves(carry)  # names the leaf that JAX would not take
            updates, state = _run_jitted(optimizer, jitted, arguments)
        return put_back(updates), state

    return update


def _check_arguments(
    optimizer: OffloadedOptimizer, state: PyTree, params: PyTree | None
) -> None:
    if not isinstance(state, SmartUpdateState):
        raise TypeError(
            "update: expected the SmartUpdateState that init gives, found "
            f"{type(state).__name__}; make it with state = tx.init(params). A "
            "state of plain optax becomes the store's: tx.init(params), store.load("
            "params, opt_state, step=…), state = tx.init(params) "
            "(docs/checkpoints.md)"
        )
    if params is None:
        raise ValueError(
            f"{optimizer.host.store.path}: update: expected the params, as each step "
            "compares them with the store's, found none; give them: "
            "tx.update(grads, state, params)"
        )
    check_device_configuration()
    optimizer.check()


def _run_jitted(
    optimizer: OffloadedOptimizer,
    jitted: Callable[..., _Updated],
    arguments: UpdateArguments,
) -> _Updated:
    """Runs an update by itself; blocks, and raises a failure of the store as it is."""
    extra_args = arguments.extra_args
    arrays = {k: v for k, v in extra_args.items() if not callable(v)}
    callables = tuple((k, v) for k, v in extra_args.items() if callable(v))
    arguments = arguments._replace(extra_args=arrays)
    try:
        result = jax.block_until_ready(
            jitted(arguments, callables, optimizer.shardings)
        )
    except jax.errors.JaxRuntimeError as error:
        jax_error = error
    else:
        optimizer.check()
        return result
    # Not while JAX's is handled, or Python would print both.
    optimizer.host.store.check()
    raise jax_error
