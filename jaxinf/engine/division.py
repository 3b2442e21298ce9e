"""Divides a store anew, for the processes and shardings of the run that will open it.

Invariant: a store that suits the run is only read, and what cannot be divided is
refused before anything is written.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

import jax
from jax.sharding import NamedSharding

from jaxinf.engine.sharding import held_shards
from jaxinf.processes import all_processes, join_group
from jaxinf.program import leaf_path
from jaxinf.store import (
    CopyLayout,
    LeafRecord,
    Shards,
    copy_step,
    is_divided_for,
    store_source,
)
from jaxinf.typing import PathLikeStr, PyTree

_LOG = logging.getLogger("jaxinf")


def divide_store(
    path: PathLikeStr, shardings: PyTree, csd_roots: Sequence[PathLikeStr] = ()
) -> None:
    """Divides a store among the processes and devices of this run, in place; blocks.

    All processes call it, before they open the store; process 0 sees all members. It
    does what ``jaxinf store copy PATH PATH --processes N`` does, if that is needed. A
    failure is raised in all processes; an unsuitable sharding is a ValueError.

    Args:
      shardings: A tree of ``NamedSharding`` like the params, as the run will have them.
      csd_roots: CSD roots for another number of processes, in which ``{process}`` is
        its number; by default the present ones.
    """
    path = Path(path).expanduser().absolute()
    group = join_group(path)
    roots = [str(Path(root).expanduser().absolute()) for root in csd_roots]
    if not group.is_alone:
        group.first("division", lambda: _divide(path, group.count, shardings, roots))
    elif all_processes("program").is_alone:
        _divide(path, 1, shardings, roots)


def _divide(
    path: Path, num_processes: int, shardings: PyTree, csd_roots: Sequence[str]
) -> None:
    leaves = jax.tree_util.tree_leaves_with_path(shardings)
    by_path = {leaf_path(keys): sharding for keys, sharding in leaves}

    def shards_of(leaf: LeafRecord) -> Shards:
        if leaf.path not in by_path:
            raise ValueError(
                f"shardings: leaf {leaf.name}: expected its sharding, found none; give "
                "a tree like the params"
            )
        sharding = by_path[leaf.path]
        if not isinstance(sharding, NamedSharding):
            return Shards((1,) * len(leaf.shape))
        return held_shards(sharding, leaf.shape)

    if is_divided_for(path, num_processes, shards_of):
        return
    with store_source(path, holds=True, checkpoints=True) as source:
        num_members = len(source.parts)
        layout = CopyLayout(
            csd_roots=csd_roots if num_members != num_processes else (),
            processes=num_processes,
            shards_of=shards_of,
        )
        copy_step(source, path, layout)
    dropped = "; checkpoints dropped, as not all had them: " if source.dropped else ""
    _LOG.warning(
        "%s: divided among %d processes, it was among %d%s",
        path,
        num_processes,
        num_members,
        dropped + ", ".join(source.dropped),
    )
