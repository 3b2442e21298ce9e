"""One store, open in this process: lock, files, CSDs and transfer handler together.

Invariant: all that is on disk was checked before anything is written, and after the
first failure nothing is written any more.
"""

import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxinf.csd import Csd, CsdFleet, open_csds
from jaxinf.engine.admission import (
    check_format,
    check_place,
    check_roots,
    check_same,
)
from jaxinf.engine.chunks import ChunkTable
from jaxinf.engine.cuts import cut_subgroups, longest, subgroup_elements
from jaxinf.engine.description import StoreDescription, kernel_needs
from jaxinf.engine.failure import Failure, closed_error
from jaxinf.engine.handler import TransferHandler
from jaxinf.engine.options import SessionOptions
from jaxinf.engine.tasks import SubgroupLayout
from jaxinf.engine.timeline import Timeline
from jaxinf.errors import StaleStateError, StoreClosedError, StoreMismatchError
from jaxinf.io import ByteMeters
from jaxinf.io.failures import translated
from jaxinf.layout import covers
from jaxinf.store import (
    CODECS,
    CommitRecord,
    Manifest,
    StoreDirectory,
    StoreLock,
    check_never_committed,
    check_space,
    claim_csds,
    create_store,
    discard_store,
    finish_rebalance,
    prune_leftovers,
    prune_snapshots,
    restore_checkpoint,
)

__all__ = ["Session"]

_LOG = logging.getLogger("jaxinf")


class Session:
    """An open store, or the place where one will be made by `bind`.

    Thread-safe. Everything that touches the drive is in `jaxinf.engine.steps` and
    `jaxinf.engine.state`; this class holds what they share.

    Raises:
      StoreError: as `jaxinf.open_store` documents.
    """

    def __init__(self, options: SessionOptions) -> None:
        self.options = options
        self.meters = ByteMeters()
        self.timeline = Timeline()
        self.directory: StoreDirectory | None = None
        self._bound: list[StoreDescription] = []
        self.commit: CommitRecord | None = None
        self.finished: CommitRecord | None = None
        self._chunks: ChunkTable | None = None
        self._lock: StoreLock | None = None
        self._fleet: CsdFleet | None = None
        self._handler: TransferHandler | None = None
        self.csds: list[Csd] = []
        self._layouts: list[list[list[SubgroupLayout]]] = []
        self._boxes: dict[tuple[Any, ...], list[SubgroupLayout]] = {}
        self._guard = threading.RLock()
        self._failure = Failure()
        self._is_reported = False
        self._is_closed = False
        self._on_close: list[Callable[[], None]] = []
        check_place(options.path)
        if self._is_there():
            self._open()
        else:
            self._check_restorable()

    def _check_restorable(self) -> None:
        if self.options.restore is not None:
            raise ValueError(
                f"{self.options.path}: expected a store with a checkpoint "
                f"{self.options.restore!r} to restore, found no committed step"
            )

    # --- failure -------------------------------------------------------------------

    def check(self) -> None:
        """Raises the failure that stopped the store, the original exception, if any."""
        if self._failure.error is not None:
            self._is_reported = True
            raise self._failure.error
        if self._is_closed:
            raise closed_error(self.options.path)

    def fail(self, error: BaseException) -> None:
        """Stops the store for good, its workers too; the first error wins."""
        if self._is_closed and isinstance(error, StoreClosedError):
            return  # a step that was given up by `close`
        is_rare = self.options.steps_per_commit != 1
        if self._failure.error is None and is_rare and self.num_uncommitted:
            error.add_note(self.loss_note())
        self._failure.set(error)

    @property
    def num_uncommitted(self) -> int:
        """Finished steps that no commit holds yet."""
        if self.finished is None or self.commit is None:
            return 0
        return self.finished.step - self.commit.step

    def loss_note(self) -> str:
        """What it means that the steps since the last commit are lost."""
        assert self.commit is not None
        return (
            f"{self.options.path}: {self.num_uncommitted} finished steps since the "
            f"commit of step {self.commit.step} are lost, as the store's durability "
            f"allows; opened again, it goes on at step {self.commit.step}"
        )

    @property
    def failure(self) -> BaseException | None:
        """What stopped the store."""
        return self._failure.error

    @property
    def is_failure_unreported(self) -> bool:
        """Whether something stopped the store that `check` has not raised yet."""
        return self._failure.error is not None and not self._is_reported

    # --- opening and closing -------------------------------------------------------

    def _open(self) -> None:
        self._lock = StoreLock(self.options.path)
        try:
            directory = StoreDirectory.open(self.options.path)
            self.commit = self.finished = directory.read_commit()
            if self.commit is None:
                self._check_restorable()
                check_never_committed(directory)
                _LOG.info(
                    "%s: its creation was interrupted before a first step was "
                    "committed; it will be made anew",
                    self.options.path,
                )
                return
            check_roots(self.options, directory.manifest)
            check_format(self.options, directory.manifest)
            claim_csds(directory)
            finish_rebalance(directory)
            prune_snapshots(directory)
            prune_leftovers(directory)
            directory.prune_replacements()
            if self.options.restore is not None:
                record = restore_checkpoint(directory, self.options.restore)
                self.commit = self.finished = record
            self._prepare_csds(directory.manifest)
            self._attach(directory)
        except BaseException:
            self.commit = self.finished = None
            self._detach()
            self._lock.release()
            self._lock = None
            raise

    def _prepare_csds(self, manifest: Manifest) -> CsdFleet:
        """Opens the CSDs of a store that is there or will be made; writes nothing."""
        if self._fleet is not None:
            self._fleet.close()
        path = self.options.path
        here = next(p for p in (path, *path.parents) if p.exists())
        self._fleet = open_csds(
            self.options.csd,
            [Path(root) for root in manifest.csds] or [here],
            memory_bytes=self.options.memory_bytes,
            meters=self.meters,
        )
        self._boxes.clear()
        self._layouts = cut_subgroups(
            manifest, subgroup_elements(self.options, manifest)
        )
        self._fleet.check_buffer(*longest(self._layouts))
        return self._fleet

    def _attach(self, directory: StoreDirectory) -> None:
        """Starts workers for a store whose files exist."""
        assert self._fleet is not None
        roots = [directory.csd_directory(c) for c in range(directory.num_csds)]
        self.csds = list(self._fleet.attach(roots, *longest(self._layouts)))
        self._chunks = ChunkTable(
            directory,
            directory.committed_slot(),
            self.commit.checksums if self.commit else {},
            self.options.verify,
        )
        self._handler = TransferHandler(
            directory,
            self._chunks,
            self.csds,
            num_workers=self.options.num_workers,
            num_kernels=self._fleet.num_kernels,
            failure=self._failure,
            timeline=self.timeline,
        )
        self.directory = directory

    def _detach(self) -> None:
        """Stops workers and frees memory."""
        if self._handler is not None:
            self._handler.close()
        if self._fleet is not None:
            self._fleet.close()

    def bind(self, description: StoreDescription, *, may_create: bool = False) -> bool:
        """Ties the store to an optimizer and a tree; can make the store if it is new.

        Returns:
          Whether the store is new, that is, waits for `initialise` of every leaf.

        Raises:
          StoreMismatchError: the store holds something else; shows the difference.
          StoreSpaceError: there is no room; nothing was written.
          StaleStateError: there is no store, and it may not be made here.
        """
        with self._guard:
            self.check()
            if any(bound is description for bound in self._bound):
                return self.commit is None
            if self.commit is None and may_create:
                self._create(description)
            elif self.commit is None:
                raise StaleStateError(
                    f"{self.options.path}: update found no step in the store; call "
                    "tx.init(params) on it first"
                )
            if self.commit is not None:
                check_same(self.files, description)
                assert self._fleet is not None
                self._fleet.check(kernel_needs(description, self.files.manifest))
            self._bound.append(description)
            return self.commit is None

    def _create(self, description: StoreDescription) -> None:
        """Makes the store, in place of one that was never finished.

        If another process has made and closed one since, that one is opened.
        """
        if self._lock is None and self._is_there():
            self._open()
        if self.commit is not None:
            return
        master = self._master_codec(description)
        self._bound.clear()  # an init on this store that did not come to its end
        self._detach()
        roots = [str(root) for root in self.options.csd_roots]
        if self._is_there():
            leftover = StoreDirectory.open(self.options.path)
            roots = roots or list(leftover.manifest.csds)
            discard_store(leftover)
        codec = self.options.state if self.options.state in CODECS else ""
        chunk_elements = self.options.chunk_elements
        manifest = description.manifest(roots, chunk_elements, codec, master)
        directory = StoreDirectory(self.options.path, manifest)
        subgroup_elements(self.options, manifest)
        check_space(directory)
        self._prepare_csds(manifest).check(kernel_needs(description, manifest))
        if self._lock is None:
            check_place(self.options.path)
            with translated("creation", self.options.path):
                self.options.path.mkdir(parents=True, exist_ok=True)
                self._lock = StoreLock(self.options.path)
            if self._is_there():  # another process was faster by a hair
                self._lock.release()
                self._lock = None
                self._create(description)
                return
        create_store(directory)
        self._attach(directory)

    def _master_codec(self, description: StoreDescription) -> str:
        """How a new store holds the master of bfloat16 params."""
        if self.options.master != "none":
            is_split = self.options.master == "auto" and self.options.csd.codes_params
            return "split" if is_split else ""
        dtypes = {leaf.dtype for leaf in description.leaves}
        if "bfloat16" not in dtypes or "float16" in dtypes:
            raise ValueError(
                f"{self.options.path}: master='none': expected params in bfloat16 "
                "(float32 ones, if any, are their own master), found "
                f"{', '.join(sorted(dtypes)) or 'no params'}; leave it out"
            )
        return "bf16"

    def _is_there(self) -> bool:
        return (self.options.path / "jaxinf.json").exists()

    def on_close(self, action: Callable[[], None]) -> None:
        """Registers what `close` does before the workers stop."""
        self._on_close.append(action)

    def close(self) -> None:
        """Stops the workers, frees the memory, gives the lock back; idempotent."""
        with self._guard:
            if self._is_closed:
                return
            self._is_closed = True
        try:
            for action in self._on_close:
                action()
        finally:
            self._detach()
            if self._lock is not None:
                self._lock.release()

    def disown(self) -> None:
        """In a forked child: the store, its threads and its lock are the parent's."""
        self._guard = threading.RLock()
        self._failure = Failure()
        self._failure.set(
            StoreClosedError(
                f"{self.options.path}: the store was opened by process "
                f"{os.getppid()}, this is a fork of it, and a store has one process; "
                "use it there, or open it here after it is closed there"
            )
        )
        self._is_closed = True
        if self._lock is not None:
            self._lock.release()

    # --- for the parts that stream state -------------------------------------------

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._is_closed

    @property
    def files(self) -> StoreDirectory:
        """The store's files; the store must exist."""
        assert self.directory is not None
        return self.directory

    @property
    def chunks(self) -> ChunkTable:
        """Where the newest version of each chunk is; the store must exist."""
        assert self._chunks is not None
        return self._chunks

    def publish(self) -> None:
        """Commits the last finished step; everything of it is written."""
        assert self.finished is not None
        chunks = self.chunks
        chunks.share_unwritten()
        record = replace(self.finished, checksums=chunks.checksums())
        with self.timeline.span("sync"):
            self.files.sync()
        with self.timeline.span("publish"):
            self.files.publish(chunks.target, record)
        chunks.end_commit()
        self.commit = self.finished = record

    @property
    def handler(self) -> TransferHandler:
        """The transfer handler; the store must exist."""
        assert self._handler is not None
        return self._handler

    @property
    def peak_memory_bytes(self) -> int:
        """The most that buffers have taken of the budget so far."""
        return self._fleet.peak_bytes if self._fleet else 0

    def layouts(
        self, leaf: int, origin: Sequence[int], extent: Sequence[int]
    ) -> Sequence[SubgroupLayout]:
        """The subgroups of a box of a leaf: a JAX device's shard, or all of it.

        Raises:
          StoreMismatchError: the box cuts a chunk: the mesh is not one that the store
            can serve.
        """
        box = leaf, tuple(origin), tuple(extent)
        if box in self._boxes:
            return self._boxes[box]
        record = self.files.manifest.leaves[leaf]
        try:
            positions = covers(record.grid, *box[1:])
        except ValueError as error:
            raise StoreMismatchError(
                f"leaf {record.name}: the store's chunks {record.chunk_shape} (made "
                f"for shards {record.shard_counts}) do not divide at the shard "
                f"boundaries of this run ({error}); run on a mesh whose shards are "
                "whole multiples, or on one JAX device"
            ) from error
        found = [item for chunk in positions for item in self._layouts[leaf][chunk]]
        self._boxes[box] = found
        return found
