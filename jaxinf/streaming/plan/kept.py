"""Cuts that a store keeps, because bits depend on them: part of each commit.

    commit.json    streams: digest of leaves and batch ─► version, fingerprint, cuts, …

Invariant: kept cuts are used, or refused by name; they are never replaced unless the
user asks. A step's cuts are durable with its commit.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxinf.errors import StoreFormatError, StreamError
from jaxinf.store import CommitRecord, KeptPlan, plan_of_before
from jaxinf.streaming.plan.fit import PLAN_VERSION, OrderedProgram
from jaxinf.streaming.program.meshes import mesh_text
from jaxinf.streaming.program.trace import Traced

_GO_ON = "pass replan=True to go on with this one (bits then differ from here on)"


def streams_of(ready: OrderedProgram, cuts: Sequence[int]) -> Mapping[str, KeptPlan]:
    """Returns what a step's record keeps of the cuts that it was computed with."""
    own = KeptPlan(PLAN_VERSION, ready.fingerprint, tuple(cuts), _mesh(ready))
    return {_name(ready.traced): own}


def check_same(
    store: Path, record: CommitRecord, streams: Mapping[str, KeptPlan]
) -> None:
    """Raises StreamError if the last step's record keeps others of the same names."""
    if any(record.streams.get(name, own) != own for name, own in streams.items()):
        raise StreamError(_of_another(store))


def kept_cuts(
    store: Path, record: CommitRecord, ready: OrderedProgram
) -> Sequence[int] | None:
    """Returns the cuts that a store keeps for these leaves and this batch, or None.

    Args:
      record: Of the store's last step.

    Raises:
      StreamError: They are of another function, version or mesh.
      StoreFormatError: They are damaged.
    """
    name, mesh = _name(ready.traced), _mesh(ready)
    kept = record.streams.get(name) or plan_of_before(store, name)
    if kept is None:
        return None
    if kept.mesh != mesh:
        raise StreamError(
            f"{store}: the store was trained on {mesh_text(kept.mesh)}, found arrays "
            f"on {mesh_text(mesh)}; use a mesh like that, or {_GO_ON}"
        )
    if kept.rows:
        raise StreamError(
            f"{store}: the store was trained with {len(kept.rows)} tables in blocks of "
            f"rows, which this version of jaxinf does not cut; {_GO_ON}"
        )
    if kept.version != PLAN_VERSION or kept.fingerprint != ready.fingerprint:
        raise StreamError(_of_another(store))
    num_nodes = len(ready.lifetimes.forward)
    if kept.cuts[-1] != num_nodes:
        raise StoreFormatError(
            f"{store}: expected cuts of a program of {num_nodes} nodes, found "
            f"{[*kept.cuts]}; the store was edited or damaged: {_GO_ON}"
        )
    return kept.cuts


def _of_another(store: Path) -> str:
    return (
        f"{store}: the store was trained with another loss function for params and "
        "batches of these shapes, with other shardings of these, or by another "
        f"version of jaxinf or JAX; {_GO_ON}"
    )


def _mesh(ready: OrderedProgram) -> dict[str, int]:
    mesh = ready.traced.mesh
    return {} if mesh is None else dict(mesh.shape)


def _name(traced: Traced) -> str:
    pairs = zip(traced.names, traced.params, strict=True)
    leaves = [f"{name}:{aval.dtype}{aval.shape}" for name, aval in pairs]
    batch = [f"{aval.dtype}{aval.shape}" for aval in traced.batch]
    text = "\n".join([*leaves, "", *batch])
    return hashlib.sha256(text.encode()).hexdigest()[:32]
