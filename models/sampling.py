"""Samples text from a language model, with a compiled function of its params.

Invariant: shapes are fixed for a whole call, so it compiles at most twice.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from .layers import Past
from .registry import Params, split

Inputs: TypeAlias = Mapping[str, Any]


def generate(
    model: Any,
    prompt_tokens: jax.Array,
    num_tokens: int,
    *,
    key: jax.Array,
    temperature: float = 1.0,
    max_context: int | None = None,
    end: int | None = None,
) -> jax.Array:
    """Continues a prompt.

    Keys and values of earlier tokens are kept. A full window drops its oldest token,
    which changes all positions, so each token then computes the window anew. Only the
    end of a longer prompt is used.

    Args:
      model: the language model.
      prompt_tokens: int [batch, prompt], at least one token.
      num_tokens: number of tokens to add.
      key: a JAX random key; the same key gives the same tokens.
      temperature: 0 takes the likeliest token.
      max_context: most tokens that the model sees, by default and at most
        `num_positions`. If it was trained on shorter sequences, give their length:
        positions beyond it were never trained.
      end: a token after which a sequence is over; stops when all are.

    Returns:
        int32 [batch, num_tokens], without the prompt; fewer tokens if all end before.

    Raises:
        ValueError: the prompt is empty, a count or the temperature is negative, or the
            context is longer than the model's.
    """
    graphdef, params = split(model)
    return generate_by(
        lambda inputs: _next_token(graphdef, params, inputs),
        model.config,
        prompt_tokens,
        num_tokens,
        key=key,
        temperature=temperature,
        max_context=max_context,
        end=end,
    )


def generate_by(
    draw: Callable[[Inputs], tuple[jax.Array, Sequence[Any]]],
    config: Any,
    prompt_tokens: jax.Array,
    num_tokens: int,
    *,
    key: jax.Array,
    temperature: float = 1.0,
    max_context: int | None = None,
    end: int | None = None,
) -> jax.Array:
    """As `generate`, for a model whose params need not be in memory.

    Args:
      draw: returns `next_token` of the model and its argument.
      config: the model's.
      prompt_tokens, num_tokens, key, temperature, max_context, end: as `generate`.

    Returns:
        As `generate`.
    """
    text = np.asarray(prompt_tokens, np.int32)
    first = text.shape[-1]
    num_positions = getattr(config, "num_positions", max_context or first + num_tokens)
    context_limit = num_positions if max_context is None else max_context
    _check(text, num_tokens, temperature, context_limit, num_positions)
    # A power of two, so that calls of similar length share one compilation.
    most = min(context_limit, 1 << (first + num_tokens - 1).bit_length())
    past, known = _empty(config, len(text), most), 0
    for step_key in jax.random.split(key, num_tokens):
        seen = text[:, -most:]
        if not known or seen.shape[1] != known + 1:
            known = 0
        new = seen[:, known:]
        count = new.shape[1]
        if not known:
            new = np.pad(new, ((0, 0), (0, most - count)))
        token, past = draw(
            {
                "tokens": new,
                "count": np.int32(count),
                "filled": np.int32(known),
                "past": past,
                "key": step_key,
                "temperature": np.float32(temperature),
            }
        )
        known += count
        text = np.concatenate([text, np.asarray(token)[:, None]], axis=1)
        if end is not None and (text[:, first:] == end).any(axis=1).all():
            break
    return jnp.asarray(text[:, first:])


def _empty(config: Any, batch_size: int, length: int) -> list[Any]:
    """Room for the keys and values of each layer."""
    num_heads = getattr(config, "num_kv_heads", config.num_heads)
    usual = config.num_features // config.num_heads
    shape = batch_size, length, num_heads, getattr(config, "features_a_head", usual)
    zeros = jnp.zeros(shape, config.dtype)
    return [(zeros, zeros)] * config.num_layers


def _check(
    prompt: np.ndarray,
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


def next_token(model: Any, inputs: Inputs) -> tuple[jax.Array, list[Any]]:
    """Draws the token after others.

    Args:
      model: the language model.
      inputs: new ``tokens``, int [batch, length], of which the first ``count`` count;
        ``past``, keys and values of each layer, of which the first ``filled`` are of
        the tokens before; a random ``key``; and the ``temperature``.

    Returns:
      The token, int32 [batch], and ``past`` with the new ones.
    """
    filled = inputs["filled"]
    pasts = [Past(keys, values, filled) for keys, values in inputs["past"]]
    last = jax.lax.dynamic_index_in_dim(
        model.continued(inputs["tokens"], pasts),
        inputs["count"] - 1,
        axis=1,
        keepdims=False,
    )
    logits, temperature = model.head(last), inputs["temperature"]
    likely = logits / jnp.maximum(temperature, 1e-6)
    drawn = jax.random.categorical(inputs["key"], likely)
    token = jnp.where(temperature > 0, drawn, jnp.argmax(logits, axis=-1))
    return token.astype(jnp.int32), [(past.keys, past.values) for past in pasts]


@functools.partial(jax.jit, static_argnums=0)
def _next_token(
    graphdef: Any, params: Params, inputs: Inputs
) -> tuple[jax.Array, list[Any]]:
    return next_token(nnx.merge(graphdef, params), inputs)
