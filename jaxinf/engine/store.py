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

import jax
import numpy as np

from jaxinf.csd import CsdInfo
from jaxinf.engine.chunks import VerifyMode
from jaxinf.engine.dispatched import check_thread, wait_for_dispatched
from jaxinf.engine.options import (
    Durability,
    MasterChoice,
    StateFormat,
    StoreOptions,
)
from jaxinf.engine.state import committed_step, read_state
from jaxinf.engine.steps import StepMetrics
from jaxinf.engine.training import Training
from jaxinf.errors import StoreMismatchError
from jaxinf.layout import DEFAULT_CHUNK_ELEMENTS
from jaxinf.program import leaf_infos
from jaxinf.store import (
    CheckpointInfo,
    CommitRecord,
    Manifest,
    StepReader,
    StoreDirectory,
    checkpoints_to_prune,
    find_leaf,
    leaf_name,
    list_checkpoints,
    open_array,
    remove_checkpoint,
    save_checkpoint,
    snapshot,
)
from jaxinf.typing import Array, JsonValue, PathLikeStr, PyTree

__all__ = ["DEFAULT_MEMORY_BYTES", "Store", "open_store"]

DEFAULT_MEMORY_BYTES = 512 << 20

_LOG = logging.getLogger("jaxinf")
# Not weakly: one that a program has lost sight of may still have a commit in flight.
_LIVE: "set[Store]" = set()


class Store:
    """An open store: made by `open_store`, used by `jaxinf.smart_update`.

    It is a context manager. A program that ends without `close` loses nothing: the
    interpreter's exit drains and commits. All methods may be called from any thread;
    those that show committed state wait for a commit in flight. After a failure each of
    them raises the original exception.
    """

    def __init__(self, options: StoreOptions) -> None:
        self.training = Training(options)
        _LIVE.add(self)

    def __repr__(self) -> str:
        commit = self.training.commit
        step = "new" if commit is None else f"step {commit.step}"
        return f"Store({str(self.path)!r}, {step})"

    # --- what it holds -------------------------------------------------------------

    @property
    def path(self) -> Path:
        """Where it is."""
        return self.training.options.path

    @property
    def exists(self) -> bool:
        """Whether a step is committed: True when opened to resume."""
        return self.training.commit is not None

    @property
    def step(self) -> int:
        """The last committed step; 0 for a new store.

        With a durability other than ``"step"`` the transform may be some steps ahead.
        """
        commit = self._last_commit()
        return commit.step if commit else 0

    @property
    def skipped_steps(self) -> int:
        """Steps skipped for a non-finite gradient, up to the last commit."""
        commit = self._last_commit()
        return commit.skipped_steps if commit else 0

    @property
    def committed_at(self) -> str | None:
        """When the last committed step was committed, UTC; None for a new store."""
        commit = self._last_commit()
        return commit.committed_at if commit else None

    @property
    def payload(self) -> JsonValue:
        """What `annotate` gave to the last committed step."""
        commit = self._last_commit()
        return commit.payload if commit else None

    @property
    def manifest(self) -> Manifest:
        """What is stored: leaves, states, grids.

        Raises:
          StoreFormatError: nothing is stored yet.
        """
        return self._directory.manifest

    @property
    def _directory(self) -> StoreDirectory:
        self.training.check()
        return self.training.opened.directory

    def _last_commit(self) -> CommitRecord | None:
        self.training.join()
        return self.training.commit

    @property
    def metrics(self) -> StepMetrics | None:
        """Time and traffic of the last step committed by this process."""
        return self.training.metrics

    def metrics_of(self, step: int) -> StepMetrics | None:
        """Time and traffic of a step; None if not one of this process's last eight.

        Waits for the step's commit, and for no later one.
        """
        return self.training.metrics_of(step)

    @property
    def peak_memory_bytes(self) -> int:
        """The most that state has taken of the memory budget so far."""
        return self.training.peak_memory_bytes

    def csds(self) -> list[CsdInfo]:
        """Kind, place and free space of each CSD; empty until there is a store."""
        self.training.check()
        if not self.training.has_files:
            return []
        return [csd.info() for csd in self.training.opened.csds]

    def params(self, like: PyTree, *, state: Any = None) -> PyTree:
        """The committed master params, as the run's params.

        Args:
          like: a tree of arrays or ``jax.ShapeDtypeStruct`` of the store's leaves;
            gives the dtype, and the sharding where it has one.
          state: the transform state to wait for, JAX dispatch being asynchronous.

        Returns:
          A tree like `like`, of ``jax.Array``.

        Raises:
          StoreMismatchError: `like` has other leaves or shapes than the store.
        """
        self.wait(state)
        leaves, treedef = jax.tree.flatten(like)
        self._check_like(like)
        with self.training.paused():
            read = [self.read_leaf(i, leaf) for i, leaf in enumerate(leaves)]
        return jax.tree.unflatten(treedef, read)

    def _check_like(self, like: PyTree) -> None:
        held = [(leaf.name, leaf.shape) for leaf in self.manifest.leaves]
        asked = [(leaf_name(i.path), i.shape) for i in leaf_infos(like)]
        if held != asked:
            difference = [pair for pair in asked if pair not in held][:3]
            raise StoreMismatchError(
                f"{self.path}: `like` has other leaves than the store; not in the "
                f"store: {difference or 'none'}, the store has {len(held)} leaves, "
                f"`like` {len(asked)}"
            )

    def read_leaf(self, number: int, like: Any, state: int = 0) -> jax.Array:
        """A leaf's committed master, or other state, onto the JAX devices; blocks.

        Args:
          number: of the leaf.
          like: its shape, the dtype wanted and, where it has one, a sharding.
          state: the number of the state in the manifest, no coded one.
        """
        shape, dtype = tuple(like.shape), np.dtype(like.dtype)

        def read(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            bounds = [s.indices(n) for s, n in zip(index, shape, strict=True)]
            out = np.empty([stop - start for start, stop, _ in bounds], dtype)
            origin = [start for start, _, _ in bounds]
            read_state(self.training.opened, number, out, origin, state)
            return out

        sharding = getattr(like, "sharding", None)
        # As free to move as `like` is: else a jitted step would compile anew.
        if sharding is None or not getattr(like, "committed", True):
            return jax.device_put(read(tuple(slice(None) for _ in shape)))
        return jax.make_array_from_callback(shape, sharding, read)

    def tensorstore(self, state: str, leaf: str) -> Any:
        """A leaf's state as a read-only ``tensorstore.TensorStore``.

        Args:
          state: ``"params"`` (the master), ``"mu"``, ``"nu"``, …, as it is stored:
            `read` gives what codes stand for.
          leaf: its keys joined by ``/``, as `jaxinf inspect` prints them.

        During a run the chunks read may be of two neighbouring steps; use `snapshot`
        for one consistent step.

        Raises:
          ValueError: no such leaf or state; lists what there is.
        """
        record = find_leaf(self.manifest, state, leaf)
        self.training.wait()
        return open_array((self.path / "current").resolve(), record, state)

    def read(self, state: str, leaf: str) -> Array:
        """A leaf's committed state as the numbers that it stands for; blocks.

        Args:
          state: ``"params"``, ``"mu"``, …: as for `tensorstore`, but none that belongs
            to another, as a codec's scales do.
          leaf: its keys joined by ``/``.

        Returns:
          An array of the leaf's shape: float32 where the store has it in fewer bits.

        Raises:
          ValueError: no such leaf or state; lists what there is.
        """
        record = find_leaf(self.manifest, state, leaf)
        chosen = record.state(state)
        if chosen.is_beside:
            raise ValueError(
                f"leaf {leaf}: {state} is a part of {chosen.slot}; read that"
            )
        with self.training.paused():
            path, commit = committed_step(self.training.opened)
            with StepReader(path, commit) as reader:
                return reader.read(record, chosen)

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

    def wait(self, state: Any = None) -> None:
        """Blocks until everything asked of the store is durable, whatever `durability`.

        Args:
          state: the transform state to wait for first.
        """
        if state is not None:
            try:
                jax.block_until_ready(state)
            except Exception:
                self.training.check()  # the original of what JAX raises
                raise
        self.training.wait()

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
            self._await_steps()
        finally:
            try:
                self.training.close()
            finally:
                _LIVE.discard(self)
        if self.training.is_failure_unreported:
            self.training.check()

    def _await_steps(self) -> None:
        try:
            wait_for_dispatched()
        except KeyboardInterrupt:
            last = self.training.opened.finished if self.exists else None
            _LOG.warning(
                "%s: interrupted while steps were under way: those after step %d, the "
                "last one that has arrived, are lost",
                self.path,
                last.step if last else 0,
            )
            raise

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
