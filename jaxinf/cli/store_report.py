"""The JSON document about a store that ``jaxinf inspect --json`` prints.

Invariant: keys are stable; new ones may be added, but none changes its meaning.

The document of a store:

==================  ================================================================
``store``           the directory, absolute
``store_id``        32 hex digits
``created_by``      versions of jaxinf, jax and optax
``pinned``          whether all of it is certain to be of one step
``warnings``        lines for people
``step``            the committed step
``committed_at``    UTC
``skipped_steps``   number of steps skipped for a non-finite gradient
``num_params``      elements over all leaves
``leaves``          ``name``, ``shape``, ``dtype`` (of the params on the JAX device),
                    ``num_elements``, ``num_chunks`` (of each state), ``chunk_shape``,
                    ``num_bytes`` (of all states), ``kernel``, ``states``: ``name``,
                    ``dtype``, ``num_bytes``, ``array`` (a directory that zarr and
                    tensorstore open)
``states``          ``name``, ``num_bytes``, over all leaves
``logical_bytes``   bytes of all states in one slot
``disk_bytes``      space of both slots on the drives
``checkpoints``     ``name``, ``step``, ``committed_at``, ``own_bytes``: bytes that
                    removing it would free
``csds``            ``root``, ``num_chunks`` and ``chunk_bytes`` (of one slot),
                    ``free_bytes``, ``total_bytes`` (of its file system)
``kernels``         id → the update's equations
``scalar_state``    ``path``, ``dtype``, ``shape``, ``value``
``payload``         the caller's data
``writer``          null, or the process of this machine that has the store open:
                    ``pid``, ``host``, ``command``
``current``         the directory of the committed step
==================  ================================================================

With ``--leaf``: the first eight of these keys up to ``skipped_steps``, ``leaf`` (as in
``leaves``) and ``statistics``: state → ``num_elements``, ``num_zeros``,
``num_non_finite``, ``mean``, ``std``, ``min``, ``max`` and ``histogram`` (``scale``,
``edges``, ``counts``, ``num_below``, ``num_above``).
"""

import math
import os
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jaxinf.cli.committed import CommittedStep
from jaxinf.cli.statistics import Statistics
from jaxinf.cli.writer import find_writer
from jaxinf.store import (
    SLOTS,
    LeafRecord,
    StateRecord,
    StoreDirectory,
    list_checkpoints,
    stored_bytes,
)
from jaxinf.typing import Array

__all__ = ["describe_leaf_statistics", "describe_store"]


def describe_store(step: CommittedStep) -> dict[str, Any]:
    """Returns the document of a store."""
    manifest = step.manifest
    leaves = [_describe_leaf(step.directory, leaf) for leaf in manifest.leaves]
    per_state: Counter[str] = Counter()
    for leaf in leaves:
        for state in leaf["states"]:
            per_state[state["name"]] += state["num_bytes"]
    writer = find_writer(step.directory.path)
    return {
        **_describe_step(step),
        "num_params": manifest.num_params,
        "leaves": leaves,
        "states": [{"name": name, "num_bytes": num} for name, num in per_state.items()],
        "logical_bytes": per_state.total(),
        "disk_bytes": _disk_bytes(step.directory),
        "checkpoints": [asdict(info) for info in list_checkpoints(step.directory)],
        "csds": _describe_csds(step.directory),
        "kernels": {key: list(lines) for key, lines in manifest.kernels.items()},
        "scalar_state": [
            {
                "path": scalar.path,
                "dtype": scalar.value.dtype.name,
                "shape": list(scalar.value.shape),
                "value": _json_value(scalar.value),
            }
            for scalar in step.commit.scalar_state
        ],
        "payload": step.commit.payload,
        "writer": writer and writer.to_json(),
        "current": str(step.directory.path / "current"),
    }


def describe_leaf_statistics(
    step: CommittedStep, record: LeafRecord, statistics: Mapping[str, Statistics]
) -> dict[str, Any]:
    """Returns the document of one leaf."""
    return {
        **_describe_step(step),
        "leaf": _describe_leaf(step.directory, record),
        "statistics": {name: found.to_json() for name, found in statistics.items()},
    }


def _describe_step(step: CommittedStep) -> dict[str, Any]:
    return {
        "store": str(step.directory.path),
        "store_id": step.manifest.store_id,
        "created_by": dict(step.manifest.created_by),
        "pinned": step.is_pinned,
        "warnings": list(step.warnings),
        "step": step.commit.step,
        "committed_at": step.commit.committed_at,
        "skipped_steps": step.commit.skipped_steps,
    }


def _describe_leaf(directory: StoreDirectory, leaf: LeafRecord) -> dict[str, Any]:
    num_elements = math.prod(leaf.shape)
    states = [
        {
            "name": state.name,
            "dtype": state.dtype,
            "codec": state.codec,
            "slot": state.slot,
            "num_bytes": state.num_elements(num_elements) * state.itemsize,
            "array": str(directory.path / "current" / leaf.array_name(state.name)),
        }
        for state in leaf.states
    ]
    return {
        "name": leaf.name,
        "shape": list(leaf.shape),
        "dtype": leaf.dtype,
        "num_elements": num_elements,
        "num_chunks": len(leaf.csds),
        "chunk_shape": list(leaf.chunk_shape),
        "num_bytes": sum(state["num_bytes"] for state in states),
        "kernel": leaf.kernel,
        "states": states,
    }


def _describe_csds(directory: StoreDirectory) -> list[dict[str, Any]]:
    num_chunks, chunk_bytes = Counter[int](), Counter[int]()
    for leaf, chunks in zip(directory.manifest.leaves, directory.chunks, strict=True):
        for csd, chunk in zip(leaf.csds, chunks, strict=True):
            num_chunks[csd] += len(leaf.states)
            chunk_bytes[csd] += _stored(leaf.states, chunk)
    csds = []
    for csd in range(directory.num_csds):
        usage = shutil.disk_usage(directory.csd_directory(csd))
        csds.append(
            {
                "root": (directory.manifest.csds or (str(directory.path),))[csd],
                "num_chunks": num_chunks[csd],
                "chunk_bytes": chunk_bytes[csd],
                "free_bytes": usage.free,
                "total_bytes": usage.total,
            }
        )
    return csds


def _stored(states: Sequence[StateRecord], chunk: Any) -> int:
    return sum(stored_bytes(chunk, state) for state in states)


def _disk_bytes(directory: StoreDirectory) -> int:
    """Counts the blocks of both slots in bytes; a file in both counts once."""
    roots = {directory.step_path(slot) for slot in SLOTS}
    for csd in range(directory.num_csds):
        roots |= {directory.data_path(slot, csd) for slot in SLOTS}
    seen: dict[tuple[int, int], int] = {}
    for root in roots:
        for folder, _, files in os.walk(root):
            for file in files:
                try:
                    found = os.lstat(Path(folder, file))
                except FileNotFoundError:
                    continue  # a writer may have renamed the file
                seen[found.st_dev, found.st_ino] = found.st_blocks * 512
    return sum(seen.values())


def _json_value(value: Array) -> Any:
    """Converts NaN and infinities, which JSON lacks, to text."""

    def plain(item: Any) -> Any:
        if isinstance(item, list):
            return [plain(one) for one in item]
        if isinstance(item, bool | int):
            return item
        return item if math.isfinite(item) else str(item)

    return plain(
        value.astype(
            "float64" if value.dtype.kind not in "biu" else value.dtype
        ).tolist()
    )
