"""The store on disk: format, slots, commit record, lock, snapshots, views.

Where a question is answered:

    what lies where on disk              directory.py
    how a slot becomes a step            directory.py (`write_record`, `sync`, `flip`)
    what a commit says                   commit.py
    what a store holds                   manifest.py
    names; a stranger's documents        documents.py; paths: transfer/beneath.py
    codecs, grids; who has which chunk   formats.py
    how files are made and removed       files.py; who owns a CSD: owners.py
    how chunks are read and verified     reader.py, verify.py
    how a step is copied or recoded      copying.py
    how a copy appears whole             staging.py
    how a step is kept or pinned         steps.py; of several members: members.py
    what a copy begins with              members.py (`store_source`)
    what other zarr readers see          files.py (`step_files`)

Invariant: at every instant the last committed step is complete on the drives
(docs/format.md gives the reasons).
"""

from jaxinf.store.commit import (
    CARRY,
    SCHEDULE_FREE,
    CarriedArray,
    CommitRecord,
    KeptCuts,
    ScalarState,
    check_carry,
    cuts_of_before,
    schedule_free_params,
)
from jaxinf.store.copying import CopyLayout, copy_step
from jaxinf.store.directory import SLOTS, Slot, StoreDirectory, other_slot
from jaxinf.store.documents import (
    ERROR_FEEDBACK,
    MASTER_PARAMS,
    Id,
    Sum,
    check_leaf_paths,
    encode_path,
    leaf_name,
    read_document,
    seal,
)
from jaxinf.store.files import (
    BESIDE,
    check_free_space,
    check_never_committed,
    check_space,
    create_store,
    discard_store,
    files_beside,
    is_unfinished,
    make_carry,
    read_carry,
    required_bytes,
    step_documents,
    write_carry,
)
from jaxinf.store.formats import (
    Formats,
    MasterFormat,
    Shards,
    StateFormat,
    coded_leaf,
    deal_to_members,
    is_divided_for,
    lay_out,
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
    package_versions,
    without_csds,
)
from jaxinf.store.members import (
    CommitAction,
    CopySource,
    HeldSteps,
    StepId,
    agreed_step,
    all_members,
    find_members,
    held_steps,
    is_run,
    member_name,
    missing_members,
    remove_whole,
    restore_whole,
    save_whole,
    store_source,
    to_step,
)
from jaxinf.store.owners import check_roots, look_at_store, read_owned
from jaxinf.store.reader import (
    ChunkRun,
    CommittedStep,
    StepReader,
    corrupt_chunk,
    find_leaf,
    over,
)
from jaxinf.store.staging import left_by_copy
from jaxinf.store.steps import (
    CheckpointInfo,
    check_exists,
    checkpoint_names,
    find_step,
    list_checkpoints,
    pinned_step,
    readable_step,
    remove_checkpoint,
    restore_checkpoint,
    save_checkpoint,
    step_of,
    take_over,
)
from jaxinf.store.verify import Damage, step_bytes, verify_step
