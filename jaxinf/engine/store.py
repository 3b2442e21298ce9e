"""`open_store` and `Store`: what a user holds of a store.

Invariant: whatever a `Store` shows is of the last committed step.
"""

import atexit
import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from jaxinf.engine.chunks import VerifyMode
from jaxinf.engine.committed_state import CommittedState
from jaxinf.engine.dispatched import check_thread, wait_for_dispatched
from jaxinf.engine.options import (
    Durability,
    MasterChoice,
    StateFormat,
    StoreOptions,
)
from jaxinf.engine.training import Training
from jaxinf.layout import DEFAULT_CHUNK_ELEMENTS
from jaxinf.store import (
    CheckpointInfo,
    checkpoints_to_prune,
    list_checkpoints,
    remove_checkpoint,
    save_checkpoint,
    snapshot,
)
from jaxinf.typing import JsonValue, PathLikeStr

__all__ = ["DEFAULT_MEMORY_BYTES", "Store", "open_store"]

DEFAULT_MEMORY_BYTES = 512 << 20

_LOG = logging.getLogger("jaxinf")
# Not weakly: one that a program has lost sight of may still have a commit in flight.
_LIVE: "set[Store]" = set()


class Store(CommittedState):
    """An open store: made by `open_store`, used by `jaxinf.smart_update`.

    It is a context manager. A program that ends without `close` loses nothing: the
    interpreter's exit drains and commits. All methods may be called from any thread;
    those that show committed state wait for a commit in flight. After a failure each of
    them raises the original exception.
    """

    def __init__(self, options: StoreOptions) -> None:
        super().__init__(Training(options))
        _LIVE.add(self)

    def __repr__(self) -> str:
        commit = self.training.commit
        step = "new" if commit is None else f"step {commit.step}"
        return f"Store({str(self.path)!r}, {step})"

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[Path]:
        """Pins the last committed step for reading, beside a running one.

        Yields:
          A directory laid out like a slot: a zarr group, an Orbax checkpoint,
          ``commit.json``. It is gone after the context. No data is copied.
        """
        self.training.wait()
        with snapshot(self._directory) as path:
            yield path

    # --- checkpoints ---------------------------------------------------------------

    def checkpoint(self, name: str | None = None, *, state: Any = None) -> str:
        """Keeps the last finished step under a name; blocks until it is durable.

        No data is copied: the step's files are hard-linked, and the run goes on in
        others. From then on the drives hold that step beside the run's own two, for
        which there must be room.

        Args:
          name: by default the step's number, which is what Orbax's CheckpointManager
            lists.
          state: the transform state to wait for, JAX dispatch being asynchronous.

        Returns:
          The name. The checkpoint is ``STORE/checkpoints/NAME``, an Orbax checkpoint
          and a zarr group; ``open_store(path, restore=name)`` goes on from it.

        Raises:
          ValueError: the name is no name, or another step's number.
          StoreMismatchError: there is a checkpoint of that name.
          StoreSpaceError: the drives have too little room; nothing was made.
        """
        self.wait(state)
        with self.training.paused():
            return save_checkpoint(self._directory, name)

    def checkpoints(self) -> list[CheckpointInfo]:
        """The checkpoints that there are, by step."""
        return list_checkpoints(self._directory)

    def remove_checkpoint(self, name: str) -> None:
        """Removes a checkpoint and gives its space back.

        Raises:
          ValueError: there is none of that name.
        """
        remove_checkpoint(self._directory, name)

    def prune_checkpoints(self, *, keep_last: int, keep_every: int = 0) -> list[str]:
        """Removes the checkpoints that a policy does not keep; those it removed.

        Args:
          keep_last: how many of the latest stay; 0 keeps all.
          keep_every: steps that are a multiple of this stay too; 0 for none.

        Only checkpoints named by their step are removed, never one with another name,
        nor one of a later step than the store's.
        """
        found = self.checkpoints()
        names = checkpoints_to_prune(
            found, self.step, keep_last=keep_last, keep_every=keep_every
        )
        for name in names:
            self.remove_checkpoint(name)
        return names

    # --- control -------------------------------------------------------------------

    def annotate(self, step: int, payload: JsonValue) -> None:
        """Gives the commit of `step`, still to come, something of the caller's to keep.

        Args:
          step: of the commit that will carry it.
          payload: JSON: position in the data, random seeds, ….

        Raises:
          ValueError, TypeError: it is no JSON, or the step is committed already.
        """
        self.training.annotate(step, payload)

    def check(self) -> None:
        """Raises what stopped the store: the original exception, with its type."""
        self.training.check()

    def close(self) -> None:
        """Waits for the steps that are under way, commits, gives the lock back.

        JAX computes behind the program: the steps that were dispatched before arrive
        first. Ctrl-C ends that wait; the steps that have not arrived are lost then.
        Idempotent. A step that has begun but whose update did not finish is given up.

        Raises:
          StoreError: it was called in a JAX callback; the store stays open.
          BaseException: what stopped the store, after everything is released, unless
            another method has raised it before.
        """
        if self.training.is_closed:
            return
        check_thread(f"{self.path}: close")
        try:
            wait_for_dispatched()
        except KeyboardInterrupt:
            self._release()
            _LOG.warning(
                "%s: interrupted while steps were under way: those after step %d, the "
                "last one that has arrived, are lost",
                self.path,
                self.training.opened.finished.step if self.training.has_files else 0,
            )
            raise
        finally:
            self._release()
        if self.training.is_failure_unreported:
            self.training.check()

    def _release(self) -> None:
        try:
            self.training.close()
        finally:
            _LIVE.discard(self)

    def __enter__(self) -> "Store":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except Exception as failure:
            if error is None:
                raise
            # The body's own error is the one to see; this one is often its cause.
            _LOG.debug("%s: closed after a failure: %s", self.path, failure)


def open_store(
    path: PathLikeStr,
    *,
    csds: Sequence[PathLikeStr] = (),
    csd: str = "host",
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    num_workers: int | None = None,
    chunk_elements: int = DEFAULT_CHUNK_ELEMENTS,
    durability: Durability = "step",
    verify: VerifyMode = "always",
    restore: str | None = None,
    master: MasterChoice = "auto",
    state: StateFormat | None = None,
) -> Store:
    """Opens a store, or names the place where `tx.init` will make one.

    Nothing is written here, `restore` excepted. An existing store resumes at its last
    committed step.

    Args:
      path: the store's directory; missing or empty for a new one.
      csds: CSD roots, each a mounted drive, to spread a new store's chunks over; by
        default they lie in the store itself. An existing store knows its roots.
      csd: what updates the chunks: ``"host"``, the CPU beside the drive;
        ``"smartssd"``, the card beside it; ``"emulated"``, cards that are not there.
        Options may follow: see `jaxinf.csd.parse_csd`.
      memory_bytes: all memory that state passes through: of the host; or for each card,
        of its own and of the host's beside it, for gradients and results.
      num_workers: requests at the drives at once, beside the kernels; by default 4, and
        with more than two cards two for each. More than 4 for many drives.
      chunk_elements: largest chunk of a new store, in elements.
      durability: when a finished step becomes durable: ``"step"``, each at once; a
        number k, every k steps; ``"checkpoint"``, only with a checkpoint. `wait`,
        `close`, `checkpoint` and all that reads the store's state commit too. A crash
        or an error costs the steps since the last commit.
      verify: whether chunks that are read are compared with their checksums:
        ``"always"`` or ``"never"``.
      restore: a checkpoint to go on from: it becomes the committed step again, and
        stays as it is. What was committed after it is given up, unless a checkpoint
        keeps that.
      master: how the fp32 master params are kept, and from where a step takes them.
        ``"auto"``: the params on the JAX device are, or are half of, the master: where
        handing them over costs no copy (CPU), the drive only writes that part, and its
        checksum is compared with theirs. A new store holds the master of bfloat16
        params as those params, rounded to nearest with ties away from zero, and 16-bit
        remainders: no bit is lost, and only the remainders are read. ``"stored"``: the
        master is read from the drive at every step, and a new store holds it in
        float32. ``"none"``, for bfloat16 params: a new store has no master but them,
        rounded stochastically; what an update adds below their precision is kept on
        average alone. float16 params have a float32 master. An existing store knows.
      state: how a new store holds the optimizer's float32 state: ``"fp32"``, as it is
        (the default); ``"bf16"``, rounded stochastically; ``"int8"``, in blocks of 256
        with a scale each. The update computes in float32 whatever is stored. Leaves
        of fewer than 4,096 elements stay as they are. An existing store knows.

    Raises:
      ValueError: an argument is out of range, or there is no such checkpoint.
      CsdError: a card is missing or not set up.
      NotADirectoryError, PermissionError: `path` cannot be a store.
      StoreLockedError: a live process has it open; names it.
      StoreFormatError: not a store, damaged, or of a newer format.
    """
    options = StoreOptions(
        Path(os.path.abspath(os.path.expanduser(path))),
        csd_roots=[Path(os.path.abspath(os.path.expanduser(root))) for root in csds],
        csd=csd,
        memory_bytes=memory_bytes,
        num_workers=num_workers,
        chunk_elements=chunk_elements,
        durability=durability,
        verify=verify,
        restore=restore,
        master=master,
        state=state,
    )
    return Store(options)


@atexit.register
def _close_all() -> None:
    """Interpreter exit: lets dispatched steps arrive, then drains and commits."""
    for store in list(_LIVE):
        if store.training.is_closed:
            continue
        try:
            store.close()
        except Exception:
            _LOG.exception("%s: closing at exit failed", store.path)


def _forget_all() -> None:
    """In a forked child: the stores stay its parent's."""
    for store in _LIVE:
        store.training.disown()
    _LIVE.clear()


os.register_at_fork(after_in_child=_forget_all)
