"""The step before the committed one, if the spare slot still has it.

Invariant: the spare slot's step is used only if its record and every chunk verify. A
record alone proves nothing, because its removal need not be durable when the slot is
rewritten.
"""

from jaxinf.errors import StoreFormatError
from jaxinf.store.commit import CommitRecord
from jaxinf.store.damage import Damage
from jaxinf.store.directory import Slot, StoreDirectory, other_slot
from jaxinf.store.verify import Verifier


def read_spare(directory: StoreDirectory) -> tuple[Slot, CommitRecord] | None:
    """Returns the spare slot and its record, not verified; None without a record."""
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
    """Returns all damage of the spare slot's step; reads every chunk."""
    return Verifier(directory).verify(directory.step_path(spare))


def restore_spare(directory: StoreDirectory, spare: Slot) -> CommitRecord:
    """Makes the spare slot's step, just verified, the committed one again.

    The caller holds the store's lock. The committed step stays until the flip.
    """
    record = CommitRecord.read(directory.step_path(spare) / "commit.json")
    directory.sync()  # chunks that were read may not be durable yet
    directory.publish(spare, record)
    return record
