"""Adapters of low rank beside frozen matrices (LoRA, Hu et al. 2021).

    W [in, out]  ->  W + alpha / rank * A @ B,  A [in, rank], B [rank, out]

A and B are leaves beside W. A begins as in PEFT, uniform within 1 / sqrt(in), and B as
zeros, so that the first step has the loss of the model without adapters.

Invariant: a layer's adapter is applied to its input, so no step makes A @ B, or a
gradient of W.
"""

import contextlib
import dataclasses
import functools
import math
import re
import zlib
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxinf.command_line import UsageError
from jaxinf.exchange import LORA_A, LORA_B
from jaxinf.train.data.errors import list_names
from jaxinf.train.freezing import FrozenLeaves, matches_any
from jaxinf.typing import PyTree

DEFAULT_ALPHA = 16.0
"""Adapters are scaled by this over their rank, so that one rate suits all ranks, unless
``--lora`` names another."""

_ATTENTION = ("*/attn/*", "*/cross/*")
_HEADS = ("score/*", "classifier/*", "head/pooler/*", "head/classifier/*")
"""Heads of classes, which are trained whole and have no adapters."""


@dataclasses.dataclass(frozen=True)
class Lora:
    """The adapters of a run: patterns of matrices, and alpha, the scale times rank."""

    rank: int
    patterns: tuple[str, ...] = _ATTENTION
    alpha: float = DEFAULT_ALPHA

    def has_adapter(self, path: str, leaf: Any) -> bool:
        if not path.endswith("/kernel") or len(leaf.shape) != 2:
            return False
        return matches_any(path, self.patterns) and not matches_any(path, _HEADS)

    def frozen_leaves(self, *, trains_head: bool) -> FrozenLeaves:
        """Returns all leaves but adapters, and but the head of classes if trained."""
        heads = _HEADS if trains_head else ()
        return FrozenLeaves((f"*/{LORA_A}", f"*/{LORA_B}", *heads), is_inverted=True)


def parse_lora(text: str) -> Lora:
    """Parses ``RANK[:PATTERN][,alpha=A]``, or raises ValueError."""
    selection, _, scale = text.partition(",alpha=")
    rank, separator, pattern = selection.partition(":")
    with contextlib.suppress(ValueError):
        alpha = float(scale or DEFAULT_ALPHA)
        patterns = (pattern,) if separator else _ATTENTION
        if int(rank) > 0 and 0 < alpha < math.inf and all(patterns):
            return Lora(int(rank), patterns, alpha)
    raise ValueError(
        f"{text!r}: expected a rank from 1 on, and after a colon a pattern of "
        "matrices, such as 8, '8:*/mlp/*' or 8,alpha=32"
    )


def add_adapters(lora: Lora, params: PyTree, seed: int = 0) -> PyTree:
    """Adds new adapters to params, whose leaves may be deferred."""
    leaves: dict[Any, Any] = flatten_dict(params)
    paths = {"/".join(map(str, path)): path for path in leaves}

    def adapted_by(lora: Lora) -> list[str]:
        return [n for n, path in paths.items() if lora.has_adapter(n, leaves[path])]

    if not (names := adapted_by(lora)):
        matrices = adapted_by(dataclasses.replace(lora, patterns=("*",)))
        forms = list_names({re.sub(r"^([a-z])\d+/", r"\1*/", n) for n in matrices})
        raise UsageError(
            f"--lora {lora.rank}:{','.join(lora.patterns)}: expected a pattern of the "
            f"model's matrices, found none that it matches; there are {forms}"
        )
    key = jax.random.key(seed)
    for name in names:
        layer, kernel = paths[name][:-1], leaves[paths[name]]
        num_in, num_out = kernel.shape
        shape, bound = (num_in, lora.rank), num_in**-0.5
        leaf_key = jax.random.fold_in(key, zlib.crc32(name.encode()))
        a = jax.random.uniform(leaf_key, shape, jnp.float32, -bound, bound)
        leaves[(*layer, LORA_A)] = a.astype(kernel.dtype)
        leaves[(*layer, LORA_B)] = jnp.zeros((lora.rank, num_out), kernel.dtype)
    return unflatten_dict(leaves)


def merge_model(graphdef: Any, params: PyTree, alpha: float = DEFAULT_ALPHA) -> Any:
    """Returns the model of a graph without adapters, and params that may have some."""
    leaves: dict[Any, Any] = flatten_dict(params)
    layers = [path[:-1] for path in leaves if path[-1] == LORA_A]
    adapters = [[leaves.pop((*path, n)) for n in (LORA_A, LORA_B)] for path in layers]
    model = nnx.merge(graphdef, unflatten_dict(leaves))
    for (*owner_path, name), (a, b) in zip(layers, adapters, strict=True):
        owner = functools.reduce(getattr, owner_path, model)
        setattr(owner, name, _AdaptedLinear(getattr(owner, name), a, b, alpha))
    return model


class _AdaptedLinear(nnx.Module):
    def __init__(
        self, layer: nnx.Linear, a: jax.Array, b: jax.Array, alpha: float
    ) -> None:
        self._layer, self._a, self._b = layer, nnx.Param(a), nnx.Param(b)
        self._scale = alpha / a.shape[1]

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [..., in] to [..., out] in the layer's dtype."""
        factors = x, self._a[...], self._b[...]
        cast, a, b = (y.astype(self._layer.dtype) for y in factors)
        return self._layer(x) + cast @ a @ b * self._scale
