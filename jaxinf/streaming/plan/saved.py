"""Plans kept in a store, because bits depend on the cuts of a program.

    STORE/stream/<digest of leaves and batch>.json    version, fingerprint, cuts, …

Invariant: a kept plan is used, or refused by name; it is never replaced unless the user
  asks.
"""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from jaxinf.errors import BudgetError, StoreFormatError, StreamError
from jaxinf.store import (
    KeptPlan,
    check_plans_folder,
    plans_folder,
    read_plan,
    write_document,
)
from jaxinf.streaming.plan.fit import PLAN_VERSION, Prepared
from jaxinf.streaming.plan.memory import Division
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
    kept, mesh = read_plan(path), _mesh(ready)
    if kept.mesh != mesh:
        raise StreamError(
            f"{path}: the store was trained on {mesh_text(kept.mesh)}, found arrays on "
            f"{mesh_text(mesh)}; use a mesh like that, or pass replan=True to go on "
            "with this one and replace the kept plan (bits then differ from here on)"
        )
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


def check_fits(
    folder: Path | None, ready: Prepared, peak_bytes: int, division: Division
) -> None:
    """Refuses kept cuts that need more memory than there is: BudgetError.

    Args:
      folder: The store; None if it is another process's that keeps them.
      peak_bytes: Memory of a step with these cuts.
    """
    most = division.programs + division.spare
    if peak_bytes > most:
        kept = "" if folder is None else f" ({plans_folder(folder) / _name(ready)})"
        raise BudgetError(
            division.limit,
            f"it leaves {most} bytes for the plan that the store was trained "
            f"with{kept}, which takes {peak_bytes}",
            peak_bytes - most,
            ", or pass replan=True for another plan (bits then differ from here on)",
        )


def save_cuts(folder: Path, ready: Prepared, cuts: Sequence[int]) -> None:
    """Keeps a plan for later runs."""
    kept = KeptPlan(PLAN_VERSION, ready.fingerprint, tuple(cuts), _mesh(ready))
    write_document(plans_folder(folder) / _name(ready), kept)


def _mesh(ready: Prepared) -> dict[str, int]:
    mesh = ready.traced.mesh
    return {} if mesh is None else dict(mesh.shape)


def _name(ready: Prepared) -> str:
    traced = ready.traced
    pairs = zip(traced.names, traced.params, strict=True)
    leaves = [f"{name}:{aval.dtype}{aval.shape}" for name, aval in pairs]
    batch = [f"{aval.dtype}{aval.shape}" for aval in traced.batch]
    text = "\n".join([*leaves, "", *batch])
    return f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"
