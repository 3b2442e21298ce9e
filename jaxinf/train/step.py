"""The training step, divided into one, two or three jits.

    fused    [loss, gradients, update, params + update]
    halves   [loss, gradients] [update, params + update]
    split    [loss, gradients] [update] [params + update]

XLA contracts and reorders operations within a jit. A norm that is computed beside the
backward pass sums in another order than a norm of finished gradients, and in memory
``params + rate * u`` becomes one fused multiply-add. Every claim about bits refers to
``split``. Near storage `u` comes from a callback, and XLA fuses nothing across it. So
``halves`` has the bits of ``split`` there, and so has ``fused`` if the optimizer does
not reduce the gradients.

Invariant: all divisions compute the same, up to rounding.
"""

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import jax
import optax
from flax import nnx
from jaxinf_models import TaskName, task_loss

from jaxinf.typing import PyTree

__all__ = ["Boundaries", "TrainStep", "compile_train_step"]

Boundaries: TypeAlias = Literal["fused", "halves", "split"]

TrainStep: TypeAlias = Callable[..., tuple[PyTree, Any, jax.Array]]
"""``(params, state, batch) -> (params, state, loss)``; donates the first two."""


def compile_train_step(
    graphdef: Any,
    tx: optax.GradientTransformation,
    boundaries: Boundaries,
    *example: Any,
    task: TaskName = "causal-lm",
) -> TrainStep:
    """Compiles the step.

    Args:
      graphdef: The model's graph.
      tx: The optimizer, in memory or near storage.
      boundaries: The division into jits; see the module.
      example: Params, state and a batch; only their shapes count.
      task: The task, which decides the loss.
    """

    def gradients_of(params: PyTree, batch: Any) -> tuple[Any, PyTree]:
        def loss_of(params: PyTree) -> jax.Array:
            return task_loss(nnx.merge(graphdef, params), task, batch)

        return jax.value_and_grad(loss_of)(params)

    def update(gradients: PyTree, state: Any, params: PyTree) -> tuple[PyTree, Any]:
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    def step(params: PyTree, state: Any, batch: Any) -> tuple[PyTree, Any, jax.Array]:
        value, gradients = gradients_of(params, batch)
        return *update(gradients, state, params), value

    params, state, batch = example
    if boundaries == "fused":
        return _compile(step, example, donated=(0, 1))
    inputs = (params, batch)
    first = _compile(gradients_of, inputs)
    _, gradients = jax.eval_shape(gradients_of, *inputs)
    if boundaries == "halves":
        second = _compile(update, (gradients, state, params), donated=(1, 2))
    else:
        second = _compile_apart(tx, gradients, state, params)

    def run(params: PyTree, state: Any, batch: Any) -> tuple[PyTree, Any, jax.Array]:
        value, gradients = first(params, batch)
        return *second(gradients, state, params), value

    return run


def _compile_apart(
    tx: optax.GradientTransformation, gradients: PyTree, state: Any, params: PyTree
) -> Callable[..., tuple[PyTree, Any]]:
    """Compiles `tx.update` and the addition separately."""
    update = _compile(tx.update, (gradients, state, params), donated=(0, 1))
    updates, _ = jax.eval_shape(tx.update, gradients, state, params)
    add = _compile(optax.apply_updates, (params, updates), donated=(0,))

    def run(gradients: PyTree, state: Any, params: PyTree) -> tuple[PyTree, Any]:
        updates, state = update(gradients, state, params)
        return add(params, updates), state

    return run


def _compile(
    function: Callable[..., Any],
    example: tuple[Any, ...],
    donated: tuple[int, ...] = (),
) -> Callable[..., Any]:
    return jax.jit(function, donate_argnums=donated).lower(*example).compile()
