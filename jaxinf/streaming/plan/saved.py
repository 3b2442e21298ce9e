"""Plans kept in a store, because bits depend on the cuts of a program.

    STORE/stream/<digest of leaves and batch>.json    version, fingerprint, cuts, …

Invariant: a kept plan is used, or refused by name; it is never replaced unless the user
  asks.
"""

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from jax.sharding import Mesh

from jaxinf.errors import BudgetError, StoreFormatError, StreamError
from jaxinf.store import (
    KeptPlan,
    check_plans_folder,
    plans_folder,
    read_plan,
    write_document,
)
from jaxinf.streaming.plan.calls import Plan, Policy
from jaxinf.streaming.plan.fit import PLAN_VERSION, Prepared
from jaxinf.streaming.program.meshes import mesh_text


def saved_cuts(folder: Path, ready: Prepared) -> Sequence[int] | None:
    """Reads the store's cuts for these leaves and this batch; None if it has none.

    Raises:
      StreamError: The plan is for another function, version or mesh.
      StoreFormatError: The plan is damaged.
    """
    path = check_plans_folder(folder) / _name(ready)
    if not os.path.lexists(path):
        return None
    kept = read_plan(path)
    _check_mesh(path, kept, ready.traced.mesh)
    if kept.version != PLAN_VERSION or kept.fingerprint != ready.fingerprint:
        raise StreamError(
            f"{path}: the store was trained with another loss function for params and "
            "batches of these shapes, with other shardings of these, or by another "
            "version of jaxinf or JAX; pass replan=True to go on with this one and "
            "replace the kept plan"
        )
    num_nodes = len(ready.lifetimes.forward)
    if kept.cuts[-1] != num_nodes:
        raise StoreFormatError(
            f"{path}: expected cuts of a program of {num_nodes} nodes, found "
            f"{[*kept.cuts]}; the file was edited or damaged: remove it, and the "
            "program is planned anew (its bits may differ then)"
        )
    return kept.cuts


def saved_plan(
    folder: Path | None,
    ready: Prepared,
    cuts: Sequence[int],
    budget_bytes: int,
    policy: Policy,
    measure: Callable[[Plan], int],
    limit: str,
) -> Plan:
    """Returns the plan of cuts that a store keeps.

    Args:
      folder, ready: As for `saved_cuts`; None for cuts that none keeps.
      budget_bytes: Memory for a step's programs.
      policy: As for `Prepared.plan`; it is not kept.

    Raises:
      BudgetError: It needs more memory.
    """
    plan = ready.plan_of(cuts, policy)
    peak = measure(plan)
    if peak > budget_bytes:
        kept = "" if folder is None else f" ({plans_folder(folder) / _name(ready)})"
        raise BudgetError(
            limit,
            f"it leaves {budget_bytes} bytes for the plan that the store was trained "
            f"with{kept}, which takes {peak}",
            peak - budget_bytes,
            ", or pass replan=True for another plan (bits then differ from here on)",
        )
    return plan.varied(peak_bytes=peak)


def save_plan(folder: Path, ready: Prepared, plan: Plan) -> None:
    """Keeps a plan for later runs."""
    path = plans_folder(folder) / _name(ready)
    mesh = ready.traced.mesh
    kept = KeptPlan(
        PLAN_VERSION,
        ready.fingerprint,
        tuple(plan.cuts),
        dict(mesh.shape) if mesh is not None else {},
    )
    write_document(path, kept)


def _check_mesh(path: Path, kept: KeptPlan, mesh: Mesh | None) -> None:
    before, now = kept.mesh, dict(mesh.shape) if mesh else {}
    if before != now:
        raise StreamError(
            f"{path}: the store was trained on {mesh_text(before)}, found arrays on "
            f"{mesh_text(now)}; use a mesh like that, or pass replan=True to go on "
            "with this one and replace the kept plan (bits then differ from here on)"
        )


def _name(ready: Prepared) -> str:
    traced = ready.traced
    leaves = [
        f"{name}:{aval.dtype}{aval.shape}"
        for name, aval in zip(traced.names, traced.params, strict=True)
    ]
    batch = [f"{aval.dtype}{aval.shape}" for aval in traced.batch]
    text = "\n".join([*leaves, "", *batch])
    return f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"
