"""The training step, in one program or in three.

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
from jaxinf.train.freezing import Frozen, trained, without_gradients
from jaxinf.train.lora import model_of
from jaxinf.typing import PyTree

_Part: TypeAlias = Callable[..., Any]


def loss_of(config: TrainConfig, graphdef: Any) -> Callable[[PyTree, Any], jax.Array]:
    """Returns the loss of a batch, or of a part, which is 0 if no token is learned."""
    frozen, is_part = config.frozen, config.micro_batches > 1
    is_remat = config.policy == "recompute" and config.mode != "stream"
    remat = jax.checkpoint if is_remat else None

    def loss_fn(params: PyTree, batch: Any) -> jax.Array:
        params = without_gradients(frozen, params)
        model = model_of(graphdef, params, config.lora_alpha)
        sums = score(model, config.task_name, batch, remat=remat)
        weight = sums.weight
        return sums.loss / (jnp.where(weight > 0, weight, 1) if is_part else weight)

    return loss_fn


def gradients_of(
    config: TrainConfig, graphdef: Any
) -> Callable[[PyTree, Any], tuple[jax.Array, PyTree]]:
    """Returns the loss and its gradients.

    The gradients of frozen leaves are None near storage, and zeros in memory.
    Micro-batches run one after another. Their gradients, in float32, are weighed by the
    learned tokens.
    """
    frozen, micro_batches = _without_gradient(config), config.micro_batches
    both = jax.value_and_grad(loss_of(config, graphdef))

    def of_part(params: PyTree, batch: Any) -> tuple[jax.Array, PyTree]:
        value, gradients = both(params, batch)
        return value, trained(frozen, gradients)

    def of_all(params: PyTree, batch: Any) -> tuple[jax.Array, PyTree]:
        def divided(x: Any) -> Any:  # each device has rows of each part
            return x.reshape(-1, micro_batches, *x.shape[1:]).swapaxes(0, 1)

        def add(sums: Any, given: Any) -> tuple[Any, None]:
            part, weight = given
            return jax.tree.map(
                lambda s, x: s + weight * x, sums, of_part(params, part)
            ), None

        parts = jax.tree.map(divided, batch)
        weights = jax.vmap(lambda part: weight_of_part(part) + jnp.float32(0))(parts)
        like = jax.eval_shape(of_part, params, batch)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), like)
        sums, _ = jax.lax.scan(add, zeros, (parts, weights / weights.sum()))
        return jax.tree.map(lambda s, x: s.astype(x.dtype), sums, like)

    return of_all if micro_batches > 1 else of_part


def _without_gradient(config: TrainConfig) -> Frozen:
    """Returns the leaves whose gradients are None."""
    return Frozen() if config.mode == "memory" else config.frozen


def weight_of_part(part: Any) -> Any:
    """Returns the number of learned tokens, or 1 where each part has as many."""
    return jnp.sum(part["weights"], dtype=jnp.float32) if "weights" in part else 1.0


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
      ``(params, state, batch) -> (params, state, (loss, norm))``, of all gradients in
      float32; donates the first two.
    """
    params, state, batch = example
    value_and_gradients = gradients_of(config, graphdef)

    def update(gradients: PyTree, state: Any, params: PyTree) -> Any:
        norm = _norm(gradients, is_clipped=config.clip_norm > 0)
        return *tx.update(gradients, state, params), norm

    if is_fused:
        step = _three_programs(value_and_gradients, update, updated)
        return _compile(step, example, donated=(0, 1), results=(params, state, None))
    # A gradient has the shape, the dtype and the place of its param.
    own = trained(_without_gradient(config), params)
    first = _compile(value_and_gradients, (params, batch), results=(None, own))
    inputs = own, state, params
    # A callback's results have memory of their own.
    donated = (0, 1) if config.mode == "memory" else (1,)
    second = _compile(update, inputs, donated=donated, results=(own, state, None))
    updates, _ = jax.eval_shape(tx.update, *inputs)
    updates = jax.tree.map(
        lambda x, like: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=_sharding_of(like)
        ),
        updates,
        own,
    )
    third = _compile(updated, (params, updates), donated=(0,), results=params)
    return _three_programs(first, second, third)


def _three_programs(first: _Part, second: _Part, third: _Part) -> _Part:
    """Returns the step that calls the three parts of ``split``."""

    def step(params: PyTree, state: Any, batch: Any) -> Any:
        value, gradients = first(params, batch)
        updates, state, norm = second(gradients, state, params)
        return third(params, updates), state, (value, norm)

    return step


def updated(params: PyTree, updates: PyTree) -> PyTree:
    """Applies updates; leaves without one stay as they are."""
    return jax.tree.map(
        lambda x, param: param if x is None else optax.apply_updates(param, x),
        updates,
        params,
        is_leaf=lambda x: x is None,
    )


def _norm(gradients: PyTree, *, is_clipped: bool) -> jax.Array:
    """Returns the norm that clipping computes, or one of finished gradients.

    The barrier keeps XLA from making gradients in another way where nothing else in the
    step waits for them all.
    """
    if not is_clipped:
        gradients = jax.tree.map(jax.lax.optimization_barrier, gradients)
    return optax.tree.norm(gradients).astype(jnp.float32)


def _compile(
    function: Callable[..., Any],
    example: tuple[Any, ...],
    donated: tuple[int, ...] = (),
    results: Any = None,
) -> Callable[..., Any]:
    """Compiles a function; on a mesh results are sharded like `results`."""
    options: dict[str, Any] = {"donate_argnums": donated}
    shardings = jax.tree.map(_sharding_of, results)
    if jax.tree.leaves(shardings):
        options["out_shardings"] = shardings
    return jax.jit(function, **options).lower(*example).compile()


def _sharding_of(array: Any) -> Any:
    """Returns the sharding of an array on several devices; None for one."""
    return array.sharding if len(array.sharding.device_set) > 1 else None
