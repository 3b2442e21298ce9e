"""The store on disk: its files and steps, and how they are read, kept and copied.

    file                 question that it answers
    names.py             what are leaves, arrays and scalars called?
    documents.py         how is a JSON document sealed, and a stranger's checked?
    manifest.py          jaxinf.json: which leaves, in which chunks, on which CSDs?
    carried_arrays.py    which further arrays does a step carry?
    commit_record.py     commit.json: what does a commit say, and which are its actions?
    lock.py              which process may write?
    directory.py         where does a file lie, and how does a slot become a step?
    claims.py            whose are the chunks on a CSD?
    step_files.py        which files make up a step, for us and for other zarr readers?
    creation.py          how is a store made or removed, and is there room for it?
    steps.py             which steps does a store have, and how is one pinned?
    checkpoints.py       how is a step kept, and restored?
    members.py           which stores make up a run, and which step do they share?
    reader.py            how is a chunk read, and verified?
    verify.py            what in a step is damaged?
    formats.py           which codecs do the states have?
    division.py          which process and which CSD gets which chunk?
    copy_source.py       what does a copy read?
    staging.py           how does a copy appear whole?
    copying.py           how is a step copied or recoded? (`copy_step`)

A file imports only from those above it.

Invariant: at every instant the last committed step is complete on the drives
(docs/format.md gives the reasons).
"""

from jaxinf.store.carried_arrays import (
    CARRY,
    CarriedArray,
    check_carry,
    read_carry,
    write_carry,
)
from jaxinf.store.checkpoints import (
    CheckpointInfo,
    list_checkpoints,
    remove_checkpoint,
    restore_checkpoint,
    save_checkpoint,
    take_over,
)
from jaxinf.store.claims import check_roots, open_for_reading, open_for_writing
from jaxinf.store.commit_record import (
    SCHEDULE_FREE,
    CommitAction,
    CommitRecord,
    KeptCuts,
    ScalarState,
    read_old_cuts,
    schedule_free_params,
)
from jaxinf.store.copy_source import (
    FILES_BESIDE,
    CopySource,
    read_files_beside,
    store_source,
)
from jaxinf.store.copying import CopyLayout, copy_step
from jaxinf.store.creation import (
    check_free_space,
    check_never_committed,
    check_space,
    create_store,
    discard_store,
    is_unfinished,
    required_bytes,
)
from jaxinf.store.directory import SLOTS, Slot, StoreDirectory, other_slot
from jaxinf.store.division import Shards, deal_to_members, is_divided_for, place_chunks
from jaxinf.store.documents import Checksum, Id, read_document, seal
from jaxinf.store.formats import (
    Formats,
    MasterFormat,
    StateFormat,
    apply_formats,
    store_formats,
)
from jaxinf.store.lock import Holder, StoreLock, lock_exclusively, read_holder
from jaxinf.store.manifest import (
    CODECS,
    ChunkFile,
    LeafRecord,
    Manifest,
    Member,
    StateRecord,
    dtype_of,
    find_leaf,
    package_versions,
    without_csds,
)
from jaxinf.store.members import (
    HeldSteps,
    StepId,
    agree_on_step,
    find_members,
    go_to_step,
    is_run,
    member_name,
    missing_members,
    open_members,
    read_held_steps,
    remove_members_checkpoints,
    restore_members_checkpoint,
    save_members_checkpoint,
)
from jaxinf.store.names import (
    ERROR_FEEDBACK,
    MASTER_PARAMS,
    check_leaf_paths,
    encode_path,
    leaf_name,
)
from jaxinf.store.reader import ChunkRun, StepReader, corrupt_chunk, map_in_threads
from jaxinf.store.staging import find_leftover_copy
from jaxinf.store.step_files import make_carry, step_documents
from jaxinf.store.steps import (
    CommittedStep,
    check_checkpoint_exists,
    checkpoint_names,
    find_step,
    pinned_step,
    read_step,
    readable_step,
)
from jaxinf.store.verify import Damage, step_bytes, verify_step
