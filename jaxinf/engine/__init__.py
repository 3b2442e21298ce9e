"""The engine: streams state through a fixed memory, step by step, and commits.

Where a question is answered:

    a user's calls                       store.py
    how a path becomes an open store     open_stores.py, engine.py; options.py
    how its files are found and made     opening.py, also of several processes
    how another number opens it          redivision.py
    what a store must hold for a run     description.py
    whose params a step may use          binding.py
    how a gradient becomes tasks         opened.py, updates.py
    in which order a commit is durable   opened.py (`_end_step`, `_publish`)
    where a chunk's newest bytes are     chunks.py
    which state stays in memory          shape.py (`staying`)
    what drives move in a step           shape.py (`moved_bytes`)
    how leaves come back to JAX          reading.py, state_trees.py; carry.py
    who has which shard of an array      sharding.py
    how a step goes to a URL             exports.py
    what happens after an error          failure.py

Invariant: host memory does not grow with the model; a step is all or nothing.
"""

from jaxinf.engine.carry import carried_leaves, check_carried
from jaxinf.engine.description import (
    LeafDescription,
    StoreDescription,
    check_compression,
    describe,
    keeps_feedback,
)
from jaxinf.engine.engine import Engine
from jaxinf.engine.exports import ExportInfo
from jaxinf.engine.failure import check_announced
from jaxinf.engine.open_stores import close, open_store, store_of
from jaxinf.engine.opened import StepMetrics
from jaxinf.engine.options import DEFAULT_MEMORY_BYTES, Durability, MasterChoice
from jaxinf.engine.reading import (
    StateReader,
    average_states,
    check_like,
    read_feedback,
    read_leaf,
)
from jaxinf.engine.redivision import divide_for
from jaxinf.engine.shape import StoreShape, SubgroupLayout
from jaxinf.engine.sharding import (
    callers,
    check_processes,
    from_whole,
    held_shards,
    put_together,
    replicas_differ,
    shard_counts,
    shards_with_origin,
    sum_bits,
    unused_axes,
)
from jaxinf.engine.store import Store, engine_of
from jaxinf.engine.updates import (
    Assignment,
    FirstParams,
    StateRequest,
    UpdateRequest,
    can_take,
    moved_states,
)
