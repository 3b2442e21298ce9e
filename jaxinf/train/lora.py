"""Adapters of low rank beside matrices that stay as they are (LoRA, Hu et al. 2021).

    W [in, out]  ->  W + alpha / rank * A @ B,  A [in, rank], B [rank, out]

A and B are leaves beside W. A begins as PEFT has it, uniform within 1 / sqrt(in), and B
as zeros, so that the first step has the loss of the model as it was.

Invariant: a layer's adapter is applied to its input, so no step makes A @ B, or a
  gradient of W.
"""

import contextlib
import dataclasses
import functools
import math
import zlib
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxinf.command_line import UsageError
from jaxinf.exchange import LORA_A, LORA_B
from jaxinf.train.data.errors import shown_names
from jaxinf.train.freezing import Frozen, matches
from jaxinf.typing import PyTree

ALPHA = 16.0
"""Adapters are scaled by this over their rank, so that one rate suits all ranks, unless
``--lora`` names another."""

_ATTENTION = ("*/attn/*", "*/cross/*")
_HEADS = ("score/*", "classifier/*", "head/pooler/*", "head/classifier/*")
"""Heads of classes, which are trained whole and have no adapters."""


@dataclasses.dataclass(frozen=True)
class Lora:
    """Which matrices have adapters, and of which rank.

    Attributes:
      patterns: of the matrices' paths; by default those of attention.
      alpha: their scale, times the rank.
    """

    rank: int
    patterns: tuple[str, ...] = _ATTENTION
    alpha: float = ALPHA

    def takes(self, path: str, leaf: Any) -> bool:
        """Whether the leaf of a path is a layer's matrix and has an adapter."""
        if not path.endswith("/kernel") or len(leaf.shape) != 2:
            return False
        return matches(path, self.patterns) and not matches(path, _HEADS)

    def frozen(self, *, trains_head: bool) -> Frozen:
        """Returns the leaves that stay; a head of classes only if it is not trained."""
        heads = _HEADS if trains_head else ()
        return Frozen((f"*/{LORA_A}", f"*/{LORA_B}", *heads), all_but=True)


def parse_lora(text: str) -> Lora:
    """Reads ``RANK`` or ``RANK:PATTERN``, and ``,alpha=A`` behind it.

    Raises:
      ValueError: it is neither.
    """
    given, _, scale = text.partition(",alpha=")
    rank, separator, pattern = given.partition(":")
    with contextlib.suppress(ValueError):
        alpha, patterns = float(scale or ALPHA), (pattern,) if separator else _ATTENTION
        if int(rank) > 0 and 0 < alpha < math.inf and all(patterns):
            return Lora(int(rank), patterns, alpha)
    raise ValueError(
        f"{text!r}: expected a rank from 1 on, and after a colon a pattern of "
        "matrices, such as 8, '8:*/mlp/*' or 8,alpha=32"
    )


def with_new(lora: Lora, params: PyTree, seed: int = 0) -> PyTree:
    """Returns params with new adapters; refuses patterns without a matrix.

    Args:
      params: params of the model; leaves may be deferred.
    """
    leaves: dict[Any, Any] = flatten_dict(params)
    named = {"/".join(map(str, path)): path for path in leaves}
    taken = [name for name in named if lora.takes(name, leaves[named[name]])]
    if not taken:
        any_of = dataclasses.replace(lora, patterns=("*",))
        known = [name for name in named if any_of.takes(name, leaves[named[name]])]
        raise UsageError(
            f"--lora {lora.rank}:{','.join(lora.patterns)}: expected a pattern of the "
            f"model's matrices, found none that it matches; there are "
            f"{shown_names(known)}"
        )
    key = jax.random.key(seed)
    for name in taken:
        at, kernel = named[name][:-1], leaves[named[name]]
        num_in, num_out = kernel.shape
        own, bound = jax.random.fold_in(key, zlib.crc32(name.encode())), num_in**-0.5
        a = jax.random.uniform(own, (num_in, lora.rank), jnp.float32, -bound, bound)
        leaves[(*at, LORA_A)] = a.astype(kernel.dtype)
        leaves[(*at, LORA_B)] = jnp.zeros((lora.rank, num_out), kernel.dtype)
    return unflatten_dict(leaves)


def model_of(graphdef: Any, params: PyTree, alpha: float = ALPHA) -> Any:
    """Returns the model of params, with the adapters that are among them.

    Args:
      graphdef: the model's graph, which knows nothing of adapters.
    """
    leaves: dict[Any, Any] = flatten_dict(params)
    adapted = [path[:-1] for path in leaves if path[-1] == LORA_A]
    adapters = [[leaves.pop((*at, n)) for n in (LORA_A, LORA_B)] for at in adapted]
    model = nnx.merge(graphdef, unflatten_dict(leaves))
    for path, (a, b) in zip(adapted, adapters, strict=True):
        owner = functools.reduce(getattr, path[:-1], model)
        setattr(owner, path[-1], _Adapted(getattr(owner, path[-1]), a, b, alpha))
    return model


class _Adapted(nnx.Module):
    """A linear layer with its adapter."""

    def __init__(
        self, layer: nnx.Linear, a: jax.Array, b: jax.Array, alpha: float
    ) -> None:
        self._layer, self._a, self._b = layer, nnx.Param(a), nnx.Param(b)
        self._scale = alpha / a.shape[1]

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [..., in] to [..., out] in the layer's dtype."""
        given = x, self._a[...], self._b[...]
        own, a, b = (y.astype(self._layer.dtype) for y in given)
        return self._layer(x) + own @ a @ b * self._scale
