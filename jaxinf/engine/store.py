"""`open_store` and `Store`: a user's interface to a store.

Invariant: a `Store` shows only the last committed step.
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
# Strong references: a store without other references may have a commit in flight.
_LIVE: "set[Store]" = set()


class Store(CommittedState):
    """An open store: made by `open_store`, used by `jaxinf.smart_update`.

    It is a context manager. A program that ends without `close` loses nothing, because
    the interpreter's exit drains and commits. All methods may be called from any
    thread. Methods that show committed state wait for a commit in flight. After a
    failure each method raises the original exception.
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
        """Pins the last committed step for reading, also during a step.

        Yields:
          A directory laid out like a slot: a zarr group, an Orbax checkpoint,
          ``commit.json``. It is removed after the context. No data is copied.
        """
        self.training.wait()
        with snapshot(self._directory) as path:
            yield path

    # --- checkpoints ---------------------------------------------------------------

    def checkpoint(self, name: str | None = None, *, state: Any = None) -> str:
        """Keeps the last finished step under a name; blocks until it is durable.

        No data is copied: the step's files are hard-linked, and the run goes on in
        other files. From then on the drives hold that step in addition to the run's own
        two, and need room for it.

        Args:
          name: by default the step's number, since Orbax's CheckpointManager lists
            numbers.
          state: the transform state to wait for, as JAX's dispatch is asynchronous.

        Returns:
          The name. The checkpoint is ``STORE/checkpoints/NAME``, an Orbax checkpoint
          and a zarr group; ``open_store(path, restore=name)`` goes on from it.

        Raises:
          ValueError: the name is invalid, or another step's number.
          StoreMismatchError: a checkpoint of that name exists.
          StoreSpaceError: the drives have too little room; nothing was made.
        """
        self.wait(state)
        with self.training.paused():
            return save_checkpoint(self._directory, name)

    def checkpoints(self) -> list[CheckpointInfo]:
        """All checkpoints, by step."""
        return list_checkpoints(self._directory)

    def remove_checkpoint(self, name: str) -> None:
        """Removes a checkpoint and frees its space.

        Raises:
          ValueError: there is no checkpoint of that name.
        """
        remove_checkpoint(self._directory, name)

    def prune_checkpoints(self, *, keep_last: int, keep_every: int = 0) -> list[str]:
        """Removes checkpoints that a policy does not keep, and returns their names.

        Args:
          keep_last: number of latest checkpoints to keep; 0 keeps all.
          keep_every: checkpoints of steps that are a multiple of this are also kept; 0
            for none.

        Only checkpoints named by their step are removed, and none of a later step than
        the store's.
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
        """Sets the caller's payload for the commit of a future step.

        Args:
          step: the step.
          payload: JSON: position in the data, random seeds, ….

        Raises:
          ValueError, TypeError: it is not JSON, or the step is committed already.
        """
        self.training.annotate(step, payload)

    def check(self) -> None:
        """Raises the exception that stopped the store, if any, with its type."""
        self.training.check()

    def close(self) -> None:
        """Waits for steps under way, commits, and releases the lock. Idempotent.

        JAX computes asynchronously, so this waits until all dispatched steps have
        arrived. Ctrl-C ends that wait, and steps that have not arrived are lost. A step
        that has begun without finishing its update is abandoned.

        Raises:
          StoreError: it was called in a JAX callback; the store stays open.
          BaseException: the exception that stopped the store, after everything is
            released, unless another method has raised it before.
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
            # Raise the body's own error; this one is often its cause.
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
    """Opens a store, or sets the place where `tx.init` will make one.

    Nothing is written here, except with `restore`. An existing store resumes at its
    last committed step.

    Args:
      path: the store's directory; missing or empty for a new one.
      csds: CSD roots, each on a mounted drive, for a new store's chunks; by default
        they lie in the store itself. An existing store has its roots on record. csd:
        the processor that updates the chunks: ``"host"``, the CPU; ``"smartssd"``, the
        card beside the drive; ``"emulated"``, an emulated card. Options may follow: see
        `jaxinf.csd.parse_csd`. memory_bytes: all memory through which state passes: on
        the host, or for each card its own memory and the host's for its gradients and
        results. num_workers: requests at the drives at once, beside the kernels; by
        default 4, or two for each of more than two cards. Use more than 4 for many
        drives.
      chunk_elements: largest chunk of a new store, in elements.
      durability: the steps to commit: ``"step"`` for each; a number k for every k-th;
        ``"checkpoint"`` for checkpoints alone. `wait`, `close`, `checkpoint` and all
        methods that read the store's state commit, too. A crash or an error loses the
        steps since the last commit. verify: whether the checksums of chunks are
        verified at each read: ``"always"`` or ``"never"``. restore: a checkpoint to
        continue from: it becomes the committed step again, and stays as it is. Later
        commits are lost, unless a checkpoint keeps them. master: format and source of
        the fp32 master params. ``"auto"``: the params on the JAX device are the master
        or half of it. If they can be handed over without a copy (on a CPU), the drive
        only writes that part, and their checksum is compared with the stored one. A new
        store splits the master of bfloat16 params into those params, rounded to nearest
        with ties away from zero, and 16-bit remainders. No bit is lost, and only the
        remainders are read. ``"stored"``: the master is read from the drive at every
        step, and a new store has it in float32. ``"none"``: for bfloat16 params, which
        become the master themselves, rounded stochastically; changes below their
        precision survive only on average. float16 params have a float32 master. An
        existing store has its format on record. state: format of the optimizer's
        float32 state in a new store: ``"fp32"`` (the default); ``"bf16"``, rounded
        stochastically; ``"int8"``, in blocks of 256 with a scale each. The update
        computes in float32 in every case. Leaves of fewer than 4,096 elements stay in
        float32. An existing store has its format on record.

    Raises:
      ValueError: an argument is out of range, or there is no such checkpoint.
      CsdError: a card is missing or not set up.
      NotADirectoryError, PermissionError: `path` cannot be a store.
      StoreLockedError: a live process has it open; names it.
      StoreFormatError: it is not a store, is damaged, or has a newer format.
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
