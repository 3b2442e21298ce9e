"""The place of a store: finds, opens and makes stores.

Invariant: everything on disk is checked before anything is written, and nothing is
written without the store's lock.
"""

import logging
from dataclasses import replace
from pathlib import Path

from jaxinf.csd import open_csds
from jaxinf.engine.admission import check_format, check_place, check_roots
from jaxinf.engine.dealing import deal_new_store, tell_shares
from jaxinf.engine.description import StoreDescription, kernel_needs
from jaxinf.engine.division import (
    check_host_tier,
    check_memory,
    cut_subgroups,
    longest,
    subgroup_elements,
)
from jaxinf.engine.member_opening import (
    check_alone,
    check_members,
    check_plans,
    go_on_from,
    held_summary,
    own_member,
    planned_summary,
)
from jaxinf.engine.opened import OpenedCsds, OpenStore, StoreRun
from jaxinf.engine.shape import StoreShape
from jaxinf.io.failures import translated
from jaxinf.store import (
    CODECS,
    SLOTS,
    CommitRecord,
    Manifest,
    Member,
    StoreDirectory,
    StoreLock,
    check_never_committed,
    check_space,
    check_unclaimed,
    claim_csds,
    complete_spare,
    create_store,
    discard_store,
    is_unfinished,
    lock_exclusively,
    other_slot,
    prune_leftovers,
    prune_snapshots,
    read_owned,
    restore_checkpoint,
)
from jaxinf.typing import JsonValue

_LOG = logging.getLogger("jaxinf")


class StorePlace:
    """The place of an existing or future store. Not thread-safe.

    Args:
      run: the run of the `Store`, with its options.

    Raises:
      NotADirectoryError, PermissionError: the path cannot be a store.
      StoreFormatError: the path is not a store, and cannot become one.
    """

    def __init__(self, run: StoreRun) -> None:
        self._run = run
        self._options = run.options
        self.path = run.options.path
        self._lock: StoreLock | None = None
        check_place(self.path)
        if not self.is_there():
            check_unclaimed(self.path, self._options.csd_roots)

    def is_there(self) -> bool:
        """Whether there is a store, or the remains of an interrupted creation."""
        return (self.path / "jaxinf.json").exists()

    def check_restorable(self) -> None:
        """Refuses to restore if there is no store with a committed step."""
        if self._options.restore is not None:
            raise ValueError(
                f"{self.path}: expected a store with a checkpoint "
                f"{self._options.restore!r} to restore, found no committed step"
            )

    def release(self) -> None:
        """Releases the lock; idempotent. In a forked child the parent keeps it."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    # --- a store that is there -----------------------------------------------------

    def open(self) -> OpenStore | None:
        """Locks and opens the store.

        Returns:
          The open store; None if its creation was interrupted. It is then locked, and
          must be made again.

        Raises:
          StoreError: as `jaxinf.open_store` documents; the lock is given back.
        """
        if not self._run.group.is_alone:
            return self._open_member()
        self._lock = StoreLock(self.path)
        return self._open_locked(self._lock)

    def _open_member(self) -> OpenStore | None:
        group, path = self._run.group, self.path
        opened: OpenStore | None = None

        def own() -> JsonValue:
            if not self.is_there():
                return None
            self._lock = StoreLock(path)
            return held_summary(path, group, self._options.restore)

        def recover() -> None:
            nonlocal opened
            if self._lock is not None:
                go_on_from(StoreDirectory.open(path), self._lock, step)
                opened = self._open_locked(self._lock)

        try:
            step = check_members(path, group.gather("open_store", own))
            group.gather("open_store", recover)
        except BaseException:
            if opened is not None:
                opened.close()
            self.release()
            raise
        return opened

    def _open_locked(self, lock: StoreLock) -> OpenStore | None:
        try:
            with lock_exclusively(self.path / "checkpoints.lock"):
                found = self._committed(lock)
            if found is None:
                return None
            directory, commit = found
            directory.check_files(directory.committed_slot() or SLOTS[0])
            return self._attach(directory, self._open_csds(directory.manifest), commit)
        except BaseException:
            self.release()
            raise

    def _committed(self, lock: StoreLock) -> tuple[StoreDirectory, CommitRecord] | None:
        """Returns the store at the step to continue from; removes leftovers."""
        options = self._options
        if is_unfinished(self.path):
            self.check_restorable()
            check_never_committed(self._leftover())
            _LOG.info(
                "%s: its creation was interrupted before a first step was committed; "
                "it will be made anew",
                self.path,
            )
            return None
        directory = read_owned(self.path, options.csd_roots)
        directory.lock = lock
        check_alone(directory, self._run.group)
        check_roots(options, directory.manifest)
        check_format(options, directory.manifest)
        tell_shares(options, directory.manifest)
        commit = None if options.restore else directory.read_commit()
        claim_csds(directory, options.csd_roots)
        prune_snapshots(directory)
        prune_leftovers(directory)
        directory.prune_replacements()
        if options.restore is not None:
            complete_spare(directory)
            commit = restore_checkpoint(directory, options.restore)
        assert commit is not None
        return directory, commit

    def _leftover(self) -> StoreDirectory:
        """Returns the unfinished store of an interrupted creation."""
        return read_owned(self.path, self._options.csd_roots, unmade=True)

    def roll_back(self, opened: OpenStore, place: str) -> OpenStore:
        """Makes another step the committed one; under the lock, between two steps.

        Args:
          place: the other slot, just verified, or ``checkpoints/NAME``.

        Returns:
          The store, opened at that step.
        """
        directory = opened.directory
        if place in SLOTS:
            commit = directory.read_record(place)
            directory.sync()  # chunks that were read may not be durable yet
            directory.publish(place, commit)
        else:
            with lock_exclusively(self.path / "checkpoints.lock"):
                name = place.removeprefix("checkpoints/")
                complete_spare(directory)
                commit = restore_checkpoint(directory, name)
        opened.close()
        return self._attach(directory, self._open_csds(directory.manifest), commit)

    def begin_anew(self, opened: OpenStore) -> OpenStore:
        """Opens the store as a new one, which waits for initial states.

        The commit of step 0 replaces the committed step; a caller that needs that step
        makes a checkpoint first.
        """
        directory = opened.directory
        committed = directory.committed_slot()
        assert committed is not None
        opened.close()
        complete_spare(directory)
        directory.unpublish(other_slot(committed))
        return self._attach(directory, self._open_csds(directory.manifest), None)

    def _open_csds(self, manifest: Manifest) -> OpenedCsds:
        """Opens the CSDs of an existing or future store; writes nothing."""
        here = next(p for p in (self.path, *self.path.parents) if p.exists())
        layouts = cut_subgroups(manifest, subgroup_elements(self._options, manifest))
        check_host_tier(self._options, layouts)
        memory_bytes = self._options.memory_bytes - self._options.export_bytes(manifest)
        fleet = open_csds(
            self._options.csd,
            [Path(root) for root in manifest.csds] or [here],
            memory_bytes=max(memory_bytes, longest(layouts)[0]),
            meters=self._run.meters,
        )
        try:
            fleet.check_buffer(*longest(layouts))
        except BaseException:
            fleet.close()
            raise
        return OpenedCsds(fleet, layouts)

    def _attach(
        self, directory: StoreDirectory, csds: OpenedCsds, commit: CommitRecord | None
    ) -> OpenStore:
        try:
            return OpenStore(self._run, directory, csds, commit)
        except BaseException:
            csds.fleet.close()
            raise

    # --- a store to be made --------------------------------------------------------

    def create(self, description: StoreDescription, *, uses_budget: bool) -> OpenStore:
        """Makes a store, also in place of an unfinished one.

        If another process has made and closed a store in the meantime, that is opened.

        Args:
          uses_budget: whether its own memory budget will be used.

        Raises:
          StoreError: nothing was written; as `jaxinf.smart_update` documents.
          CsdError: a CSD cannot run the optimizer.
        """
        group, made = self._run.group, []
        if group.is_alone and self._lock is None and self.is_there():
            found = self.open()
            if found is not None:
                return found

        def own() -> JsonValue:
            return planned_summary(self._manifest(description, []), self._options)

        def make() -> None:
            made.append(self._create(description, uses_budget=uses_budget))

        check_plans(self.path, group.gather("init", own))
        try:
            group.gather("init", make)
        except BaseException:
            for opened in made:
                opened.close()
            raise
        return made[0]

    def _create(self, description: StoreDescription, *, uses_budget: bool) -> OpenStore:
        manifest = self._new_manifest(description)
        if uses_budget:
            check_memory(self._options, manifest)
        manifest = deal_new_store(self._options, manifest)
        directory = StoreDirectory(self.path, manifest)
        check_space(directory, num_more=self._options.retention.most)
        csds = self._open_csds(manifest)
        try:
            csds.fleet.check(kernel_needs(description, manifest))
            if self._lock is None:
                check_place(self.path)
                with translated("creation", self.path):
                    self.path.mkdir(parents=True, exist_ok=True)
                    self._lock = StoreLock(self.path)
                if self.is_there():  # another process has made the store
                    csds.fleet.close()
                    self.release()
                    return self.create(description, uses_budget=uses_budget)
            directory.lock = self._lock
            create_store(directory)
        except BaseException:
            csds.fleet.close()
            raise
        return self._attach(directory, csds, None)

    def _new_manifest(self, description: StoreDescription) -> Manifest:
        roots: list[str] = []
        self._master_codec(description)  # before something is removed
        if self._lock is not None and self.is_there():
            leftover = self._leftover()
            roots = list(leftover.manifest.csds)
            discard_store(leftover, self._options.csd_roots)
        return self._manifest(description, roots)

    def shape(
        self, description: StoreDescription, member: Member | None = None
    ) -> StoreShape:
        """Returns the shape of a store to be made; writes nothing.

        Args:
          member: its part in a run; by default this process's.
        """
        manifest = self._manifest(description, [], member)
        layouts = cut_subgroups(manifest, subgroup_elements(self._options, manifest))
        return StoreShape(self._options, StoreDirectory(self.path, manifest), layouts)

    def _manifest(
        self,
        description: StoreDescription,
        held_roots: list[str],
        member: Member | None = None,
    ) -> Manifest:
        """Makes a new store's manifest; without options on the roots of another."""
        master = self._master_codec(description)
        roots = [str(root) for root in self._options.csd_roots] or held_roots
        codec = self._options.state if self._options.state in CODECS else ""
        member = member or own_member(self._run.group)
        manifest = description.manifest(roots, codec, master, member)
        return replace(manifest, store_id=self._run.new_id)

    def _master_codec(self, description: StoreDescription) -> str:
        """Returns the codec of the master of bfloat16 params in a new store."""
        if self._options.master != "none":
            return "split" if self._options.csd.codes_params else ""
        dtypes = {leaf.dtype for leaf in description.leaves}
        if "bfloat16" not in dtypes or "float16" in dtypes:
            raise ValueError(
                f"{self.path}: master='none': expected params in bfloat16 "
                "(float32 ones, if any, are their own master), found "
                f"{', '.join(sorted(dtypes)) or 'no params'}; leave it out"
            )
        return "bf16"
