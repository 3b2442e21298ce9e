"""One store, open in this process: lock, files, CSDs and transfer handler together.

Invariant: all that is on disk was checked before anything is written, and after the
first failure nothing is written any more.
"""

import fnmatch
import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, TypeAlias

from jaxinf.csd import Csd, CsdFleet, open_csds, parse_csd
from jaxinf.engine.chunks import VERIFY_MODES, ChunkTable, VerifyMode
from jaxinf.engine.description import (
    StoreDescription,
    coded_states,
    kernel_needs,
)
from jaxinf.engine.failure import Failure, closed_error
from jaxinf.engine.handler import TransferHandler
from jaxinf.engine.tasks import SubgroupLayout
from jaxinf.engine.timeline import Timeline
from jaxinf.errors import (
    StaleStateError,
    StoreClosedError,
    StoreFormatError,
    StoreMismatchError,
)
from jaxinf.io import ByteMeters
from jaxinf.io.failures import translated
from jaxinf.layout import (
    CHUNK_ALIGNMENT_ELEMENTS,
    SCALES_ALIGNMENT_ELEMENTS,
    covers,
    subgroups,
)
from jaxinf.store import (
    CODECS,
    CommitRecord,
    LeafRecord,
    Manifest,
    StoreDirectory,
    StoreLock,
    finish_rebalance,
    prune_leftovers,
    prune_snapshots,
    restore_checkpoint,
)

__all__ = ["Durability", "MasterReads", "Session", "SessionOptions", "StateFormat"]

_LOG = logging.getLogger("jaxinf")

Durability: TypeAlias = Literal["step", "checkpoint"] | int
"""After which steps a commit is made; see `jaxinf.open_store`."""

StateFormat: TypeAlias = Literal["fp32", "bf16", "int8"]
"""How the optimizer's float32 state is stored; see `jaxinf.open_store`."""

MasterReads: TypeAlias = Literal["auto", "stored"]
"""Where a step takes the master params from; see `jaxinf.open_store`."""

# Files that may stand in a directory that a new store is made in.
_HARMLESS = ("lost+found", "lock", "publish.lock", "current.tmp", ".jaxinf*")


class SessionOptions:
    """How to open a store; see `jaxinf.open_store`. Checked on construction.

    Raises:
      ValueError: naming the argument.
    """

    def __init__(
        self,
        path: Path,
        *,
        csd_roots: Sequence[Path],
        csd: str,
        memory_bytes: int,
        num_workers: int,
        chunk_elements: int,
        durability: Durability = "step",
        verify: VerifyMode = "always",
        restore: str | None = None,
        master: MasterReads = "auto",
        state: StateFormat | None = None,
    ) -> None:
        if num_workers < 1:
            raise ValueError(f"num_workers={num_workers}: expected at least 1")
        if chunk_elements < CHUNK_ALIGNMENT_ELEMENTS:
            raise ValueError(
                f"chunk_elements={chunk_elements}: expected at least "
                f"{CHUNK_ALIGNMENT_ELEMENTS}"
            )
        if verify not in VERIFY_MODES:
            raise ValueError(
                f"verify={verify!r}: expected one of "
                f"{', '.join(map(repr, VERIFY_MODES))}"
            )
        self.steps_per_commit = _steps_per_commit(durability)
        for root in csd_roots:
            if not root.is_dir():
                raise ValueError(
                    f"CSD root {root}: expected a directory on a mounted drive, found "
                    f"{'a file' if root.exists() else 'nothing'}; create or mount it"
                )
            _check_writable(root)
        if len(set(csd_roots)) != len(csd_roots):
            raise ValueError(f"csds: the same root is given twice: {list(csd_roots)}")
        self.path = path
        self.csd_roots = tuple(csd_roots)
        self.csd = parse_csd(csd)
        self.memory_bytes = memory_bytes
        self.num_workers = num_workers
        self.chunk_elements = chunk_elements
        self.verify: VerifyMode = verify
        if master not in ("auto", "stored"):
            raise ValueError(f"master={master!r}: expected 'auto' or 'stored'")
        if state not in (None, "fp32", *CODECS):
            raise ValueError(f"state={state!r}: expected 'fp32', 'bf16' or 'int8'")
        self.state: StateFormat | None = state
        self.restore = restore
        self.master: MasterReads = master


def _steps_per_commit(durability: Durability) -> int | None:
    """None where only a checkpoint, `wait` or `close` commits."""
    if durability == "checkpoint":
        return None
    if durability == "step":
        return 1
    if isinstance(durability, bool) or not isinstance(durability, int):
        raise ValueError(
            f'durability={durability!r}: expected "step", "checkpoint", or a number '
            "of steps"
        )
    if durability < 1:
        raise ValueError(f"durability={durability}: expected at least 1 step")
    return durability


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
        self._guard = threading.RLock()
        self._failure = Failure()
        self._is_reported = False
        self._is_closed = False
        self._on_close: list[Callable[[], None]] = []
        _check_place(options.path)
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
                directory.check_never_committed()
                _LOG.info(
                    "%s: its creation was interrupted before a first step was "
                    "committed; it will be made anew",
                    self.options.path,
                )
                return
            self._check_roots(directory.manifest)
            self._check_format(directory.manifest)
            directory.claim_csds()
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

    def _check_roots(self, manifest: Manifest) -> None:
        given = tuple(str(root) for root in self.options.csd_roots)
        if given and given != manifest.csds:
            raise StoreMismatchError(
                f"{self.options.path}: the store's CSD roots are "
                f"{list(manifest.csds) or 'the store itself'}, given were "
                f"{list(given)}; leave csds out when opening an existing store"
            )
        for csd, root in enumerate(manifest.csds):
            if not (Path(root) / f"jaxinf-{manifest.store_id}").is_dir():
                raise StoreFormatError(
                    f"{self.options.path}: CSD {csd} of the store should be at {root} "
                    f"(directory jaxinf-{manifest.store_id}), which is not there; "
                    "mount the drive, or restore the directory"
                )

    def _check_format(self, manifest: Manifest) -> None:
        wanted = self.options.state
        held = {state.codec for leaf in manifest.leaves for state in leaf.states}
        found = next((codec for codec in CODECS if codec in held), "fp32")
        codec = wanted if wanted in CODECS else ""
        is_other = any(
            leaf.states != coded_states(replace(leaf, states=leaf.slots), codec)
            for leaf in manifest.leaves
        )
        if wanted is not None and is_other:
            raise StoreMismatchError(
                f"{self.options.path}: the store holds its state as {found}, asked for "
                f"was state={wanted!r}; leave it out, or make a store of the other "
                f'kind from this one ("jaxinf store convert {self.options.path} '
                f'NEW --state {wanted}")'
            )

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
        self._layouts = _layouts(manifest, self._subgroup_elements(manifest))
        self._fleet.check_buffer(*_longest(self._layouts))
        return self._fleet

    def _attach(self, directory: StoreDirectory) -> None:
        """Starts workers for a store whose files exist."""
        assert self._fleet is not None
        roots = [directory.csd_directory(c) for c in range(directory.num_csds)]
        self.csds = list(self._fleet.attach(roots, *_longest(self._layouts)))
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

    def _subgroup_elements(self, manifest: Manifest) -> int:
        """Longest subgroup of which every worker can hold two in the memory budget."""
        sizes = [sum(s.itemsize for s in leaf.states) for leaf in manifest.leaves]
        element_bytes = max(sizes, default=4)
        unit = max(map(_unit_elements, manifest.leaves), default=0)
        unit = max(unit, CHUNK_ALIGNMENT_ELEMENTS)
        num_buffers = 2 * self.options.num_workers
        fitting = self.options.memory_bytes // (num_buffers * element_bytes)
        fitting -= fitting % unit
        if fitting < unit:
            need = num_buffers * element_bytes * unit
            raise ValueError(
                f"memory_bytes={self.options.memory_bytes}: {self.options.num_workers} "
                f"workers need at least {need} bytes for this optimizer's state; give "
                "more memory or fewer workers"
            )
        return max(unit, min(fitting, self.options.chunk_elements))

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
                _check_same(self.files, description)
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
        self._bound.clear()  # an init on this store that did not come to its end
        self._detach()
        roots = [str(root) for root in self.options.csd_roots]
        if self._is_there():
            leftover = StoreDirectory.open(self.options.path)
            roots = roots or list(leftover.manifest.csds)
            leftover.discard()
        codec = self.options.state if self.options.state in CODECS else ""
        manifest = description.manifest(roots, self.options.chunk_elements, codec)
        directory = StoreDirectory(self.options.path, manifest)
        self._subgroup_elements(manifest)
        directory.check_space()
        self._prepare_csds(manifest).check(kernel_needs(description, manifest))
        if self._lock is None:
            _check_place(self.options.path)
            with translated("creation", self.options.path):
                self.options.path.mkdir(parents=True, exist_ok=True)
                self._lock = StoreLock(self.options.path)
            if self._is_there():  # another process was faster by a hair
                self._lock.release()
                self._lock = None
                self._create(description)
                return
        directory.create()
        self._attach(directory)

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
    ) -> list[SubgroupLayout]:
        """The subgroups of a box of a leaf: a JAX device's shard, or all of it.

        Raises:
          StoreMismatchError: the box cuts a chunk: the mesh is not one that the store
            can serve.
        """
        record = self.files.manifest.leaves[leaf]
        try:
            positions = covers(record.grid, tuple(origin), tuple(extent))
        except ValueError as error:
            raise StoreMismatchError(
                f"leaf {record.name}: the store's chunks {record.chunk_shape} (made "
                f"for shards {record.shard_counts}) do not divide at the shard "
                f"boundaries of this run ({error}); run on a mesh whose shards are "
                "whole multiples, or on one JAX device"
            ) from error
        return [item for chunk in positions for item in self._layouts[leaf][chunk]]


def _layouts(manifest: Manifest, max_elements: int) -> list[list[list[SubgroupLayout]]]:
    """By leaf and chunk, the subgroups."""
    result = []
    for leaf, record in enumerate(manifest.leaves):
        per_chunk: list[list[SubgroupLayout]] = [[] for _ in record.csds]
        unit = _unit_elements(record)
        for item in subgroups(leaf, record.grid, record.csds, max_elements, unit):
            per_chunk[item.chunk].append(SubgroupLayout.of(item, record))
        result.append(per_chunk)
    return result


def _longest(layouts: list[list[list[SubgroupLayout]]]) -> tuple[int, int]:
    """Bytes of a buffer and elements of a subgroup, the most that there are."""
    items = [item for leaf in layouts for chunk in leaf for item in chunk]
    return (
        max((item.num_bytes for item in items), default=0),
        max((item.subgroup.num_elements for item in items), default=0),
    )


def _unit_elements(leaf: LeafRecord) -> int:
    """Where subgroups may start: on a page of every array's file."""
    has_scales = any(state.codec == "scale" for state in leaf.states)
    return SCALES_ALIGNMENT_ELEMENTS if has_scales else CHUNK_ALIGNMENT_ELEMENTS


def _check_place(path: Path) -> None:
    """Refuses what can neither be a store nor become one."""
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(
            f"store {path}: expected a directory or nothing there yet, found a file; "
            "give another path"
        )
    _check_writable(path)
    if not path.exists() or (path / "jaxinf.json").exists():
        return
    foreign = sorted(
        entry.name
        for entry in path.iterdir()
        if not any(fnmatch.fnmatchcase(entry.name, known) for known in _HARMLESS)
    )
    # Looked for again: another process may have begun to make it since.
    if foreign and not (path / "jaxinf.json").exists():
        raise StoreFormatError(
            f"store {path}: expected a jaxinf store or an empty directory, found "
            f"neither jaxinf.json nor emptiness ({', '.join(foreign[:3])}, …); give "
            "another path"
        )


def _check_same(directory: StoreDirectory, description: StoreDescription) -> None:
    held, wanted = directory.manifest, description.outline()
    lines = held.tree_difference(wanted)
    if not lines:
        lines = held.kernel_difference(wanted)
        if lines and dict(held.created_by) != dict(wanted.created_by):
            _LOG.warning(
                "%s: the optimizer's equations differ from those the store was made "
                "with; so do the versions of jax or optax (%s then, %s now). The state "
                "has the same form, so training goes on:\n  %s",
                directory.path,
                dict(held.created_by),
                dict(wanted.created_by),
                "\n  ".join(lines),
            )
            return
    if lines:
        shown = "\n  ".join(lines[:40])
        raise StoreMismatchError(
            f"{directory.path}: the store holds the state of another optimizer or "
            f"model than it is opened with:\n  {shown}\nOpen it with what it was made "
            "with, or use another store"
        )


def _check_writable(path: Path) -> None:
    existing = path
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir():
        raise NotADirectoryError(
            f"{path}: expected a directory, or a place for one, found the file "
            f"{existing}; give another path"
        )
    if not os.access(existing, os.W_OK | os.X_OK):
        raise PermissionError(
            f"{path}: expected a place that can be written to, found {existing} "
            "read-only for this user; change its permissions, remount it, or give "
            "another path"
        )
