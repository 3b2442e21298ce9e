"""The bytes of a run from the layout of its store, before there is one.

Invariant: nothing is compiled or written but an empty store in a temporary directory,
  and params are never made.
"""

import contextlib
import math
import tempfile
from collections.abc import Container, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jaxinf_models import num_params

from jaxinf.engine import (
    Store,
    StoreDescription,
    StoreShape,
    can_take,
    check_compressed,
    describe,
    gradient_forms,
    keeps_feedback,
    moved_states,
    open_store,
)
from jaxinf.program import UpdateProgram, averaged, trace_init
from jaxinf.store import Member, required_bytes
from jaxinf.streaming import DryRun, trace_optimizer
from jaxinf.streaming.update.traffic import moved_bytes, written_bytes
from jaxinf.terminal import parse_bytes
from jaxinf.train.config import TrainConfig
from jaxinf.train.optimizers import make_optimizer
from jaxinf.train.processes import sharded_dimension
from jaxinf.typing import PyTree


@dataclass(frozen=True)
class Sizes:
    """What a run takes.

    Attributes:
      memory_bytes: Of a streamed step; else of buffers, or of plain optax's state, and
        of JAX's params, gradients, updates and new params. Activations and the process
        are not in it.
      disk_bytes: Both slots, and gradients and activations that wait.
      params_bytes: Params that a streamed step reads for its programs.
      read_bytes, written_bytes: Of the drives, in a step, those params included.
    """

    num_params: int
    memory_bytes: int
    disk_bytes: int
    params_bytes: int
    read_bytes: int
    written_bytes: int


class LeafUpdate(NamedTuple):
    """The update of a subgroup of a leaf.

    Attributes:
      leaf: Number of the leaf.
      num_elements: Its elements.
      read_bytes, written_bytes: What it moves on its drive, in the mean of steps.
      memory_bytes: Its buffer.
      drive: Number of its drive.
    """

    leaf: int
    num_elements: int
    read_bytes: int
    written_bytes: float
    memory_bytes: int
    drive: int


def sizes_of(
    config: TrainConfig, description: StoreDescription | None = None
) -> tuple[Sizes, list[LeafUpdate]]:
    """Computes the sizes of a run, and what its updates move.

    Those of a streamed step are at most so many: what memory saves is not counted.

    Args:
      description: What `describe_store` returns for it, or for a run with the same
        model and optimizer; by default it is computed.

    Raises:
      JaxinfError: As `jaxinf.open_store` and `jaxinf.smart_update`.
    """
    params = config.abstract[1]
    leaves = jax.tree.leaves(params)
    count = num_params(config.model_config)
    arrays = 4 * sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    if config.mode == "memory":
        slots = jax.eval_shape(make_optimizer(config).init, params)
        held = [x.size * x.dtype.itemsize for x in jax.tree.leaves(slots)]
        return Sizes(count, arrays + sum(held), 0, 0, 0, 0), []
    description = description or describe_store(config)
    with _planned_store(config) as store:
        shape = store._training.shape(description)
        disk = sum(required_bytes(shape.directory).values())
        updates = [*_updates(config, shape, description, leaves)]
        masters = 0
        if config.mode == "stream" and config.resident != "params":
            masters = sum(
                moved_bytes(shape, layout, [0])
                for number, leaf in enumerate(leaves)
                for layout in shape.layouts(number, (0,) * leaf.ndim, leaf.shape)
            )
    read = sum(one.read_bytes for one in updates)
    written = round(sum(one.written_bytes for one in updates))
    if config.mode != "stream":
        memory_bytes = config.buffer_bytes + arrays
        return Sizes(count, memory_bytes, disk, 0, read, written), updates
    parts, waiting = 1 if config.order == "layers" else config.micro_batches, 0
    if config.clip_norm or parts > 1:
        waiting = 4 * count  # a sum is read and written by each part
    masters = round(masters * 2 * parts * _read_share(config, params))
    read, written = read + masters + parts * waiting, written + parts * waiting
    sizes = Sizes(count, config.buffer_bytes, disk + waiting, masters, read, written)
    return sizes, updates


def member_sizes(
    config: TrainConfig, count: int, *, is_sharded: bool = False
) -> list[tuple[Sizes, list[LeafUpdate]]]:
    """Computes what each process of a run would take, in ``--mode update``.

    Args:
      count: Number of processes, each with one JAX device.

    Raises:
      JaxinfError: As `sizes_of`.
    """
    leaves = jax.tree.leaves(config.abstract[1])
    description = describe_store(config, count, is_sharded=is_sharded)
    shares = [math.prod(leaf.shard_counts) for leaf in description.leaves]
    arrays = 4 * sum(
        leaf.size * leaf.dtype.itemsize // share
        for leaf, share in zip(leaves, shares, strict=True)
    )
    found = []
    with _planned_store(config) as store:
        for number in range(count):
            member = Member("0" * 32, number, count) if count > 1 else None
            shape = store._training.shape(description, member)
            updates = [*_updates(config, shape, description, leaves)]
            sizes = Sizes(
                num_params(config.model_config),
                config.buffer_bytes + arrays,
                sum(required_bytes(shape.directory).values()),
                0,
                sum(one.read_bytes for one in updates),
                round(sum(one.written_bytes for one in updates)),
            )
            found.append((sizes, updates))
    return found


def steps_per_commit(config: TrainConfig) -> float | None:
    """Returns steps a commit of a run, on average; None if none is made."""
    with _planned_store(config) as store:
        options = store._training.options
        return options.mean_steps_per_commit(config.checkpoint_every or 0)


@contextlib.contextmanager
def _planned_store(config: TrainConfig) -> Iterator[Store]:
    """Opens the store of a run in a temporary directory; nothing is written."""
    with tempfile.TemporaryDirectory() as folder:
        roots = [Path(folder, f"drive{n}") for n in range(len(config.csd_root))]
        for root in roots:
            root.mkdir()
        options = _store_options(config)
        with open_store(Path(folder, "store"), csds=roots, **options) as store:
            yield store


def _read_share(config: TrainConfig, params: PyTree) -> float:
    """Returns the share of params that do not stay in memory."""
    if config.resident in (None, "params"):
        return 1.0
    whole = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))
    return 1 - min(1.0, parse_bytes(config.resident) / whole)


def _updates(
    config: TrainConfig,
    shape: StoreShape,
    description: StoreDescription,
    leaves: list[Any],
) -> Iterator[LeafUpdate]:
    for number, leaf in enumerate(leaves):
        kernel = description.leaves[number].kernel
        has_params = can_take(shape, number, leaf.dtype)
        at_once: Container[int] = ()
        if config.mode == "stream":
            has_params, at_once = config.resident == "params", {0}
        for layout in shape.layouts(number, (0,) * leaf.ndim, leaf.shape):
            loads, stores = moved_states(kernel, layout)
            if shape.stays(layout.subgroup):
                now, later = written_bytes(shape, layout, stores, at_once)
                every = shape.options.mean_steps_per_commit(config.checkpoint_every)
                read, written = 0, now + later / (every or config.steps)
            else:
                loads -= {0} if has_params else set()
                read = moved_bytes(shape, layout, loads)
                written = float(moved_bytes(shape, layout, stores))
            part, memory = layout.subgroup, layout.num_bytes
            count = part.num_elements if read or written else 0  # else it stays
            yield LeafUpdate(number, count, read, written, memory, part.csd)


def streamed_sizes(config: TrainConfig, dry: DryRun) -> Sizes:
    """Returns the sizes of a streamed run, of whose step there is a dry run."""
    return Sizes(
        num_params(config.model_config),
        dry.memory_bytes,
        dry.disk_bytes,
        dry.params_bytes,
        dry.traffic.drive_read_bytes,
        dry.traffic.drive_write_bytes,
    )


def _store_options(config: TrainConfig) -> dict[str, Any]:
    """Options of `open_store` on which the layout and the traffic of a run depend."""
    options: dict[str, Any] = {"csd": config.csd, "durability": config.durability}
    options |= {"state": config.state, "master": config.master}
    if tier := config.state_tier:
        beside = tier.host if config.mode == "stream" else 0
        options |= {"memory_bytes": config.buffer_bytes + beside}
        options |= {"tiers": tier.sizes}
    if config.export_every:
        options |= {"export_every": config.export_every, "export_to": config.export_to}
    return options


def optimizer_of(config: TrainConfig) -> UpdateProgram:
    """Traces the optimizer of a run with its average, which takes seconds."""
    tx = averaged(make_optimizer(config), config.average)
    return trace_optimizer(tx, config.abstract[1])


def describe_store(
    config: TrainConfig,
    count: int = 1,
    *,
    is_sharded: bool = False,
    update: UpdateProgram | None = None,
) -> StoreDescription:
    """Describes the store of a run; traces its optimizer, which takes seconds.

    Args:
      update: What `optimizer_of` returns for it; by default it is traced.
    """
    params = config.abstract[1]
    shards, holders = [], []
    for leaf in jax.tree.leaves(params):
        along = sharded_dimension(leaf.shape, count) if is_sharded else None
        shards.append(tuple(count if n == along else 1 for n in range(leaf.ndim)))
        own = [(n,) for n in range(count)] if along is not None else [range(count)]
        holders.append(tuple(map(tuple, own)) if count > 1 else ())
    compress, tx = config.compression, averaged(make_optimizer(config), config.average)
    update = update or optimizer_of(config)
    check_compressed(compress, update)
    return describe(
        update,
        trace_init(tx, params),
        shards,
        average=config.average,
        has_feedback=keeps_feedback(compress),
        forms=partial(gradient_forms, compress),
        holders=holders,
    )
