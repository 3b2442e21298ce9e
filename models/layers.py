"""The parts of all models: configs, layers, masks, `run_blocks`.

Invariant: the only state is params, in `nnx.Param`s. Dropout takes its key as an
argument, so that a model splits into a static part and a plain tree of arrays.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx

DTypeName: TypeAlias = Literal["float32", "bfloat16"]
Key: TypeAlias = jax.Array | None
"""A random key for dropout; None: no dropout."""
Remat: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]] | None
"""A wrapper of each block's function, such as `jax.checkpoint`; None for no wrapper."""

INIT_STDDEV = 0.02


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The common fields of configs; hashable, so it can be a static jit argument.

    Attributes:
      dtype: dtype of activations and matrix products.
      param_dtype: dtype of the params.
      dropout: share of embeddings and of each layer's outputs that training zeroes, if
        it gives a key; weights of the attention are never zeroed.

    Raises:
      ValueError: a count is below one, the dropout is not a share, or a dtype is not
        one of the fields' choices.
    """

    dtype: DTypeName = dataclasses.field(default="float32", kw_only=True)
    param_dtype: DTypeName = dataclasses.field(default="float32", kw_only=True)
    dropout: float = dataclasses.field(default=0.0, kw_only=True)

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            where = f"{type(self).__name__}.{field.name}"
            if field.type in (int, int | None) and value is not None and value < 1:
                raise ValueError(f"{where}: expected at least 1, got {value}")
            if field.type is DTypeName and value not in ("float32", "bfloat16"):
                raise ValueError(
                    f"{where}: expected 'float32' or 'bfloat16', got {value!r}"
                )
        if not 0 <= self.dropout < 1:
            raise ValueError(
                f"{type(self).__name__}.dropout: expected at least 0 and less than 1, "
                f"got {self.dropout}"
            )

    def check_divides(self, divisor: str, dividend: str) -> None:
        """Raises ValueError if one field does not divide another."""
        if getattr(self, dividend) % getattr(self, divisor):
            raise ValueError(
                f"{type(self).__name__}: {divisor}={getattr(self, divisor)} must "
                f"divide {dividend}={getattr(self, dividend)}"
            )


def _dtypes(config: ModelConfig) -> dict[str, Any]:
    names = ("dtype", "param_dtype")
    return {name: jnp.dtype(getattr(config, name)) for name in names}


def linear(
    config: ModelConfig,
    num_in: int,
    num_out: int,
    *,
    rngs: nnx.Rngs,
    stddev: float = INIT_STDDEV,
    use_bias: bool = True,
) -> nnx.Linear:
    """A linear layer with normally distributed weights."""
    init = nnx.initializers.normal(stddev)
    options = {"use_bias": use_bias, "kernel_init": init, **_dtypes(config)}
    return nnx.Linear(num_in, num_out, **options, rngs=rngs)


def projection(
    config: Any, num_in: int, *, rngs: nnx.Rngs, use_bias: bool = True
) -> nnx.Linear:
    """A linear layer onto the skip path; as 2 per layer add up, the init is smaller."""
    stddev = INIT_STDDEV / math.sqrt(2 * config.num_layers)
    options = {"stddev": stddev, "use_bias": use_bias}
    return linear(config, num_in, config.num_features, rngs=rngs, **options)


def layer_norm(config: Any, *, rngs: nnx.Rngs) -> nnx.LayerNorm:
    """Layer norm over the last axis, computed in float32."""
    return nnx.LayerNorm(
        config.num_features,
        epsilon=config.norm_epsilon,
        use_fast_variance=False,  # E[x^2] - E[x]^2 would cancel
        **_dtypes(config),
        rngs=rngs,
    )


def rms_norm(
    config: Any, num_features: int | None = None, *, rngs: nnx.Rngs
) -> nnx.RMSNorm:
    """Norm by the root of the mean square over the last axis, computed in float32."""
    num, epsilon = num_features or config.num_features, config.norm_epsilon
    return nnx.RMSNorm(num, epsilon=epsilon, **_dtypes(config), rngs=rngs)


def normal_param(
    config: ModelConfig,
    shape: tuple[int, ...],
    *,
    rngs: nnx.Rngs,
    stddev: float = INIT_STDDEV,
) -> nnx.Param[jax.Array]:
    """A normally distributed param, such as a table of [rows, features]."""
    init = nnx.initializers.normal(stddev)
    return nnx.Param(init(rngs.params(), shape, jnp.dtype(config.param_dtype)))


def embedding(
    config: Any, num_rows: int, *, rngs: nnx.Rngs, stddev: float = INIT_STDDEV
) -> nnx.Param[jax.Array]:
    """A table of [rows, features], normally distributed."""
    shape = (num_rows, config.num_features)
    return normal_param(config, shape, rngs=rngs, stddev=stddev)


def look_up(config: ModelConfig, table: nnx.Param, rows: jax.Array) -> jax.Array:
    """Rows of a table in the compute dtype: int [...] to [..., features]."""
    # The cast follows the look-up, so that gradients add up in the param dtype.
    return jnp.take(table[...], rows, axis=0).astype(config.dtype)


def output_logits(
    x: jax.Array, table: jax.Array, bias: jax.Array | None = None
) -> jax.Array:
    """[..., features] times a table of [vocab, features]: float32 [..., vocab]."""
    logits = jnp.einsum(
        "...f,vf->...v", x, table.astype(x.dtype), preferred_element_type=jnp.float32
    )
    return logits if bias is None else logits + bias.astype(jnp.float32)


def split_heads(x: jax.Array, num_heads: int) -> jax.Array:
    """[batch, seq, features] to [batch, seq, heads, features of a head]."""
    return x.reshape(*x.shape[:2], num_heads, -1)


def join_heads(x: jax.Array) -> jax.Array:
    """The reverse of `split_heads`."""
    return x.reshape(*x.shape[:2], -1)


def attention_mask(
    query_segments: jax.Array | None, key_segments: jax.Array | None
) -> jax.Array | None:
    """Returns which keys each query sees, bool [batch, 1, queries, keys]; None for all.

    Documents do not see each other; padding is a document like others, number 0.

    Args:
      query_segments: int [batch, queries], the number of each token's document.
      key_segments: int [batch, keys], the same for the keys.
    """
    if query_segments is None or key_segments is None:
        return None
    return (query_segments[:, :, None] == key_segments[:, None, :])[:, None]


def positions_in(segments: jax.Array) -> jax.Array:
    """Maps segments to each token's position in its document: int [batch, seq]."""
    number = jnp.arange(segments.shape[1])
    is_first = jnp.pad(
        segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True
    )
    return number - jax.lax.cummax(jnp.where(is_first, number, 0), axis=1)


def check_length(where: str, seq: int, num_positions: int) -> None:
    """Raises ValueError for a sequence that is longer than a model's positions."""
    if seq > num_positions:
        raise ValueError(
            f"{where}: expected at most num_positions={num_positions} tokens a "
            f"sequence, got {seq}"
        )


def dropout(x: jax.Array, rate: float, key: Key) -> jax.Array:
    """Zeroes a share of the elements and scales up the others; nothing without key."""
    if key is None or rate == 0:
        return x
    is_kept = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(is_kept, x / (1 - rate), 0).astype(x.dtype)


def split_key(key: Key, num: int) -> Sequence[Key]:
    """Returns `num` keys made from one, or `num` times None."""
    return [None] * num if key is None else list(jax.random.split(key, num))


def blocks_of(model: Any, num_blocks: int, letter: str = "h") -> list[nnx.Module]:
    """Returns a model's blocks ``h0``, ``h1``, …: string keys, not a list's numbers."""
    return [getattr(model, f"{letter}{i}") for i in range(num_blocks)]


def run_blocks(
    blocks: Sequence[nnx.Module],
    x: jax.Array,
    *,
    key: Key,
    remat: Remat,
    **shared: Any,
) -> jax.Array:
    """Applies layers one after another, each with a dropout key of its own.

    Args:
      blocks: layers, called as ``block(x, key=key, **shared)``.
      **shared: arrays or None that each layer takes; they are traced, once for equal
        layers, which change no state.
    """
    for block, block_key in zip(blocks, split_key(key, len(blocks)), strict=True):
        graphdef, state = nnx.split(block)
        call = functools.partial(_apply, graphdef)
        x = (call if remat is None else remat(call))(state, x, block_key, shared)
    return x


@functools.partial(jax.jit, static_argnums=0)
def _apply(
    graphdef: Any, state: Any, x: jax.Array, key: Key, shared: dict[str, Any]
) -> jax.Array:
    """Applies a layer; equal layers are traced once."""
    return nnx.merge(graphdef, state)(x, key=key, **shared)


def last_tokens(x: jax.Array, segments: jax.Array | None) -> jax.Array:
    """Returns each row's last token that is no padding, [batch, features].

    Args:
      x: [batch, seq, features].
      segments: int [batch, seq], 0 for padding; None for no padding.
    """
    if segments is None:
        return x[:, -1]
    last = x.shape[1] - 1 - jnp.argmax(segments[:, ::-1] > 0, axis=1)
    return jnp.take_along_axis(x, last[:, None, None], axis=1)[:, 0]
