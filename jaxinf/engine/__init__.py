"""The engine: streams state through a fixed memory, step by step, and commits.

Where a question is answered:

    what a user calls                    store.py
    which stores are open                open_stores.py; options.py
    what the package has of an open one  engine.py
    how its files are found              opening.py, also of several processes
    how they are made for an optimizer   binding.py
    how it is divided anew               division.py
    what a store must have for a run     description.py
    whose params a step may use          resume_check.py
    how a gradient becomes tasks         step_runner.py, updates.py
    in which order a commit is durable   store_files.py (`commit_finished`)
    where a chunk's newest bytes are     chunks.py
    how chunks are cut to be moved       subgroup_table.py
    which state stays in memory          subgroup_table.py (`choose_cached`)
    what drives move in a step           updates.py (`list_moves`)
    what waits for JAX                   dispatched.py
    how leaves come back to JAX          reading.py, state_trees.py; carry.py
    who has which shard of an array      sharding.py
    how a step goes to a URL             exports.py
    what happens after an error          health.py

Invariant: the engine's memory does not grow with the model; a step is all or nothing.
"""

from jaxinf.engine.binding import bind_optimizer, restart_store, subgroups_of
from jaxinf.engine.carry import carried_leaves, check_carried
from jaxinf.engine.description import (
    LeafDescription,
    StoreDescription,
    check_compression,
    describe_store,
    keeps_feedback,
)
from jaxinf.engine.division import divide_store
from jaxinf.engine.engine import Engine
from jaxinf.engine.health import raise_announced
from jaxinf.engine.open_stores import close, open_store, store_of
from jaxinf.engine.options import DEFAULT_MEMORY_BYTES, Durability
from jaxinf.engine.reading import (
    StateReader,
    average_states,
    check_like,
    read_feedback,
    read_leaf,
)
from jaxinf.engine.sharding import (
    assemble_shards,
    calling_devices,
    check_processes,
    held_shards,
    replicas_differ,
    shard_counts,
    shard_whole,
    shards_with_origin,
    sum_bits,
    unused_axes,
)
from jaxinf.engine.step_runner import StepMetrics
from jaxinf.engine.store import Store, engine_of
from jaxinf.engine.store_files import Assignment
from jaxinf.engine.subgroup_table import Move, SubgroupLayout, SubgroupTable
from jaxinf.engine.updates import (
    InitialParams,
    StateRequest,
    UpdateRequest,
    can_use_params,
    initialise_leaves,
    list_moves,
)
