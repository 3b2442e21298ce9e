"""What a run takes, counted before it, and the time of its step by one formula.

    layout of the store ──┐
    programs, traced ─────┼─► needs ─► needed, beside what there is
    a machine's numbers ──┘       └──► seconds of a step

Invariant: nothing is run or written, and no param is made.
"""

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import jax
from jaxinf_models import num_params

from jaxinf.engine import (
    Store,
    can_take,
    describe,
    engine_of,
    moved_states,
)
from jaxinf.program import averaged, trace_init
from jaxinf.store import required_bytes
from jaxinf.streaming import (
    DeviceLimit,
    Needs,
    num_operations,
    program_bytes,
    trace_optimizer,
)
from jaxinf.train.config import TrainConfig
from jaxinf.train.data.loader import Batch
from jaxinf.train.devices import Devices
from jaxinf.train.freezing import trained
from jaxinf.train.modes import named_flags, streamed_step
from jaxinf.train.opening import open_run
from jaxinf.train.optimizers import make_optimizer
from jaxinf.train.step import gradients_of, updated
from jaxinf.typing import FLOAT32, PyTree


@dataclass(frozen=True, kw_only=True)
class RunNeeds(Needs):
    """What a run in one process takes, beside some 400 MB of the process itself.

    Attributes:
      num_params: of the whole model.
      num_drives: drives that share the store's bytes.
      updated: params that the host's processor updates in a step.
    """

    num_params: int
    num_drives: int
    updated: int = 0


def count(
    config: TrainConfig,
    batch: Batch | None,
    device_bytes: int | None,
) -> RunNeeds:
    """Counts what a run takes; traces it, and compiles the programs of a streamed one.

    Args:
      config: a run in one process that `check` has returned.
      batch: a batch; only its shapes count. None leaves programs out, which a streamed
        run cannot.
      device_bytes: memory of the JAX device; None if it computes in the host's.

    Raises:
      JaxinfError: as `jaxinf.open_store`, `jaxinf.smart_update`, `jaxinf.stream`.
    """
    if config.mode == "stream":
        assert batch is not None
        needs = _streamed(config, batch, device_bytes)
    else:
        needs = _whole(config, batch, device_bytes)
    size, drives = num_params(config.model_config), _num_drives(config)
    return RunNeeds(num_params=size, num_drives=drives, **needs)


def _streamed(
    config: TrainConfig, batch: Batch, device_bytes: int | None
) -> dict[str, Any]:
    """A dry run, and the updates of the JAX device."""
    limit = None
    if device_bytes is not None:
        limit = DeviceLimit(config.device_memory or device_bytes, is_host=False)
    with (
        _planned_store(config) as (elsewhere, store),
        named_flags(),
        streamed_step(elsewhere, store) as step,
    ):
        found = step.dry_run(batch, config.abstract[1], device=limit)
    needs = {one.name: getattr(found, one.name) for one in fields(Needs)}
    every, num_trained, on_device = config.device_updates, _num_trained(config), 0
    if device_bytes is not None and isinstance(every, int) and every:
        on_device = num_trained // every
    for way in ("link_up_bytes", "link_down_bytes"):
        needs[way] += 2 * FLOAT32.itemsize * on_device
    return needs | {"updated": num_trained - on_device}


def _whole(
    config: TrainConfig, batch: Batch | None, device_bytes: int | None
) -> dict[str, Any]:
    """A step whose loss and gradient are one program."""
    moved = _moved(config) if config.mode == "update" else {}
    params = jax.tree.leaves(config.abstract[1])
    gradients = FLOAT32.itemsize * _num_trained(config)
    # Gradients, clipped gradients, updates; without clipping they are soon gone.
    programs = sum(leaf.size * leaf.dtype.itemsize for leaf in params)
    programs += (3 if waits(config) else 1) * gradients
    operations = 0.0
    if batch is not None:
        peak_bytes, operations = _program(config, batch)
        programs = max(programs, peak_bytes)
    needs = {"host_bytes": 0, "operations": operations, **moved}
    if device_bytes is None:
        needs["host_bytes"] += programs
        return {"updated": _num_trained(config), **needs}
    crosses = FLOAT32.itemsize * moved.get("updated", 0)
    needs["host_bytes"] += 2 * crosses
    link = {"link_up_bytes": crosses, "link_down_bytes": crosses}
    return {**needs, **link, "device_bytes": programs}


def _program(config: TrainConfig, batch: Batch) -> tuple[int, float]:
    """Returns the memory and the operations of the program of a step.

    It is loss and gradient in ``--mode update``, and the whole step in memory.
    """
    graphdef, params = config.abstract
    value_and_gradients = gradients_of(config, graphdef)
    batch = jax.eval_shape(lambda: batch)
    if config.mode == "update":
        closed = jax.make_jaxpr(value_and_gradients)(params, batch)
        return program_bytes(closed), num_operations(closed)
    tx = make_optimizer(config)
    state = jax.eval_shape(tx.init, params)

    def step(params: PyTree, state: Any, batch: Any) -> Any:
        value, gradients = value_and_gradients(params, batch)
        updates, state = tx.update(gradients, state, params)
        return updated(params, updates), state, value

    closed = jax.make_jaxpr(step)(params, state, batch)
    kept = jax.tree.leaves((params, state))  # whose memory the new ones take
    in_place = sum(leaf.size * leaf.dtype.itemsize for leaf in kept)
    return program_bytes(closed) - in_place, num_operations(closed)


def _moved(config: TrainConfig) -> dict[str, int]:
    """Returns bytes on disk, read, written, and of buffers; and updated params."""
    params = config.abstract[1]
    tx = averaged(make_optimizer(config), config.average)
    description = describe(
        trace_optimizer(tx, params),
        trace_init(tx, params),
        [(1,) * leaf.ndim for leaf in jax.tree.leaves(params)],
        average=config.average,
        compression=config.compression,
    )
    with _planned_store(config) as (_, store):
        shape = engine_of(store).shape(description)
    read = memory = updated = 0
    written = 0.0
    moved = [
        (layout, can_take(shape, number, leaf.dtype), *moved_states(one.kernel, layout))
        for number, (leaf, one) in enumerate(
            zip(jax.tree.leaves(params), description.leaves, strict=True)
        )
        for layout in shape.layouts(number, (0,) * leaf.ndim, leaf.shape)
    ]
    staying = shape.staying(
        shape.options.memory_bytes - shape.export_bytes,
        {layout.subgroup for layout, _, *states in moved if any(states)},
    )
    often = shape.options.steps_per_commit or config.steps
    for layout, has_params, loads, stores in moved:
        memory += layout.num_bytes
        updated += layout.extents[0].num_elements if stores else 0
        every = 1.0
        if layout.subgroup not in staying:
            loads -= {0} if has_params else set()
            read += shape.file_bytes(layout, loads)
        elif shape.options.rewrites_steps:  # commits alone write them
            every = min(often, config.checkpoint_every or often)
        written += shape.file_bytes(layout, stores) / every
    return {
        "host_bytes": min(config.buffer_bytes, memory),
        "disk_bytes": sum(required_bytes(shape.directory).values()),
        "drive_read_bytes": read,
        "drive_write_bytes": round(written),
        "updated": updated,
    }


@contextlib.contextmanager
def _planned_store(config: TrainConfig) -> Iterator[tuple[TrainConfig, Store]]:
    """Opens a run's store in a temporary directory; nothing is written."""
    with tempfile.TemporaryDirectory() as folder:
        roots = tuple(Path(folder, f"drive{n}") for n in range(len(config.csd_root)))
        for root in roots:
            root.mkdir()
        elsewhere = replace(
            config,
            store=Path(folder, "store"),
            csd_root=roots,
            device_updates=None,  # would try the device
        )
        with contextlib.closing(open_run(elsewhere, Devices(), {})) as store:
            yield elsewhere, store


def waits(config: TrainConfig) -> bool:
    """Whether no update begins before the last gradient."""
    return bool(config.clip_norm or config.compress)


def _num_trained(config: TrainConfig) -> int:
    leaves = jax.tree.leaves(trained(config.frozen, config.abstract[1]))
    return sum(leaf.size for leaf in leaves)


def _num_drives(config: TrainConfig) -> int:
    """Returns the number of drives; directories that are on one count once."""
    roots = [root.expanduser() for root in config.csd_root]
    there = {root.stat().st_dev for root in roots if root.is_dir()}
    return max(1, len(there) + sum(not root.is_dir() for root in roots))
