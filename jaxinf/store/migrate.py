"""Converts stores of an older format version to the present one.

      checkpoints ──► slots' records ──► journal ──► jaxinf.json
        each document is replaced as a whole; the last one changes the store's version

Invariant: chunk files are not touched. The manifest, which has the version, is replaced
  last, so another call can continue an interrupted migration.
"""

from dataclasses import replace
from pathlib import Path

from jaxinf.errors import StoreFormatError
from jaxinf.store.checkpoint import checkpoint_names
from jaxinf.store.commit import CommitRecord
from jaxinf.store.directory import SLOTS, StoreDirectory
from jaxinf.store.journal import reseal_journal
from jaxinf.store.manifest import FORMAT_VERSION, Manifest
from jaxinf.store.owned import hold_store
from jaxinf.store.rebalancing import finish_rebalance
from jaxinf.store.stock_documents import stock_documents

__all__ = ["migrate"]


def migrate(path: Path) -> bool:
    """Converts a store and its checkpoints to the present format; blocks.

    From version 2: scalars get paths in this format's own spelling, and every document
    gets a checksum. The commit record has the checksums of other tools' documents.

    Args:
      path: the store.

    Returns:
      False if it had the present format already.

    Raises:
      StoreFormatError: the path is not a store, not one of jaxinf's, or a copy whose
        chunks on CSDs belong to another store.
      StoreLockedError: a run has the store open.
      StoreIOError: a document is missing, or a drive failed.
    """
    with hold_store(path, any_version=True) as directory:
        if directory.manifest.format_version == FORMAT_VERSION:
            return False
        _migrate(directory)
    return True


def _migrate(directory: StoreDirectory) -> None:
    path, manifest = directory.path, directory.manifest
    committed = directory.committed_slot()
    if committed is None:
        raise StoreFormatError(
            f"{path}: expected a committed step to migrate, found none: the store "
            "was never finished; remove it and start again"
        )
    finish_rebalance(directory)
    for name in checkpoint_names(directory):
        step = directory.step_path(f"checkpoints/{name}")
        held = Manifest.read(step / "jaxinf.json", any_version=True)
        _migrate_record(step, held)
        replace(held, format_version=FORMAT_VERSION).write(step / "jaxinf.json")
    _migrate_record(directory.step_path(committed), manifest)
    for slot in SLOTS:
        step = directory.step_path(slot)
        if slot != committed and (step / "commit.json").exists():
            _migrate_record(step, manifest)
    reseal_journal(directory)
    replace(manifest, format_version=FORMAT_VERSION).write(path / "jaxinf.json")


def _migrate_record(step: Path, manifest: Manifest) -> None:
    """Rewrites a step's record in the present format."""
    record = CommitRecord.read(step / "commit.json", any_version=True)
    documents = stock_documents(step, manifest)
    replace(record, documents=documents).write(step / "commit.json")
