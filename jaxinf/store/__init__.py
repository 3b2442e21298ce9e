"""The store on disk: format, slots, commit record, lock, snapshots, views.

Invariant: at every instant the last committed step is complete on the drives
(docs/format.md gives the reasons).
"""

from jaxinf.store.agreement import (
    COMMIT,
    CommitAction,
    HeldSteps,
    StepId,
    agreed_step,
)
from jaxinf.store.checkpoint import (
    CheckpointInfo,
    check_checkpoint,
    check_pinnable,
    checkpoint_names,
    checkpoints_to_prune,
    find_checkpoint,
    list_checkpoints,
    prune_leftovers,
    remove_checkpoint,
    restore_checkpoint,
    save_checkpoint,
    stray_checkpoints,
)
from jaxinf.store.chunk_writer import ChunkWriter
from jaxinf.store.commit import (
    SCHEDULE_FREE,
    CommitRecord,
    ScalarState,
    schedule_free_params,
)
from jaxinf.store.contents import (
    CODECS,
    MASTER_CODECS,
    LeafContents,
    StateRecord,
    StoreContents,
    dtype_of,
)
from jaxinf.store.copy_source import CopySource, store_source
from jaxinf.store.copying import Copied, CopyLayout, copy_step, left_by_copy
from jaxinf.store.creation import (
    check_never_committed,
    check_space,
    complete_spare,
    create_store,
    discard_store,
    required_bytes,
    step_documents,
)
from jaxinf.store.damage import Damage, corrupt_chunk
from jaxinf.store.directory import (
    SLOTS,
    Slot,
    StoreDirectory,
    next_slot,
    other_slot,
)
from jaxinf.store.division import is_divided_for, num_processes
from jaxinf.store.documents import (
    Id,
    Sum,
    check_seal,
    read_foreign,
    seal,
    write_document,
)
from jaxinf.store.earlier import read_spare, restore_spare, verify_spare
from jaxinf.store.formats import (
    AverageChoice,
    Codecs,
    Formats,
    MasterFormat,
    StateFormat,
    coded_leaf,
    store_codecs,
)
from jaxinf.store.key_paths import encode_path
from jaxinf.store.lock import Holder, StoreLock, lock_exclusively
from jaxinf.store.making import (
    chunk_holders,
    csd_bytes,
    csd_shares,
    deal_by_shares,
    deal_to_members,
    is_dealt_by,
    is_unfinished,
    lay_out,
)
from jaxinf.store.manifest import FORMAT_VERSION, LeafRecord, Manifest, Member
from jaxinf.store.names import (
    ERROR_FEEDBACK,
    MASTER_PARAMS,
    array_name,
    check_leaf_paths,
    leaf_name,
)
from jaxinf.store.owned import (
    hold_store,
    look_at_store,
    read_owned,
)
from jaxinf.store.owners import check_unclaimed, claim_csds
from jaxinf.store.plans import (
    KeptPlan,
    check_plans_folder,
    drive_of,
    plan_damages,
    plans_folder,
    read_plan,
)
from jaxinf.store.reader import Piece, PieceRuns, StepReader, file_checksum
from jaxinf.store.regridding import Shards, ShardsOf, in_line
from jaxinf.store.snapshot import (
    PinnedStep,
    pinned_step,
    prune_snapshots,
    snapshot,
)
from jaxinf.store.space import check_free_space, stored_bytes
from jaxinf.store.stock_documents import stock_documents
from jaxinf.store.trimming import trim_store
from jaxinf.store.verify import Verifier, step_bytes
from jaxinf.store.views import find_leaf, open_array
from jaxinf.store.whole import (
    agreed_of,
    find_members,
    held_steps,
    hold_members,
    list_whole,
    member_name,
    missing_members,
    remove_whole,
    restore_whole,
    save_whole,
)
from jaxinf.store.whole_step import (
    WholeStep,
    whole_manifest,
    whole_record,
    whole_step,
)

__all__ = [
    "CODECS",
    "COMMIT",
    "ERROR_FEEDBACK",
    "FORMAT_VERSION",
    "MASTER_CODECS",
    "MASTER_PARAMS",
    "SCHEDULE_FREE",
    "SLOTS",
    "AverageChoice",
    "CheckpointInfo",
    "ChunkWriter",
    "Codecs",
    "CommitAction",
    "CommitRecord",
    "Copied",
    "CopyLayout",
    "CopySource",
    "Damage",
    "Formats",
    "HeldSteps",
    "Holder",
    "Id",
    "KeptPlan",
    "LeafContents",
    "LeafRecord",
    "Manifest",
    "MasterFormat",
    "Member",
    "Piece",
    "PieceRuns",
    "PinnedStep",
    "ScalarState",
    "Shards",
    "ShardsOf",
    "Slot",
    "StateFormat",
    "StateRecord",
    "StepId",
    "StepReader",
    "StoreContents",
    "StoreDirectory",
    "StoreLock",
    "Sum",
    "Verifier",
    "WholeStep",
    "agreed_of",
    "agreed_step",
    "array_name",
    "check_checkpoint",
    "check_free_space",
    "check_leaf_paths",
    "check_never_committed",
    "check_pinnable",
    "check_plans_folder",
    "check_seal",
    "check_space",
    "check_unclaimed",
    "checkpoint_names",
    "checkpoints_to_prune",
    "chunk_holders",
    "claim_csds",
    "coded_leaf",
    "complete_spare",
    "copy_step",
    "corrupt_chunk",
    "create_store",
    "csd_bytes",
    "csd_shares",
    "deal_by_shares",
    "deal_to_members",
    "discard_store",
    "drive_of",
    "dtype_of",
    "encode_path",
    "file_checksum",
    "find_checkpoint",
    "find_leaf",
    "find_members",
    "held_steps",
    "hold_members",
    "hold_store",
    "in_line",
    "is_dealt_by",
    "is_divided_for",
    "is_unfinished",
    "lay_out",
    "leaf_name",
    "left_by_copy",
    "list_checkpoints",
    "list_whole",
    "lock_exclusively",
    "look_at_store",
    "member_name",
    "missing_members",
    "next_slot",
    "num_processes",
    "open_array",
    "other_slot",
    "pinned_step",
    "plan_damages",
    "plans_folder",
    "prune_leftovers",
    "prune_snapshots",
    "read_foreign",
    "read_owned",
    "read_plan",
    "read_spare",
    "remove_checkpoint",
    "remove_whole",
    "required_bytes",
    "restore_checkpoint",
    "restore_spare",
    "restore_whole",
    "save_checkpoint",
    "save_whole",
    "schedule_free_params",
    "seal",
    "snapshot",
    "step_bytes",
    "step_documents",
    "stock_documents",
    "store_codecs",
    "store_source",
    "stored_bytes",
    "stray_checkpoints",
    "trim_store",
    "verify_spare",
    "whole_manifest",
    "whole_record",
    "whole_step",
    "write_document",
]
