"""A store as an optimizer uses it: bound to a tree, placed, updated, committed.

Invariant: what is asked of the files is asked of an `OpenStore`, which is there once a
store is, and of nothing that may be missing.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

from jax.sharding import NamedSharding

from jaxinf.csd import ScalarInputs
from jaxinf.engine.admission import check_same
from jaxinf.engine.annotations import Annotations
from jaxinf.engine.description import StoreDescription, kernel_needs
from jaxinf.engine.opened import OpenStore, StoreRun
from jaxinf.engine.options import StoreOptions
from jaxinf.engine.place import StorePlace
from jaxinf.engine.state import (
    committed_reader,
    compare_params,
    finish_initialisation,
    initialise,
    read_box,
    read_state,
)
from jaxinf.engine.steps import StepEngine, StepMetrics
from jaxinf.errors import StaleStateError, StoreFormatError, StoreMismatchError
from jaxinf.layout import LeafGrid, choose_grid
from jaxinf.store import CommitRecord, ScalarState, StepReader
from jaxinf.typing import Array, JsonValue

__all__ = ["Training"]


class Training:
    """What `jaxinf.smart_update` asks of a store. Thread-safe.

    Attributes:
      options: how the store is opened.
      shardings: of each leaf of the params that the last `init` saw, on one mesh;
        empty where they are not sharded.

    Raises:
      StoreError: as `jaxinf.open_store` documents.
    """

    def __init__(self, options: StoreOptions) -> None:
        self.options = options
        self.shardings: tuple[NamedSharding, ...] = ()
        self._run = StoreRun.of(options)
        self._place = StorePlace(self._run)
        self._annotations = Annotations(options.path)
        self._bound: list[StoreDescription] = []
        self._guard = threading.RLock()
        self._on_close: list[Callable[[], None]] = []
        self._opened: OpenStore | None = None
        self._steps: StepEngine | None = None
        if self._place.is_there():
            self._hold(self._place.open())
        else:
            self._place.check_restorable()

    def _hold(self, opened: OpenStore | None) -> None:
        self._opened = opened
        self._steps = None if opened is None else StepEngine(opened, self._annotations)

    # --- what there is ---------------------------------------------------------------

    @property
    def opened(self) -> OpenStore:
        """The open store, a new one that waits for its initial state included.

        Raises:
          StoreFormatError: there is none yet.
        """
        if self._opened is None:
            raise StoreFormatError(
                f"{self.options.path}: the store is empty until tx.init has run on it"
            )
        return self._opened

    @property
    def has_files(self) -> bool:
        """Whether there is a store, be it a new one."""
        return self._opened is not None

    @property
    def commit(self) -> CommitRecord | None:
        """The last committed step's record; None for a new store."""
        if self._opened is None or self._opened.is_new:
            return None
        return self._opened.commit

    @property
    def peak_memory_bytes(self) -> int:
        """The most that buffers have taken of the budget so far."""
        return 0 if self._opened is None else self._opened.fleet.peak_bytes

    def grid(self, description: StoreDescription, number: int) -> LeafGrid:
        """A leaf's chunks: the store's, or those that it will be made with."""
        if self._opened is not None:
            return self._opened.directory.manifest.leaves[number].grid
        leaf = description.leaves[number]
        return choose_grid(
            leaf.shape,
            shard_counts=leaf.shard_counts or None,
            max_chunk_elements=self.options.chunk_elements,
        )

    # --- failure and end -------------------------------------------------------------

    def check(self) -> None:
        """Raises the failure that stopped the store, the original exception, if any."""
        self._run.health.check()

    def fail(self, error: BaseException) -> None:
        """Stops the store for good, its workers too; the first error wins."""
        if self._opened is not None:
            self._opened.fail(error)
        elif self._run.health.is_for(error):
            self._run.health.failure.set(error)

    @property
    def failure(self) -> BaseException | None:
        """What stopped the store."""
        return self._run.health.failure.error

    @property
    def is_failure_unreported(self) -> bool:
        """Whether something stopped the store that `check` has not raised yet."""
        return self._run.health.is_unreported

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._run.health.is_closed

    def on_close(self, action: Callable[[], None]) -> None:
        """Registers what `close` does before the workers stop."""
        self._on_close.append(action)

    def close(self) -> None:
        """Ends the step in flight, stops the workers, gives the lock back; idempotent.

        What stopped the store is not raised.
        """
        with self._guard:
            if self.is_closed:
                return
            self._run.health.is_closed = True
        with contextlib.ExitStack() as stack:
            stack.callback(self._place.release)
            if self._opened is not None:
                stack.callback(self._opened.close)
            if self._steps is not None:
                self._steps.close()
            for action in self._on_close:
                action()

    def disown(self) -> None:
        """In a forked child: the store, its threads and its lock are the parent's."""
        self._guard = threading.RLock()
        self._run.health.disown()
        self._place.release()

    # --- init ------------------------------------------------------------------------

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
            if self.commit is None and not may_create:
                raise self._no_store()
            if any(bound is description for bound in self._bound):
                return self.opened.is_new
            if self.commit is None:
                self._create(description)
            opened = self.opened
            if not opened.is_new:
                check_same(opened.directory, description)
                needs = kernel_needs(description, opened.directory.manifest)
                opened.fleet.check(needs)
            self._bound.append(description)
            return opened.is_new

    def _create(self, description: StoreDescription) -> None:
        self._bound.clear()  # an init on this store that did not come to its end
        unfinished, self._opened, self._steps = self._opened, None, None
        if unfinished is not None:
            unfinished.close()
        self._hold(self._place.create(description))

    def _no_store(self) -> StaleStateError:
        return StaleStateError(
            f"{self.options.path}: update found no step in the store; call "
            "tx.init(params) on it first"
        )

    def initialise(
        self,
        description: StoreDescription,
        leaf: int,
        params: Array,
        origin: Sequence[int],
        inputs: ScalarInputs,
    ) -> None:
        """Writes a leaf's or a shard's master params and initial state; blocks.

        Args:
          description: what the new store is bound to.
          leaf: which.
          params: the leaf or one shard of it, its own dtype; only read.
          origin: index in the leaf of the array's first element.
          inputs: what the initial state is computed from beside the params.
        """
        kernel = description.leaves[leaf].init_kernel
        initialise(self.opened, leaf, kernel, params, origin, inputs)

    def finish_initialisation(self, scalars: Sequence[ScalarState]) -> None:
        """Commits step 0; every leaf must have been initialised."""
        finish_initialisation(self.opened, scalars, self._annotations.take(0))

    def compare_params(self, leaf: int, params: Array, origin: Sequence[int]) -> None:
        """Checks that params are what the store holds, rounded to their dtype.

        Raises:
          StoreMismatchError: they are not; says where and what to do.
        """
        compare_params(self.opened, leaf, params, origin)

    def params_reader(self, memory_bytes: int) -> StepReader:
        """Reads the committed step for `read_params`, until the next commit.

        Args:
          memory_bytes: for what is being read.
        """
        return committed_reader(self.opened, memory_bytes)

    def read_params(
        self, reader: StepReader, leaf: int, out: Array, origin: Sequence[int]
    ) -> None:
        """Reads a box of a leaf's master params, as of the committed step; blocks.

        A step may be under way that is to be committed: what it writes is not seen.

        Args:
          reader: from `params_reader`.
          leaf: which.
          out: of the dtype wanted; whole chunks, as `can_move` says.
          origin: index in the leaf of its first element.
        """
        read_box(self.opened, reader, leaf, out, origin)

    def limit_memory(self, num_bytes: int) -> int:
        """Sets what the store's buffers may take from now on; what that is."""
        return self.opened.limit_memory(num_bytes)

    def can_move(self, leaf: int, origin: Sequence[int], extent: Sequence[int]) -> bool:
        """Whether a box of a leaf is whole chunks, to be read and updated alone."""
        try:
            self.opened.layouts(leaf, origin, extent)
        except StoreMismatchError:
            return False
        return True

    def read_feedback(self, leaf: int, out: Array, origin: Sequence[int]) -> None:
        """Reads a leaf's or a shard's error feedback, the last of its states."""
        opened = self.opened
        last = len(opened.directory.manifest.leaves[leaf].states) - 1
        read_state(opened, leaf, out, origin, last)

    @property
    def finished(self) -> CommitRecord:
        """The last finished step's record; a commit may be still to come."""
        return self.opened.finished

    # --- steps -----------------------------------------------------------------------

    @property
    def steps(self) -> StepEngine:
        """The steps of the open store.

        Raises:
          StaleStateError: there is none yet.
        """
        if self._steps is None:
            raise self._no_store()
        return self._steps

    def wait(self) -> None:
        """Blocks until every finished step is durable, and makes it so."""
        self.check()
        if self._steps is not None:
            self._steps.wait()

    def join(self) -> None:
        """Blocks until the last step has ended, and its commit if it has one."""
        self.check()
        if self._steps is not None:
            self._steps.join()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """No step begins and none commits while the context lasts."""
        with self.steps.paused() if self._steps else contextlib.nullcontext():
            yield

    def annotate(self, step: int, payload: JsonValue) -> None:
        """Sets what the commit of a step to come will carry."""
        self.check()
        commit = self.commit
        finished = -1 if commit is None else self.opened.finished.step
        self._annotations.set(step, payload, finished)

    @property
    def metrics(self) -> StepMetrics | None:
        """The last committed step's."""
        return None if self._steps is None else self._steps.metrics

    def metrics_of(self, step: int) -> StepMetrics | None:
        """A step's, after its commit; None if not one of the last few."""
        return None if self._steps is None else self._steps.metrics_of(step)
