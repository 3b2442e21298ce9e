"""Cuts that a store keeps, because bits depend on them: part of each commit.

    commit.json    streams: digest of leaves and batch ─► version, fingerprint, cuts, …

Invariant: kept cuts are used, or refused by name; they are never replaced unless the
user asks. A step's cuts are durable with its commit.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import structs

from jaxinf.engine import Engine
from jaxinf.errors import StoreFormatError, StreamError
from jaxinf.store import KeptCuts, read_old_cuts
from jaxinf.streaming.program.lifetimes import OrderedProgram
from jaxinf.streaming.program.meshes import mesh_text

PLAN_VERSION = 2
"""Changed whenever equal cuts would give other programs, and so other bits."""

_GO_ON = "pass replan=True to go on with this one (bits then differ from here on)"


def cuts_record(ordered: OrderedProgram, cuts: Sequence[int]) -> Mapping[str, KeptCuts]:
    """Returns what a step's record keeps of its cuts.

    Its name is a digest of the shapes of params and batch.
    """
    traced = ordered.traced
    pairs = zip(traced.names, traced.params, strict=True)
    leaves = [f"{name}:{aval.dtype}{aval.shape}" for name, aval in pairs]
    batch = [f"{aval.dtype}{aval.shape}" for aval in traced.batch]
    text = "\n".join([*leaves, "", *batch])
    name = hashlib.sha256(text.encode()).hexdigest()[:32]
    mesh = {} if traced.mesh is None else dict(traced.mesh.shape)
    return {name: KeptCuts(PLAN_VERSION, ordered.fingerprint, tuple(cuts), mesh)}


def check_cuts(engine: Engine, streams: Mapping[str, KeptCuts]) -> None:
    """Raises StreamError if the last step's record keeps others of the same names."""
    kept = engine.files.finished.streams
    for name, cuts in streams.items():
        if kept.get(name, cuts) != cuts:
            raise _other_function(engine.path, kept[name])


def kept_cuts(engine: Engine, ordered: OrderedProgram) -> Sequence[int] | None:
    """Returns the cuts that a store keeps for these leaves and this batch, or None."""
    store, num_nodes = engine.path, len(ordered.forward)
    ((name, same),) = cuts_record(ordered, [0, num_nodes]).items()
    kept = engine.files.finished.streams.get(name) or read_old_cuts(store, name)
    if kept is None:
        return None
    if structs.replace(kept, cuts=same.cuts) != same:
        raise _other_function(store, kept)
    if kept.cuts[-1] != num_nodes:
        raise StoreFormatError(
            f"{store}: expected cuts of a program of {num_nodes} nodes, found "
            f"{[*kept.cuts]}; the store was edited or damaged: {_GO_ON}"
        )
    return kept.cuts


def _other_function(store: Path, kept: KeptCuts) -> StreamError:
    return StreamError(
        f"{store}: the store was trained with another loss function for params and "
        f"batches of these shapes, with other shardings of these (on "
        f"{mesh_text(kept.mesh)}), or by another version of jaxinf or JAX; {_GO_ON}"
    )
