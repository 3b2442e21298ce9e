"""Counts a run's memory, disk, and the bytes of a step, before the run.

    layout of the store ──┐
    programs, traced ─────┴─► needs

Invariant: nothing is run or written, and no param is made.
"""

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path

import jax
from jaxinf_models import num_params

from jaxinf.engine import (
    Store,
    can_use_params,
    describe_store,
    engine_of,
    list_moves,
    subgroups_of,
)
from jaxinf.program import trace_init, trace_update, with_average
from jaxinf.store import required_bytes
from jaxinf.streaming import DeviceLimit, program_bytes
from jaxinf.train.config import TrainConfig
from jaxinf.train.data.loader import Batch
from jaxinf.train.devices import Devices
from jaxinf.train.freezing import mask_frozen
from jaxinf.train.modes import make_streamed_step
from jaxinf.train.opening import name_flags_in_errors, open_run_store
from jaxinf.train.optimizers import make_optimizer
from jaxinf.train.step import make_loss_fn
from jaxinf.typing import FLOAT32, PyTree


@dataclass(frozen=True, kw_only=True)
class RunNeeds:
    """The needs of a run in one process at its peak, and the traffic of a step.

    Attributes:
      num_drives: Number of drives that share the store's bytes.
      host_bytes: Host memory, beside up to 600 MB of the process itself.
      device_bytes: Memory of a JAX device that has its own; else 0.
      disk_bytes: Bytes on drives, with both slots.
      spilled_bytes: Of them, gradients that wait for the last one.
      drive_read_bytes, drive_write_bytes: Bytes that a step moves, on average.
    """

    num_params: int
    num_drives: int
    host_bytes: int = 0
    device_bytes: int = 0
    disk_bytes: int = 0
    spilled_bytes: int = 0
    drive_read_bytes: int = 0
    drive_write_bytes: int = 0


@name_flags_in_errors()
def count_needs(
    config: TrainConfig,
    batch: Batch | None,
    device_bytes: int | None,
    limit: DeviceLimit | None = None,
) -> RunNeeds:
    """Counts the needs of a run; traces it, and compiles its programs.

    Args:
      config: A run in one process that `check` has returned.
      batch: An example; only its shapes count. None leaves programs out, which a
        streamed run cannot.
      device_bytes: Memory of the JAX device; None if it computes in the host's.
      limit: Limit of a device that is not here, to count for.
    """
    needs = {"host_bytes": 0}
    with contextlib.ExitStack() as stack:
        if config.mode != "memory":
            planned, store = stack.enter_context(_open_planned_store(config))
            if config.mode == "stream":
                needs = _count_streamed(planned, store, batch, limit)
            else:
                needs = _count_stored(config, store, is_shared=device_bytes is None)
    if config.mode != "stream":
        programs, gradients = _program_bytes(config, batch)
        if device_bytes is None:
            needs["host_bytes"] += programs
        else:
            needs["device_bytes"] = programs
            if config.mode == "update":  # gradients and updates cross
                needs["host_bytes"] += 2 * gradients
    size = num_params(config.model_config)
    num_drives = max(1, len(roots_by_drive(config)))
    return RunNeeds(num_params=size, num_drives=num_drives, **needs)


def _program_bytes(config: TrainConfig, batch: Batch | None) -> tuple[int, int]:
    graphdef, params = config.abstract
    leaves = jax.tree.leaves(mask_frozen(config.frozen, params))
    gradients = FLOAT32.itemsize * sum(leaf.size for leaf in leaves)
    # Gradients, clipped gradients, updates; without clipping they are soon gone.
    programs = _num_bytes(params)
    programs += (3 if config.clip_norm or config.compress else 1) * gradients
    if batch is not None:
        parts = config.micro_batches
        part = jax.tree.map(lambda rows: rows[: len(rows) // parts], batch)
        loss_fn = make_loss_fn(config, graphdef)
        step = program_bytes(loss_fn, params, jax.eval_shape(lambda: part))
        programs = max(programs, step + (gradients if parts > 1 else 0))
    if config.mode == "memory":
        programs += _num_bytes(jax.eval_shape(make_optimizer(config).init, params))
    return programs, gradients


def _num_bytes(tree: PyTree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _count_streamed(
    config: TrainConfig, store: Store, batch: Batch | None, limit: DeviceLimit | None
) -> dict[str, int]:
    with make_streamed_step(config, store) as step:
        needs = step.dry_run(batch, config.abstract[1], device=limit)
    names = [field.name for field in fields(RunNeeds) if field.name.endswith("_bytes")]
    return {name: getattr(needs, name) for name in names}


def _count_stored(
    config: TrainConfig, store: Store, *, is_shared: bool
) -> dict[str, int]:
    """Counts the bytes on disk, of buffers, and of the updates' reads and writes."""
    params = config.abstract[1]
    tx = with_average(make_optimizer(config), config.average)
    description = describe_store(
        trace_update(tx, params, may_read="sums"),
        trace_init(tx, params),
        [(1,) * leaf.ndim for leaf in jax.tree.leaves(params)],
        average=config.average,
        compression=config.compression,
    )
    subgroups, moves = subgroups_of(engine_of(store), description), []
    leaves = zip(jax.tree.leaves(params), description.leaves, strict=True)
    for number, (leaf, leaf_description) in enumerate(leaves):
        # Where the JAX device shares the host's memory, updates take its params.
        takes_params = is_shared and can_use_params(subgroups, number, leaf.dtype)
        box = number, (0,) * leaf.ndim, leaf.shape
        kernel = leaf_description.kernel
        moves += list_moves(subgroups, kernel, *box, takes_params=takes_params)
    every = subgroups.options.steps_per_commit or max(1, config.steps)
    moved = subgroups.count_moved_bytes(
        moves, memory_bytes=subgroups.memory_bytes, steps_per_commit=every
    )
    return {
        "host_bytes": min(config.buffer_bytes, subgroups.num_bytes),
        "disk_bytes": required_bytes(subgroups.directory).total(),
        "drive_read_bytes": moved.drive_read_bytes,
        "drive_write_bytes": moved.drive_write_bytes,
    }


@contextlib.contextmanager
def _open_planned_store(config: TrainConfig) -> Iterator[tuple[TrainConfig, Store]]:
    """Opens a run's store in a temporary directory; nothing is written."""
    durability, every = config.durability, config.checkpoint_every
    if durability != "step" and every:  # a checkpoint commits, too
        durability = every if durability == "checkpoint" else min(durability, every)
    with tempfile.TemporaryDirectory() as folder:
        roots = tuple(Path(folder, f"drive{n}") for n in range(len(config.csd_root)))
        for root in roots:
            root.mkdir()
        planned = replace(
            config,
            store=Path(folder, "store"),
            csd_root=roots,
            durability=durability,
            device_updates=None,  # would try the device
        )
        with contextlib.closing(open_run_store(planned, Devices())) as store:
            yield planned, store


def roots_by_drive(config: TrainConfig) -> dict[int | Path, list[Path]]:
    """Groups directories by file system; one that is not here is a drive of its own."""
    drives = dict[int | Path, list[Path]]()
    for root in config.csd_root:
        path = root.expanduser()
        drive = path.stat().st_dev if path.is_dir() else path
        drives.setdefault(drive, []).append(root)
    return drives
