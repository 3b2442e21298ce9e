"""Leaves that are handed over whole, since the store's chunks do not divide at shards.

A trace of `init` does not know the shardings that ``jit(init, out_shardings=…)`` gives
its results, so the store is made for whole leaves. Invariant: the program's arrays keep
their own shardings; only the calls of the host see others.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxinf.engine import Store, shard_counts
from jaxinf.optimizer.host_side import HostSide
from jaxinf.optimizer.sharding import traced_shardings

_Shardings = tuple[NamedSharding, ...]


@dataclass(frozen=True)
class Resharding:
    """The way of the leaves to the store's shardings and back; traceable.

    Attributes:
      own: the leaves' shardings in the program; empty for one JAX device.
      stored: those in which the leaves are handed over.
    """

    own: _Shardings
    stored: _Shardings

    @classmethod
    def of(
        cls, host: HostSide, given: _Shardings, leaves: Sequence[jax.Array]
    ) -> "Resharding":
        """Finds both shardings; warns if leaves have to be gathered.

        Args:
          given: the leaves' shardings if the caller knows them, or empty.
        """
        if given:
            return cls(given, given)
        own = traced_shardings(leaves)
        stored = _stored_shardings(host.store, own, leaves)
        if stored != own:
            host.warn_of_gathering(own[0].mesh.size)
        return cls(own, stored)

    def to_store(self, values: Sequence[Any]) -> list[Any]:
        """Moves an array, a tuple of arrays or None of each leaf; all or no leaves."""
        return _moved(values, self.own, self.stored)

    def to_program(self, values: Sequence[Any]) -> list[Any]:
        return _moved(values, self.stored, self.own)


def _stored_shardings(
    store: Store, shardings: _Shardings, leaves: Sequence[jax.Array]
) -> _Shardings:
    """Returns the shardings in which leaves can be handed over.

    Args:
      store: the store; one that is not made yet divides as needed.
      shardings: the leaves' own; empty for one JAX device.

    Returns:
      The same, with replicated leaves where the chunks do not divide at the shards.
    """
    if store._training.commit is None:
        return shardings
    if len(store._manifest.leaves) != len(leaves):
        return shardings  # refused where the store is bound
    return tuple(
        sharding
        if _divides(store, number, sharding, leaves[number].shape)
        else NamedSharding(sharding.mesh, PartitionSpec())
        for number, sharding in enumerate(shardings)
    )


def _moved(values: Sequence[Any], now: _Shardings, then: _Shardings) -> list[Any]:
    if now == then or not values:
        return list(values)
    return [
        value if old == new else jax.sharding.reshard(value, new)
        for value, old, new in zip(values, now, then, strict=True)
    ]


def _divides(
    store: Store, leaf: int, sharding: NamedSharding, shape: tuple[int, ...]
) -> bool:
    local = sharding.shard_shape(shape)
    return all(
        store._training.opened.divides(
            leaf, [n * extent for n, extent in zip(place, local, strict=True)], local
        )
        for place in itertools.product(*map(range, shard_counts(sharding, shape)))
    )
