"""``rebalance.json``: the chunks' old and new places while a rebalance is under way.

Invariant: the journal exists from before the first file is made at a new place until
the last is removed from an old one.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxinf.schema import SchemaError
from jaxinf.store import schemas
from jaxinf.store.directory import StoreDirectory
from jaxinf.store.documents import (
    check_seal,
    no_document,
    read_document,
    write_document,
)
from jaxinf.store.manifest import Manifest
from jaxinf.typing import JsonValue

JOURNAL = "rebalance.json"
"""The journal's name in the store."""

_WHAT = "the journal of a rebalance of this store"
_REMEDY = "restore it, or remove it if jaxinf verify finds no damage"


def write_journal(old: StoreDirectory, new: StoreDirectory) -> None:
    """Writes the store's places before and after; blocks until that is durable."""
    document = {"from": _places(old.manifest), "to": _places(new.manifest)}
    write_document(old.path / JOURNAL, document)


def _places(manifest: Manifest) -> dict[str, JsonValue]:
    chunks: list[JsonValue] = [list(leaf.csds) for leaf in manifest.leaves]
    return {"csds": list(manifest.csds), "chunks": chunks}


def read_journal(directory: StoreDirectory) -> tuple[Manifest, Manifest] | None:
    """Returns the store before and after; None if no rebalance is under way."""
    file = directory.path / JOURNAL
    if not file.exists():
        return None
    held = directory.manifest
    raw, document = read_document(file, _WHAT, _REMEDY)
    check_seal(file, raw, _WHAT, _REMEDY)
    try:
        schemas.JOURNAL.check(document)
        return _placed(held, document["from"]), _placed(held, document["to"])
    except SchemaError as error:
        raise no_document(file, _WHAT, _REMEDY, error) from error


def _placed(held: Manifest, side: Mapping[str, Any]) -> Manifest:
    """Returns the store with the chunks' places of one side of a journal."""
    counts = [len(leaf.csds) for leaf in held.leaves]
    if [len(csds) for csds in side["chunks"]] != counts:
        raise SchemaError("expected as many chunks as the store has, found others")
    num_csds = max(1, len(side["csds"]))
    if any(csd >= num_csds for csds in side["chunks"] for csd in csds):
        raise SchemaError(f"expected CSDs below {num_csds}, found others")
    leaves = zip(held.leaves, side["chunks"], strict=True)
    return replace(
        held,
        csds=tuple(side["csds"]),
        leaves=tuple(replace(leaf, csds=tuple(csds)) for leaf, csds in leaves),
    )
