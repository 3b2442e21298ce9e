"""What a transform asks a store to hold.

Invariant: a description says everything about the optimizer and the tree that the store
must agree with, and nothing about where things lie.
"""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import version

import numpy as np

from jaxinf.csd import KernelNeed
from jaxinf.kernels import InitKernel, Kernel
from jaxinf.layout import choose_grid
from jaxinf.store import (
    ERROR_FEEDBACK,
    MASTER_PARAMS,
    LeafRecord,
    Manifest,
    StateRecord,
    check_leaf_paths,
    deal_chunks,
    dtype_of,
    leaf_name,
)

__all__ = ["LeafDescription", "StoreDescription", "coded_states", "kernel_needs"]

_MIN_CODED_ELEMENTS = 4096
_NEVER_CODED = (
    MASTER_PARAMS,
    ERROR_FEEDBACK,
    "acc_grads",
)  # sums of gradients: every bit counts


@dataclass(frozen=True, eq=False)
class LeafDescription:
    """One leaf, its states and its kernels.

    Attributes:
      path, shape, dtype: of the params leaf on the JAX device.
      states: the fp32 master params, then the kernel's slots in its order, then the
        error feedback if gradients are compressed with it.
      kernel: the update.
      init_kernel: the initial state.
      shard_counts: shards of the leaf along each dimension, 1 where not sharded.
    """

    path: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    states: tuple[StateRecord, ...]
    kernel: Kernel
    init_kernel: InitKernel
    shard_counts: tuple[int, ...]

    @property
    def device_dtype(self) -> np.dtype:
        """Of the params on the JAX device."""
        return dtype_of(self.dtype)

    @property
    def name(self) -> str:
        """The leaf's keys joined by ``/``."""
        return leaf_name(self.path)


@dataclass(frozen=True, eq=False)
class StoreDescription:
    """All leaves in the order of the flattened params tree.

    Attributes:
      leaves: one a leaf.
      scalar_paths: where the scalar state stands in the optax state.
    """

    leaves: tuple[LeafDescription, ...]
    scalar_paths: tuple[str, ...]

    def __post_init__(self) -> None:
        names = {state.name for leaf in self.leaves for state in leaf.states}
        check_leaf_paths([leaf.path for leaf in self.leaves], names)

    @cached_property
    def _kernel_ids(self) -> Mapping[tuple[str, ...], str]:
        texts = dict.fromkeys(tuple(leaf.kernel.describe()) for leaf in self.leaves)
        return {text: f"k{number}" for number, text in enumerate(texts)}

    def outline(self) -> Manifest:
        """What is held, without grids: enough to compare with an existing store."""
        records = [
            LeafRecord(
                path=leaf.path,
                shape=leaf.shape,
                dtype=leaf.dtype,
                kernel=self._kernel_ids[tuple(leaf.kernel.describe())],
                states=leaf.states,
                chunk_shape=(),
                shard_counts=leaf.shard_counts,
                csds=(),
            )
            for leaf in self.leaves
        ]
        return Manifest(
            store_id=uuid.uuid4().hex,
            csds=(),
            kernels={key: text for text, key in self._kernel_ids.items()},
            leaves=tuple(records),
            created_by={name: version(name) for name in ("jaxinf", "jax", "optax")},
        )

    def manifest(
        self, csd_roots: Sequence[str], chunk_elements: int, codec: str
    ) -> Manifest:
        """A manifest for a new store: chooses grids and deals chunks to the CSDs.

        Args:
          csd_roots: where chunks go; empty for the store itself.
          chunk_elements: largest chunk.
          codec: in which the float32 state of leaves that are no small ones is stored;
            empty for none.
        """
        outline = self.outline()
        coded = [replace(r, states=coded_states(r, codec)) for r in outline.leaves]
        leaves = [
            replace(
                record,
                chunk_shape=choose_grid(
                    record.shape,
                    shard_counts=record.shard_counts or None,
                    max_chunk_elements=chunk_elements,
                ).chunk_shape,
            )
            for record in coded
        ]
        return deal_chunks(replace(outline, leaves=tuple(leaves)), csd_roots)


def coded_states(leaf: LeafRecord, codec: str) -> tuple[StateRecord, ...]:
    """The states of a leaf as they are stored with a codec; "" for none."""
    is_small = np.prod(leaf.shape, dtype=np.int64) < _MIN_CODED_ELEMENTS
    if not codec or is_small:
        return leaf.states
    stored: list[StateRecord] = []
    for state in leaf.states:
        is_coded = state.dtype == "float32" and state.name not in _NEVER_CODED
        stored += state.coded(codec) if is_coded else [state]
    return tuple(stored)


def kernel_needs(description: StoreDescription, held: Manifest) -> list[KernelNeed]:
    """What the leaves of a store ask of its CSDs."""
    return [
        KernelNeed(
            leaf=leaf.name,
            kernel=leaf.kernel,
            codecs=tuple(
                state.codec
                for state in record.states
                if state.codec != "scale" and state.name != ERROR_FEEDBACK
            ),
            dtype=leaf.device_dtype,
        )
        for leaf, record in zip(description.leaves, held.leaves, strict=True)
    ]
