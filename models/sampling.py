"""Samples text from a language model, with one compiled function of its params.

Invariant: shapes are fixed for a whole call, so it compiles at most once.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .registry import Params, split

__all__ = ["generate", "generate_by", "next_token"]


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
    graphdef, params = split(model)
    return generate_by(
        lambda window: _next_token(graphdef, params, window),
        prompt_tokens,
        num_tokens,
        key=key,
        temperature=temperature,
        num_positions=model.config.num_positions,
        max_context=max_context,
    )


def generate_by(
    draw: Callable[[Mapping[str, jax.Array]], jax.Array],
    prompt_tokens: jax.Array,
    num_tokens: int,
    *,
    key: jax.Array,
    num_positions: int,
    temperature: float = 1.0,
    max_context: int | None = None,
) -> jax.Array:
    """As `generate`, for a model whose params need not be in memory.

    Args:
      draw: returns `next_token` of the model and its argument.
      prompt_tokens, num_tokens, key, temperature, max_context: as `generate`.
      num_positions: most tokens that the model can see.

    Returns:
        int32 [batch, num_tokens], without the prompt.
    """
    prompt = jnp.asarray(prompt_tokens, jnp.int32)
    context_limit = num_positions if max_context is None else max_context
    _check(prompt, num_tokens, temperature, context_limit, num_positions)
    # A power of two, so that calls of similar length share one compilation.
    length = prompt.shape[1] + num_tokens
    most = min(context_limit, 1 << (length - 1).bit_length())
    prompt = prompt[:, -most:]
    filled = jnp.int32(prompt.shape[1])
    context = jnp.pad(prompt, ((0, 0), (0, most - prompt.shape[1])))
    tokens = [jnp.zeros((prompt.shape[0], 0), jnp.int32)]
    for step_key in jax.random.split(key, num_tokens):
        window = {"tokens": context, "filled": filled, "key": step_key}
        token = draw({**window, "temperature": jnp.float32(temperature)})
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


def next_token(model: Any, window: Mapping[str, jax.Array]) -> jax.Array:
    """Draws the token after a window.

    Args:
      model: the language model.
      window: ``tokens``, int [batch, length], of which the first ``filled`` count; a
        random ``key``; and the ``temperature``.

    Returns:
      int32 [batch].
    """
    last = jax.lax.dynamic_index_in_dim(
        model.hidden(window["tokens"]), window["filled"] - 1, axis=1, keepdims=False
    )
    logits, temperature = model.head(last), window["temperature"]
    likely = logits / jnp.maximum(temperature, 1e-6)
    drawn = jax.random.categorical(window["key"], likely)
    token = jnp.where(temperature > 0, drawn, jnp.argmax(logits, axis=-1))
    return token.astype(jnp.int32)


@functools.partial(jax.jit, static_argnums=0)
def _next_token(
    graphdef: Any, params: Params, window: Mapping[str, jax.Array]
) -> jax.Array:
    return next_token(nnx.merge(graphdef, params), window)


@jax.jit
def _append(
    context: jax.Array, filled: jax.Array, token: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Appends a token to the context; a full window drops its oldest."""
    full = filled == context.shape[1]
    context = jnp.where(full, jnp.roll(context, -1, axis=1), context)
    filled = jnp.where(full, filled, filled + 1)
    return context.at[:, filled - 1].set(token), filled
