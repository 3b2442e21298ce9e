"""``rebalance.json``: the chunks' old and new places while a rebalance is under way.

Invariant: the journal exists from before the first file is made at a new place until
the last is removed from an old one.
"""

from dataclasses import replace

import msgspec

from jaxinf.documents import Document
from jaxinf.store.directory import StoreDirectory
from jaxinf.store.documents import (
    Csds,
    Roots,
    read_document,
    refusing,
    write_document,
)
from jaxinf.store.manifest import Manifest

JOURNAL = "rebalance.json"
"""The journal's name in the store."""


class _Places(Document, frozen=True):
    csds: Roots
    chunks: tuple[Csds, ...]


class _Journal(Document, frozen=True):
    old: _Places = msgspec.field(name="from")
    new: _Places = msgspec.field(name="to")

    def __post_init__(self) -> None:
        if not self.new.csds:
            raise ValueError("expected a CSD to move chunks to, found none")


_WHAT = "the journal of a rebalance of this store"
_REMEDY = "restore it, or remove it if jaxinf verify finds no damage"


def write_journal(old: StoreDirectory, new: StoreDirectory) -> None:
    """Writes the store's places before and after; blocks until that is durable."""
    journal = _Journal(_places(old.manifest), _places(new.manifest))
    write_document(old.path / JOURNAL, journal)


def _places(manifest: Manifest) -> _Places:
    return _Places(manifest.csds, tuple(leaf.csds for leaf in manifest.leaves))


def read_journal(directory: StoreDirectory) -> tuple[Manifest, Manifest] | None:
    """Returns the store before and after; None if no rebalance is under way."""
    file = directory.path / JOURNAL
    if not file.exists():
        return None
    held = directory.manifest
    journal = read_document(file, _Journal, _WHAT, _REMEDY)
    with refusing(file, _WHAT, _REMEDY):
        return _placed(held, journal.old), _placed(held, journal.new)


def _placed(held: Manifest, side: _Places) -> Manifest:
    """Returns the store with the chunks' places of one side of a journal."""
    counts = [len(leaf.csds) for leaf in held.leaves]
    if [len(csds) for csds in side.chunks] != counts:
        raise ValueError("expected as many chunks as the store has, found others")
    num_csds = max(1, len(side.csds))
    if any(csd >= num_csds for csds in side.chunks for csd in csds):
        raise ValueError(f"expected CSDs below {num_csds}, found others")
    leaves = zip(held.leaves, side.chunks, strict=True)
    return replace(
        held,
        csds=side.csds,
        leaves=tuple(replace(leaf, csds=csds) for leaf, csds in leaves),
    )
