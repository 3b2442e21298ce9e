"""The step before the committed one, as far as its slot still has it.

Invariant: what the spare slot holds counts only where its record and every chunk of it
are as they were written: the removal of a record is not durable before the slot is
rewritten.
"""

from jaxinf.errors import StoreFormatError
from jaxinf.store.commit import CommitRecord
from jaxinf.store.damage import Damage
from jaxinf.store.directory import Slot, StoreDirectory, other_slot
from jaxinf.store.verify import Verifier

__all__ = ["read_spare", "restore_spare", "verify_spare"]


def read_spare(directory: StoreDirectory) -> tuple[Slot, CommitRecord] | None:
    """The spare slot and its record, not verified; None where it has none."""
    committed = directory.committed_slot()
    if committed is None:
        return None
    spare = other_slot(committed)
    record = directory.step_path(spare) / "commit.json"
    if not record.exists():
        return None
    try:
        return spare, CommitRecord.read(record)
    except StoreFormatError:
        return None


def verify_spare(directory: StoreDirectory, spare: Slot) -> list[Damage]:
    """All of the spare slot that is not as its record says; reads every chunk."""
    return Verifier(directory).verify(directory.step_path(spare))


def restore_spare(directory: StoreDirectory, spare: Slot) -> CommitRecord:
    """Makes the spare slot's step the committed one again; it was just verified.

    The caller holds the store's lock. Until the flip the committed step stays.
    """
    record = CommitRecord.read(directory.step_path(spare) / "commit.json")
    directory.sync()  # chunks that were read may still be on their way to the drive
    directory.publish(spare, record)
    return record
