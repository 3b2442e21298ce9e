"""Stores of an older format version brought to the present one.

      checkpoints ──► slots' records ──► journal ──► jaxinf.json
        each document is replaced whole; the store is of the old version until the last

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
    """Brings a store and its checkpoints to the present format; blocks.

    From version 2: scalars get paths in this format's own words, and every document a
    checksum; those of other tools' formats get theirs in the commit record.

    Args:
      path: the store.

    Returns:
      False if it was of the present format already.

    Raises:
      StoreFormatError: no store, one that no version of jaxinf wrote, or a copy whose
        chunks on CSDs are another's.
      StoreLockedError: a run has it open.
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
    """Returns a record of any supported format in the present one."""
    record = CommitRecord.read(step / "commit.json", any_version=True)
    documents = stock_documents(step, manifest)
    replace(record, documents=documents).write(step / "commit.json")
