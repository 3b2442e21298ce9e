"""A store that is divided anew when a run opens it: for its processes and shardings.

Invariant: a store that suits the run is only looked at, and what cannot be divided is
refused before it is; only members at different steps go to their common one first, as
at the start of any run.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import jax
from jax.sharding import NamedSharding

from jaxinf.engine.sharding import shard_counts, shard_holders
from jaxinf.program import leaf_path
from jaxinf.store import (
    LeafRecord,
    Shards,
    ShardsOf,
    in_line,
    is_divided_for,
    num_processes,
    redivide,
)
from jaxinf.typing import PyTree

_LOG = logging.getLogger("jaxinf")


@dataclass(frozen=True)
class Redivision:
    """The division that a run needs.

    Attributes:
      csd_roots: CSD roots for another number of processes; empty for those of before.
      shardings: of the params' leaves, as the run has them; None if it is not known.
      num_devices: JAX devices of all processes. All ask for it when this is made, since
        JAX starts in all of them together.
    """

    csd_roots: Sequence[str] = ()
    shardings: PyTree | None = None
    num_devices: int = field(default_factory=jax.device_count)

    def apply(self, path: Path, count: int) -> None:
        """Divides a store among so many processes, if it is not; blocks.

        Without shardings one that is among as many stays as it is, and for others the
        devices are taken to be in a line.

        Raises:
          ValueError: a sharding does not suit its leaf, or a CSD root is wrong.
          StoreError: as `jaxinf.store.redivide`.
        """
        found = num_processes(path) if path.is_dir() else None
        if found is None:
            return
        shards_of: ShardsOf
        if self.shardings is None:
            shards_of = partial(in_line, count=count, num_devices=self.num_devices)
        else:
            shards_of = partial(_shards, _by_path(self.shardings))
        if found == count and (
            self.shardings is None or is_divided_for(path, shards_of)
        ):
            return
        roots = self.csd_roots if found != count else ()
        done = redivide(path, count, roots, shards_of=shards_of)
        _LOG.warning(
            "%s: divided among %d processes, it was among %s; leaves with a new grid: "
            "%s; checkpoints dropped, as not all had them: %s",
            path,
            count,
            found,
            ", ".join(done.regridded) or "none",
            ", ".join(done.dropped) or "none",
        )


def redivision_for(
    processes: str | None, csd_roots: Iterable[Path], shardings: PyTree | None
) -> Redivision | None:
    """Returns how `open_store` may divide a store anew; None if it may not.

    Raises:
      ValueError: the arguments do not go together.
    """
    if processes not in (None, "rebalance"):
        raise ValueError(f"processes={processes!r}: expected 'rebalance' or None")
    if processes is not None:
        return Redivision([*map(str, csd_roots)], shardings)
    if shardings is not None:
        raise ValueError(
            "shardings: expected with processes='rebalance', which gives a store the "
            "grid for them; leave it out"
        )
    return None


def _by_path(shardings: PyTree) -> dict[tuple[str, ...], NamedSharding]:
    leaves = jax.tree_util.tree_leaves_with_path(shardings)
    return {leaf_path(keys): found for keys, found in leaves}


def _shards(
    by_path: Mapping[tuple[str, ...], NamedSharding], leaf: LeafRecord
) -> Shards:
    sharding = by_path.get(leaf.path)
    if sharding is None:
        raise ValueError(
            f"shardings: leaf {leaf.name}: expected its sharding, found none; give a "
            "tree like the params"
        )
    if not isinstance(sharding, NamedSharding):
        return Shards((1,) * len(leaf.shape))
    try:
        counts = shard_counts(sharding, leaf.shape)
    except ValueError as error:
        raise ValueError(f"shardings: leaf {leaf.name}: {error}") from error
    return Shards(counts, shard_holders(sharding, leaf.shape))
