"""The training step, compiled as one program or as three.

    fused    [loss, gradients, update, params + update]
    split    [loss, gradients] [update] [params + update]

XLA contracts and reorders operations within a program. A norm that is computed beside
the backward pass sums in another order than a norm of finished gradients, and in memory
``params + rate * u`` becomes one fused multiply-add. Every claim about bits refers to
``split``. Near storage `u` comes from a callback, and XLA fuses nothing across it. So
``fused`` has the bits of ``split`` there, if the optimizer does not reduce the
gradients.

Invariant: both compute the same, up to rounding.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jaxinf_models import score

from jaxinf.train.config import TrainConfig
from jaxinf.train.freezing import FrozenLeaves, mask_frozen, stop_frozen_gradients
from jaxinf.train.lora import merge_model
from jaxinf.typing import PyTree

_Program: TypeAlias = Callable[..., Any]
_LossFn: TypeAlias = Callable[[PyTree, Any], jax.Array]
_ValueAndGrad: TypeAlias = Callable[[PyTree, Any], tuple[jax.Array, PyTree]]


def make_loss_fn(config: TrainConfig, graphdef: Any) -> _LossFn:
    """Returns the mean loss of a batch; that of a micro-batch without targets is 0."""
    frozen, is_part = config.frozen, config.micro_batches > 1
    is_remat = config.policy == "recompute" and config.mode != "stream"
    remat = jax.checkpoint if is_remat else None

    def loss_fn(params: PyTree, batch: Any) -> jax.Array:
        params = stop_frozen_gradients(frozen, params)
        model = merge_model(graphdef, params, config.lora_alpha)
        sums = score(model, config.task_name, batch, remat=remat)
        weight = sums.weight
        return sums.loss / (jnp.where(weight > 0, weight, 1) if is_part else weight)

    return loss_fn


def make_value_and_grad(config: TrainConfig, graphdef: Any) -> _ValueAndGrad:
    """Returns a function of the loss of a batch and its gradients.

    The gradients of frozen leaves are None near storage, and zeros in memory.
    Micro-batches run one after another; their gradients add up in float32, weighted by
    the number of learned tokens.
    """
    frozen, num_parts = _leaves_without_gradient(config), config.micro_batches
    value_and_grad = jax.value_and_grad(make_loss_fn(config, graphdef))

    def of_part(params: PyTree, batch: Any) -> tuple[jax.Array, PyTree]:
        value, gradients = value_and_grad(params, batch)
        return value, mask_frozen(frozen, gradients)

    def of_batch(params: PyTree, batch: Any) -> tuple[jax.Array, PyTree]:
        def divide(x: Any) -> Any:  # each device has rows of each part
            return x.reshape(-1, num_parts, *x.shape[1:]).swapaxes(0, 1)

        def add(sums: Any, weighted_part: Any) -> tuple[Any, None]:
            part, weight = weighted_part
            values = of_part(params, part)
            return jax.tree.map(lambda s, x: s + weight * x, sums, values), None

        parts = jax.tree.map(divide, batch)
        weights = jax.vmap(lambda p: micro_batch_weight(p) + jnp.float32(0))(parts)
        like = jax.eval_shape(of_part, params, batch)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), like)
        sums, _ = jax.lax.scan(add, zeros, (parts, weights / weights.sum()))
        return jax.tree.map(lambda s, x: s.astype(x.dtype), sums, like)

    return of_batch if num_parts > 1 else of_part


def micro_batch_weight(part: Any) -> Any:
    """Returns the number of learned tokens, or 1 where each part has as many."""
    return jnp.sum(part["weights"], dtype=jnp.float32) if "weights" in part else 1.0


def _leaves_without_gradient(config: TrainConfig) -> FrozenLeaves:
    return FrozenLeaves() if config.mode == "memory" else config.frozen


def compile_train_step(
    config: TrainConfig,
    graphdef: Any,
    tx: optax.GradientTransformation,
    *example: Any,
    is_fused: bool = False,
) -> Callable[..., tuple[PyTree, Any, tuple[jax.Array, jax.Array]]]:
    """Compiles the step of a run.

    Args:
      tx: The optimizer, in memory or near storage.
      example: Params, state and a batch; only their shapes count.

    Returns:
      ``(params, state, batch) -> (params, state, (loss, norm))``, where the norm is
      that of all gradients, in float32. It donates params and state.
    """
    params, state, batch = example
    value_and_grad = make_value_and_grad(config, graphdef)

    def update(gradients: PyTree, state: Any, params: PyTree) -> Any:
        norm = _gradient_norm(gradients, is_clipped=config.clip_norm > 0)
        return *tx.update(gradients, state, params), norm

    if is_fused:
        step = _chain_programs(value_and_grad, update, apply_updates)
        return _compile(step, example, donated=(0, 1), results=(params, state, None))
    # A gradient has the shape, the dtype and the sharding of its param.
    gradients = mask_frozen(_leaves_without_gradient(config), params)
    backward = _compile(value_and_grad, (params, batch), results=(None, gradients))
    inputs = gradients, state, params
    # A callback's results have memory of their own.
    donated = (0, 1) if config.mode == "memory" else (1,)
    results = gradients, state, None
    compiled_update = _compile(update, inputs, donated=donated, results=results)
    updates, _ = jax.eval_shape(tx.update, *inputs)
    updates = jax.tree.map(
        lambda x, like: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=_mesh_sharding(like)
        ),
        updates,
        gradients,
    )
    inputs = params, updates
    apply = _compile(apply_updates, inputs, donated=(0,), results=params)
    return _chain_programs(backward, compiled_update, apply)


def _chain_programs(backward: _Program, update: _Program, apply: _Program) -> _Program:
    def step(params: PyTree, state: Any, batch: Any) -> Any:
        value, gradients = backward(params, batch)
        updates, state, norm = update(gradients, state, params)
        return apply(params, updates), state, (value, norm)

    return step


def apply_updates(params: PyTree, updates: PyTree) -> PyTree:
    """Applies updates as optax; leaves whose update is None stay as they are."""
    return jax.tree.map(
        lambda x, param: param if x is None else optax.apply_updates(param, x),
        updates,
        params,
        is_leaf=lambda x: x is None,
    )


def _gradient_norm(gradients: PyTree, *, is_clipped: bool) -> jax.Array:
    """Returns the norm that clipping computes, or one of finished gradients.

    The barrier keeps XLA from making gradients in another way where nothing else in the
    step waits for them all.
    """
    if not is_clipped:
        gradients = jax.tree.map(jax.lax.optimization_barrier, gradients)
    return optax.tree.norm(gradients).astype(jnp.float32)


def _compile(
    function: _Program,
    example: tuple[Any, ...],
    *,
    donated: tuple[int, ...] = (),
    results: Any = None,
) -> _Program:
    """Compiles a function; on a mesh its results are sharded like `results`."""
    options: dict[str, Any] = {"donate_argnums": donated}
    shardings = jax.tree.map(_mesh_sharding, results)
    if jax.tree.leaves(shardings):
        options["out_shardings"] = shardings
    return jax.jit(function, **options).lower(*example).compile()


def _mesh_sharding(array: Any) -> Any:
    """Returns the sharding of an array on several devices; None for one."""
    return array.sharding if len(array.sharding.device_set) > 1 else None
