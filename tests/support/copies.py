"""Copies of stores, as `jaxinf store copy` makes them."""

import contextlib
import os
from pathlib import Path

from jaxinf.exchange import export_source, export_url_at
from jaxinf.store import (
    ChunkFile,
    CopyLayout,
    Formats,
    StoreDirectory,
    copy_step,
    store_source,
)


def copied(
    old,
    new=None,
    progress=None,
    *,
    roots=(),
    processes=None,
    shards_of=None,
    checkpoints=False,
    memory_bytes=None,
    **formats,
):
    """Copies a store, a run, a checkpoint or an export; without a target in place."""
    new = Path(old if new is None else new)
    layout = CopyLayout(Formats(**formats), [*map(str, roots)], processes, shards_of)
    url = export_url_at(str(old))
    with contextlib.ExitStack() as stack:
        if url is not None:
            memory = {} if memory_bytes is None else {"memory_bytes": memory_bytes}
            source = export_source(url, **memory)
        else:
            old, holds = Path(old), os.path.realpath(old) == os.path.realpath(new)
            opened = store_source(old, holds=holds, checkpoints=checkpoints or holds)
            source = stack.enter_context(opened)
        return copy_step(source, new, layout, progress)


def chunks_of(path, place=None):
    """The chunk files of a step by name, by default the committed one; no padding."""
    directory, found = StoreDirectory.open(path), {}
    place = place or directory.committed_slot()
    for number, leaf in enumerate(directory.manifest.leaves):
        for state in leaf.states:
            for chunk in leaf.held_numbers:
                held = ChunkFile(number, leaf, state, chunk)
                file = directory.chunk_path(place, held)
                raw = file.read_bytes()[: held.num_bytes]
                found[leaf.name, state.name, chunk] = raw
    return found
