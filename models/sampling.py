"""Samples text from a language model, with one compiled step.

Invariant: shapes are fixed for a whole call, so it compiles at most once.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .registry import Params, split

__all__ = ["generate"]


def generate(
    model: Any,
    prompt_tokens: jax.Array,
    num_tokens: int,
    *,
    key: jax.Array,
    temperature: float = 1.0,
    max_context: int | None = None,
) -> jax.Array:
    """Continues a prompt, without a cache of keys and values.

    A full window drops its oldest token. Only the end of a longer prompt is used.

    Args:
      model: the language model.
      prompt_tokens: int [batch, prompt], at least one token.
      num_tokens: number of tokens to add.
      key: a JAX random key; the same key gives the same tokens.
      temperature: 0 takes the likeliest token.
      max_context: most tokens that the model sees, by default and at most
        `num_positions`. If it was trained on shorter sequences, give their length:
        positions beyond it were never trained.

    Returns:
        int32 [batch, num_tokens], without the prompt.

    Raises:
        ValueError: the prompt is empty, a count or the temperature is negative, or the
            context is longer than the model's.
    """
    prompt = jnp.asarray(prompt_tokens, jnp.int32)
    num_positions = model.config.num_positions
    context_limit = num_positions if max_context is None else max_context
    _check(prompt, num_tokens, temperature, context_limit, num_positions)
    graphdef, params = split(model)
    # A power of two, so that calls of similar length share one compilation.
    length = prompt.shape[1] + num_tokens
    window = min(context_limit, 1 << (length - 1).bit_length())
    prompt = prompt[:, -window:]
    filled = jnp.int32(prompt.shape[1])
    context = jnp.pad(prompt, ((0, 0), (0, window - prompt.shape[1])))
    tokens = [jnp.zeros((prompt.shape[0], 0), jnp.int32)]
    for step_key in jax.random.split(key, num_tokens):
        token = _sample(
            graphdef, params, context, filled, step_key, jnp.float32(temperature)
        )
        context, filled = _append(context, filled, token)
        tokens.append(token[:, None])
    return jnp.concatenate(tokens, axis=1)


def _check(
    prompt: jax.Array,
    num_tokens: int,
    temperature: float,
    context_limit: int,
    num_positions: int,
) -> None:
    if prompt.ndim != 2 or prompt.size == 0:
        raise ValueError(
            "generate: expected prompt_tokens of shape [batch, prompt] with at least "
            f"one token, got shape {prompt.shape}"
        )
    if num_tokens < 0 or temperature < 0:
        raise ValueError(
            "generate: expected num_tokens and temperature of at least 0, got "
            f"{num_tokens} and {temperature}"
        )
    if not 1 <= context_limit <= num_positions:
        raise ValueError(
            f"generate: expected max_context between 1 and num_positions="
            f"{num_positions}, got {context_limit}"
        )


@functools.partial(jax.jit, static_argnums=0)
def _sample(
    graphdef: Any,
    params: Params,
    context: jax.Array,
    filled: jax.Array,
    key: jax.Array,
    temperature: jax.Array,
) -> jax.Array:
    """Draws the token after the first `filled` of `context`: int32 [batch]."""
    model = nnx.merge(graphdef, params)
    last = jax.lax.dynamic_index_in_dim(
        model.hidden(context), filled - 1, axis=1, keepdims=False
    )
    logits = model.head(last)
    drawn = jax.random.categorical(key, logits / jnp.maximum(temperature, 1e-6))
    token = jnp.where(temperature > 0, drawn, jnp.argmax(logits, axis=-1))
    return token.astype(jnp.int32)


@jax.jit
def _append(
    context: jax.Array, filled: jax.Array, token: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Appends a token to the context; a full window drops its oldest."""
    full = filled == context.shape[1]
    context = jnp.where(full, jnp.roll(context, -1, axis=1), context)
    filled = jnp.where(full, filled, filled + 1)
    return context.at[:, filled - 1].set(token), filled
