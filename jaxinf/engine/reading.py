"""Reads leaves of the committed step onto JAX devices, or into the host's memory.

Invariant: nothing is committed meanwhile, since the caller has paused the steps. In a
run of several processes all call these functions alike.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxinf.engine.opened import OpenStore
from jaxinf.engine.sharding import (
    boxes_with_holders,
    gathered_whole,
    own_parts,
    put_together,
)
from jaxinf.engine.state import committed_reader, read_state
from jaxinf.errors import StoreMismatchError
from jaxinf.layout import covers
from jaxinf.program import leaf_infos
from jaxinf.store import LeafRecord, StateRecord, leaf_name
from jaxinf.typing import Array, PyTree


def check_like(opened: OpenStore, like: PyTree, what: str = "`like`") -> None:
    """Compares a tree of arrays, or of shapes and dtypes, with the store's leaves.

    Args:
      what: name of the argument, for messages.

    Raises:
      StoreMismatchError: `like` has other leaves or shapes than the store.
    """
    held = [(leaf.name, leaf.shape) for leaf in opened.directory.manifest.leaves]
    asked = [(leaf_name(i.path), i.shape) for i in leaf_infos(like)]
    if held != asked:
        difference = [pair for pair in asked if pair not in held][:3]
        raise StoreMismatchError(
            f"{opened.options.path}: {what} has other leaves than the store; not in "
            f"the store: {difference or 'none'}, the store has {len(held)} leaves, "
            f"{what} {len(asked)}"
        )


def read_array(opened: OpenStore, leaf: LeafRecord, state: StateRecord) -> Array:
    """Returns a leaf's whole state, decoded; blocks."""
    group = opened.group
    with committed_reader(opened) as reader:
        if group.is_alone:
            return reader.read(leaf, state)
        part = group.in_all(f"read {leaf.name}", lambda: reader.read_held(leaf, state))
        return gathered_whole(part)


def read_leaf(opened: OpenStore, number: int, like: Any, *states: int) -> jax.Array:
    """Reads a leaf's committed state, or its average, onto JAX devices; blocks.

    Args:
      like: the leaf's shape, the wanted dtype and, optionally, a sharding.
    """
    shape, dtype = tuple(like.shape), np.dtype(like.dtype)

    def read_box(origin: Sequence[int], extent: Sequence[int]) -> np.ndarray:
        is_whole = opened.directory.manifest.leaves[number].is_whole
        out = (np.empty if is_whole else np.zeros)(extent, dtype)
        read_state(opened, number, out, origin, *states)
        return out

    whole = cache(lambda: read_box([0] * len(shape), shape))

    def read(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        bounds = [s.indices(n) for s, n in zip(index, shape, strict=True)]
        box = (
            [start for start, *_ in bounds],
            [stop - start for start, stop, _ in bounds],
        )
        return read_box(*box) if opened.divides(number, *box) else whole()[index]

    sharding = getattr(like, "sharding", None)
    if not opened.group.is_alone:
        return _read_parts(opened, number, shape, sharding, read_box)
    # As uncommitted as `like`; otherwise a jitted step would be compiled again.
    if sharding is None or not getattr(like, "committed", True):
        return jax.device_put(read(tuple(slice(None) for _ in shape)))
    return jax.make_array_from_callback(shape, sharding, read)


def _read_parts(
    opened: OpenStore,
    number: int,
    shape: tuple[int, ...],
    sharding: Any,
    read_box: Callable[[Sequence[int], Sequence[int]], np.ndarray],
) -> jax.Array:
    """Reads a leaf whose chunks several processes hold; all call it.

    Where the shards' holders own their chunks, each shard is put together by
    itself; otherwise the leaf is in the memory of every host for a while.
    """
    in_all = opened.group.in_all
    what = f"params of {opened.directory.manifest.leaves[number].name}"
    is_global = isinstance(sharding, NamedSharding)
    is_global = is_global and isinstance(sharding.mesh, Mesh)
    if is_global and _fits(opened, number, sharding, shape):
        own = in_all(what, lambda: own_parts(sharding, shape, read_box))
        return put_together(own)
    part = in_all(what, lambda: read_box([0] * len(shape), shape))
    whole = gathered_whole(part)
    if sharding is None or not is_global:
        return jax.device_put(whole, sharding)
    return jax.make_array_from_callback(shape, sharding, whole.__getitem__)


def _fits(
    opened: OpenStore, number: int, sharding: NamedSharding, shape: tuple[int, ...]
) -> bool:
    """Whether each chunk's owner has a device with the chunk's shard."""
    record = opened.directory.manifest.leaves[number]
    for start, extent, holders in boxes_with_holders(sharding, shape):
        try:
            chunks = covers(record.grid, start, extent)
        except ValueError:
            return False
        if not {record.owners[n] for n in chunks} <= holders:
            return False
    return True
