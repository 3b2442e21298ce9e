"""The shape of a store: its chunks, and the subgroups that they are moved in.

Invariant: it is known before the store is made, and does not change.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from jaxinf.engine.division import longest, window_bytes
from jaxinf.engine.options import StoreOptions
from jaxinf.engine.subgroup_layout import SubgroupLayout
from jaxinf.errors import StoreMismatchError
from jaxinf.layout import Subgroup, covers
from jaxinf.store import StoreDirectory
from jaxinf.transfer import stays
from jaxinf.transfer.pages import page_ceil


class StoreShape:
    """The chunks and subgroups of an existing or future store.

    Args:
      options: the options of `open_store`.
      directory: the store, whose files may be missing.
      layouts: its subgroups by leaf and chunk.
    """

    def __init__(
        self,
        options: StoreOptions,
        directory: StoreDirectory,
        layouts: list[list[list[SubgroupLayout]]],
    ) -> None:
        self.options = options
        self.directory = directory
        self._layouts = layouts
        self._boxes: dict[tuple[Any, ...], list[SubgroupLayout]] = {}

    def chunk_layouts(self, leaf: int) -> Sequence[Sequence[SubgroupLayout]]:
        """Returns the held subgroups of a leaf, by chunk."""
        return [chunk for chunk in self._layouts[leaf] if chunk]

    @property
    def least_memory_bytes(self) -> int:
        """The least memory for buffers on the host, in bytes.

        Three of the longest subgroups: one to read into, one to compute in, one to
        write from.
        """
        return 3 * longest(self._layouts)[0]

    def staying(
        self, memory_bytes: int, moved: Collection[Subgroup] | None = None
    ) -> frozenset[Subgroup]:
        """Returns the subgroups whose states stay in the host's memory between steps.

        Each is used once a step, so their order makes no difference to the bytes that
        are not read again (docs/decisions.md). Short ones stay first, as they cost the
        most requests. State of cards never passes the host.

        Args:
          memory_bytes: the limit of buffers on the host.
          moved: the subgroups that steps move; None for all.
        """
        if self.options.csd.has_cards:
            return frozenset()
        everything = [one for leaf in self._layouts for chunk in leaf for one in chunk]
        if sum([one.num_bytes for one in everything]) > memory_bytes:
            manifest = self.directory.manifest
            memory_bytes -= window_bytes(self.options, manifest, self._layouts)
        order = [
            (one.subgroup, one.num_bytes)
            for one in sorted(everything, key=lambda layout: layout.num_bytes)
            if moved is None or one.subgroup in moved
        ]
        found = zip(order, stays(order, max(0, memory_bytes)), strict=True)
        return frozenset(subgroup for (subgroup, _), is_kept in found if is_kept)

    @property
    def export_bytes(self) -> int:
        """Memory on the host that exports take."""
        return self.options.export_bytes(self.directory.manifest)

    def can_move(self, leaf: int, origin: Sequence[int], extent: Sequence[int]) -> bool:
        """Whether a box of a leaf consists of whole chunks, so it can move alone."""
        try:
            self.layouts(leaf, origin, extent)
        except StoreMismatchError:
            return False
        return True

    def layouts(
        self, leaf: int, origin: Sequence[int], extent: Sequence[int]
    ) -> Sequence[SubgroupLayout]:
        """Returns the held subgroups of a box: a JAX device's shard, or a leaf.

        Raises:
          StoreMismatchError: the box cuts a chunk, so the store does not fit the mesh.
        """
        box = leaf, tuple(origin), tuple(extent)
        if box not in self._boxes:
            self._boxes[box] = [
                layout
                for chunk in self.chunks_of(*box)
                for layout in self._layouts[leaf][chunk]
            ]
        return self._boxes[box]

    def file_bytes(self, layout: SubgroupLayout, states: Iterable[int]) -> int:
        """Returns the bytes that drives move for states of a subgroup, by number.

        Whole pages, but no more than the file has, whose end may be odd.
        """
        leaf, number = layout.subgroup.leaf, layout.subgroup.chunk
        records, moved = self.directory.manifest.leaves[leaf].states, 0
        for state in states:
            extent = layout.extents[state]
            stored = self.directory.state_chunk(leaf, number, records[state])
            left = stored.stored_elements * extent.dtype.itemsize
            left -= extent.file_offset_bytes
            moved += min(page_ceil(extent.num_bytes), left)
        return moved

    def chunks_of(
        self, leaf: int, origin: Sequence[int], extent: Sequence[int]
    ) -> Sequence[int]:
        """Returns the numbers of the held chunks of a box, as for `layouts`."""
        record = self.directory.manifest.leaves[leaf]
        try:
            found = covers(record.grid, tuple(origin), tuple(extent))
            return (
                found
                if record.is_whole
                else [n for n in found if record.places[n] >= 0]
            )
        except ValueError as error:
            raise StoreMismatchError(
                f"leaf {record.name}: the store's chunks {record.chunk_shape} (made "
                f"for shards {record.shard_counts}) do not divide at the shard "
                f"boundaries of this run ({error}); run on a mesh whose shards are "
                "whole multiples, or on one JAX device; give the trainer --elastic, "
                "which gives the store another grid; or take the step to a new store "
                "(Store.params and Store.state, then Store.load)"
            ) from error

    def divides(self, leaf: int, origin: Sequence[int], extent: Sequence[int]) -> bool:
        """Whether a box of a leaf consists of whole chunks."""
        grid = self.directory.manifest.leaves[leaf].grid
        try:
            covers(grid, tuple(origin), tuple(extent))
        except ValueError:
            return False
        return True
