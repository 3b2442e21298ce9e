"""The description of the store that an optimizer needs, compared with existing stores.

Invariant: a description has everything about the optimizer and the tree that the store
must agree with, and nothing about the places of files. Nothing is written here, and a
refusal names both sides and a remedy.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from jaxinf.compress import TopK
from jaxinf.csd import GradientForm, KernelNeed
from jaxinf.engine.options import StoreOptions
from jaxinf.errors import StoreMismatchError, UnsupportedTransformError
from jaxinf.layout import choose_grid
from jaxinf.processes import Group
from jaxinf.program import Average, InitProgram, Kernel, StateLayout, UpdateProgram
from jaxinf.store import (
    ERROR_FEEDBACK,
    MASTER_PARAMS,
    Formats,
    LeafRecord,
    Manifest,
    Member,
    Shards,
    StateRecord,
    StoreDirectory,
    apply_formats,
    check_leaf_paths,
    deal_to_members,
    dtype_of,
    encode_path,
    place_chunks,
    store_formats,
)
from jaxinf.typing import AVERAGE

_LOG = logging.getLogger("jaxinf")


@dataclass(frozen=True, eq=False)
class LeafDescription:
    """One leaf, its states and its kernels.

    Attributes:
      record: The leaf without chunks and codecs. Its states are the fp32 master params,
        then the kernel's slots in its order, then the error feedback if gradients are
        compressed with it.
      shards: The leaf's shards, with the processes that have each.
    """

    record: LeafRecord
    kernel: Kernel
    init_kernel: Kernel
    gradients: tuple[GradientForm, ...]
    shards: Shards

    @property
    def device_dtype(self) -> np.dtype:
        return dtype_of(self.record.dtype)


@dataclass(frozen=True, eq=False)
class StoreDescription:
    """The leaves of a store, in the order of the flattened params tree.

    Attributes:
      scalar_paths: Paths of the scalar state in the optax state.
      average: Codec of the params' average in a new store; empty for none.
    """

    leaves: tuple[LeafDescription, ...]
    scalar_paths: tuple[str, ...]
    average: str
    layout: StateLayout

    def __post_init__(self) -> None:
        records = [leaf.record for leaf in self.leaves]
        names = {state.name for record in records for state in record.states}
        check_leaf_paths([record.path for record in records], names)

    @cached_property
    def contents(self) -> Manifest:
        """The manifest's contents, without any codec."""
        return Manifest.of_contents(
            kernels={x.record.kernel: x.kernel.identity for x in self.leaves},
            leaves=[leaf.record for leaf in self.leaves],
        )


def plan_store(
    options: StoreOptions,
    group: Group,
    description: StoreDescription,
    default_roots: tuple[str, ...] = (),
) -> StoreDirectory:
    """Chooses grids, formats and places of a store to be made; writes nothing."""
    master = _master_codec(options, description)
    formats = Formats(options.state or "fp32", master, description.average)
    leaves = []
    for leaf in description.contents.leaves:
        grid = choose_grid(leaf.shape, shard_counts=leaf.shard_counts or None)
        gridded = replace(leaf, chunk_shape=grid.chunk_shape)
        leaves.append(apply_formats(gridded, formats))
    coded = replace(description.contents, leaves=tuple(leaves))
    roots = [str(root) for root in options.csds] or default_roots
    if group.is_alone:
        return StoreDirectory(options.path, place_chunks(coded, roots))
    shards = [leaf.shards for leaf in description.leaves]
    owners = deal_to_members(coded.leaves, group.count, shards)
    member = Member(group.session, group.number, group.count)
    manifest = place_chunks(coded, roots, member=member, owners=owners)
    return StoreDirectory(options.path, manifest)


def _master_codec(options: StoreOptions, description: StoreDescription) -> str:
    if options.master != "none":
        return "split" if options.csd.codes_params else ""
    dtypes = {leaf.record.dtype for leaf in description.leaves}
    if "bfloat16" not in dtypes or "float16" in dtypes:
        raise ValueError(
            f"{options.path}: master='none': expected params in bfloat16 (float32 "
            "ones, if any, are their own master), found "
            f"{', '.join(sorted(dtypes)) or 'no params'}; leave it out"
        )
    return "bf16"


def describe_store(
    update: UpdateProgram,
    init: InitProgram,
    shard_counts: Sequence[tuple[int, ...]],
    *,
    average: Average | None = None,
    compression: TopK | None = None,
    shards: Sequence[Shards] = (),
) -> StoreDescription:
    """Describes the store that an optimizer on a tree needs.

    Args:
      update, init: The optimizer, traced on the params.
      shard_counts: For each leaf, separately updated parts along each dimension.
      shards: The shards of each leaf; left out by a run of one process.
    """
    if compression is not None:
        _check_compressible(compression, update)
    identities = dict.fromkeys(leaf.kernel.identity for leaf in update.leaves)
    ids = {identity: f"k{number}" for number, identity in enumerate(identities)}
    leaves, shards = [], shards or list(map(Shards, shard_counts))
    columns = zip(update.leaves, init.leaves, shard_counts, shards, strict=True)
    for leaf, init_leaf, counts, leaf_shards in columns:
        info = leaf.info
        states = [StateRecord(MASTER_PARAMS, "float32")]
        states += [StateRecord(slot.name, slot.dtype.name) for slot in leaf.slots]
        if keeps_feedback(compression):
            states.append(StateRecord(ERROR_FEEDBACK, "float32"))
        record = LeafRecord(
            path=info.path,
            shape=info.shape,
            dtype=info.dtype.name,
            kernel=ids[leaf.kernel.identity],
            states=tuple(states),
            chunk_shape=(),
            shard_counts=counts,
            csds=(),
        )
        forms = (GradientForm(info.dtype),)
        if compression is not None:
            sparse = GradientForm(compression.value_dtype(info.dtype), is_sparse=True)
            forms = (sparse, *forms[: compression.warmup_steps])
        kernels = leaf.kernel, init_leaf.kernel
        leaves.append(LeafDescription(record, *kernels, forms, leaf_shards))
    paths = tuple(map(encode_path, init.layout.scalar_keys))
    codec = "bf16" if average is not None and average.form == "bf16" else ""
    return StoreDescription(tuple(leaves), paths, codec, init.layout)


def kernel_needs(description: StoreDescription, manifest: Manifest) -> list[KernelNeed]:
    """Returns what the CSDs of a store must be able to compute, leaf by leaf."""
    return [
        KernelNeed(
            leaf=record.name,
            kernel=leaf.kernel,
            codecs=tuple(
                state.codec
                for state in record.states
                if not state.is_companion and state.name != ERROR_FEEDBACK
            ),
            dtype=leaf.device_dtype,
            gradients=leaf.gradients,
        )
        for leaf, record in zip(description.leaves, manifest.leaves, strict=True)
    ]


def check_formats(options: StoreOptions, manifest: Manifest) -> None:
    """Refuses a store on other CSDs, or in other formats, than is asked for."""
    path, formats = options.path, store_formats(manifest)
    roots = tuple(str(root) for root in options.csds)
    if roots and roots != manifest.csds:
        raise StoreMismatchError(
            f"{path}: the store's CSD roots are "
            f"{list(manifest.csds) or 'the store itself'}, given were "
            f"{list(roots)}; leave csds out when opening an existing store"
        )
    if _has_other_formats(manifest, Formats(options.state)):
        raise _format_error(path, "state", str(options.state), formats.state)
    if options.master == "none" != formats.master:
        raise _format_error(path, "master", options.master, formats.master)


def _format_error(path: Path, name: str, wanted: str, found: str | None) -> Exception:
    return StoreMismatchError(
        f"{path}: expected {name}={wanted!r}, found {found!r}; leave it out, or make a "
        f"store of the other kind from this one (jaxinf store copy {path} NEW "
        f"--{name} {wanted})"
    )


def _has_other_formats(manifest: Manifest, formats: Formats) -> bool:
    """Whether a leaf has another format; small leaves suit every format."""
    return any(leaf != apply_formats(leaf, formats) for leaf in manifest.leaves)


def check_description(
    directory: StoreDirectory, description: StoreDescription, remedy: str = ""
) -> None:
    """Refuses a store of another optimizer, tree or mesh; shows the difference."""
    stored, wanted = directory.manifest, description.contents
    _check_average(directory, description)
    tree_lines = stored.tree_difference(wanted)
    lines = tree_lines or stored.kernel_difference(wanted)
    difference = "\n  ".join(lines[:40])
    if tree_lines or (lines and dict(stored.created_by) == dict(wanted.created_by)):
        raise StoreMismatchError(
            f"{directory.path}: the store holds the state of another optimizer or "
            f"model than it is opened with:\n  {difference}\nOpen it with the "
            "optimizer and the model that it was made with, or use another store"
            f"{remedy}. To keep params, and moments that fit, read them with the old "
            "optimizer (store.params, store.state), and load them into a new store "
            "after tx.init (store.load; docs/checkpoints.md, Another optimizer)"
        )
    if lines:
        _LOG.warning(
            "%s: the optimizer's equations differ from those the store was made with; "
            "so do the versions of jax or optax (%s then, %s now). The state has the "
            "same form, so training goes on:\n  %s",
            directory.path,
            dict(stored.created_by),
            dict(wanted.created_by),
            difference,
        )
    _check_division(directory, description)


def _check_average(directory: StoreDirectory, description: StoreDescription) -> None:
    manifest = directory.manifest
    has_average = AVERAGE in description.contents.state_names
    wanted = (description.average or "fp32") if has_average else "none"
    found = store_formats(manifest).average or "none"
    differs = has_average == (found == "none")
    differs |= _has_other_formats(manifest, Formats(average=wanted))
    if manifest.leaves and differs:
        raise StoreMismatchError(
            f"{directory.path}: expected an average of the params in the form "
            f"{wanted!r}, found {found!r}; give smart_update(…, average=), or stream("
            "…, average=), as the store was made, or load its params and state into a "
            "new store (store.load), whose average begins as a copy of the params"
        )


def _check_division(directory: StoreDirectory, description: StoreDescription) -> None:
    """Refuses a run whose mesh gives the params of a chunk to others than its owner."""
    member = directory.manifest.member
    if member is None:
        return
    for record, leaf in zip(directory.manifest.leaves, description.leaves, strict=True):
        chunk_holders = leaf.shards.holders_of(record, member.count)
        pairs = zip(record.owners, chunk_holders, strict=True)
        for number, (owner, holders) in enumerate(pairs):
            if owner not in holders:
                raise StoreMismatchError(
                    f"{directory.path}: leaf {record.name}: chunk {number} is process "
                    f"{owner}'s, and on this run's mesh its params are in process "
                    f"{', '.join(map(str, holders))}; use the mesh and the shardings "
                    "that the store was made with"
                )


def keeps_feedback(compression: TopK | None) -> bool:
    """Whether elements that are not sent are added to the next gradient."""
    return compression is not None and compression.error_feedback


def check_compression(compression: TopK | None, options: StoreOptions) -> None:
    """Refuses an object of another type, and error feedback with rarer commits."""
    if compression is not None and not isinstance(compression, TopK):
        raise TypeError(
            f"compress={compression!r}: expected jaxinf.top_k(ratio) or None"
        )
    if keeps_feedback(compression) and options.rewrites_steps:
        raise ValueError(
            f"{options.path}: error_feedback=True: each step commits its error "
            'feedback, expected durability="step", found a store with fewer commits; '
            'open it with durability="step", or leave error feedback out'
        )


def _check_compressible(compression: TopK, program: UpdateProgram) -> None:
    dense = [leaf for leaf in program.leaves if leaf.kernel.array_dtypes]
    remedy = "put that in front: optax.chain(…, smart_update(tx, store, compress=…))"
    if program.prologue_state is not None:
        problem = (
            "with compress= an update, or the stored sum of optax.MultiSteps, lacks "
            "the elements that were not sent, and this optimizer computes a quantity "
            "of the whole, such as its norm; compute it of each gradient (optax.chain("
            "optax.clip_by_global_norm(…), optax.MultiSteps(…))), or leave compress= "
            "out"
        )
    elif dense:
        problem = (
            f"{dense[0].info.name}: with compress= nothing dense crosses the link, but "
            "this optimizer's update computes another number for each element; "
            f"{remedy}"
        )
    elif keeps_feedback(compression) and program.reads_gradients:
        problem = (
            "error_feedback=True: this optimizer computes a quantity of all gradients, "
            f"such as their norm, which would miss the elements not sent; {remedy}"
        )
    else:
        return
    raise UnsupportedTransformError(problem)
