"""`open_store` and `Store`: a user's interface to a store.

Invariant: a `Store` shows only the last committed step.
"""

import atexit
import contextlib
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import jax

from jaxinf import compat
from jaxinf.csd import CsdSpec
from jaxinf.engine.committed_state import CommittedState
from jaxinf.engine.dispatched import check_thread, wait_for_dispatched
from jaxinf.engine.exit_status import fail_at_exit
from jaxinf.engine.exports import ExportInfo
from jaxinf.engine.failure import closed_error
from jaxinf.engine.member_opening import join_run
from jaxinf.engine.open_stores import Opened, OpenStores
from jaxinf.engine.options import (
    Durability,
    MasterChoice,
    StateFormat,
    StoreOptions,
)
from jaxinf.engine.retention import KeepSteps, remove_surplus
from jaxinf.engine.steps import LAST_STEP
from jaxinf.engine.training import Training
from jaxinf.errors import ProcessError
from jaxinf.interrupts import raise_kept
from jaxinf.processes import Group, all_processes
from jaxinf.program import trained
from jaxinf.store import (
    CheckpointInfo,
    checkpoint_names,
    list_checkpoints,
    member_name,
    remove_checkpoint,
    save_checkpoint,
    snapshot,
)
from jaxinf.terminal import given_bytes
from jaxinf.typing import JsonValue, PathLikeStr, ProgressCallback, PyTree

DEFAULT_MEMORY_BYTES = 512 << 20
_DEFAULTS: dict[str, Any] = {
    "csd_roots": (),
    "csd": "host",
    "memory_bytes": DEFAULT_MEMORY_BYTES,
}

_LOG = logging.getLogger("jaxinf")
# Strong references: a store without other references may have a commit in flight.
_OPEN = OpenStores()


class Store(CommittedState):
    """An open store: made by `open_store`, used by `jaxinf.smart_update`.

    It is a context manager. A program that ends without `close` loses nothing, because
    the interpreter's exit drains and commits. All methods may be called from any
    thread. Methods that show committed state wait for a commit in flight. After a
    failure each method raises the original exception.

    A path is open once in a process: a second `open_store` gives another handle on the
    same store. The last handle that is closed closes it.
    """

    def __init__(self, opened: Opened) -> None:
        super().__init__(opened.training)
        self._opened = opened
        opened.holders.append(self)

    @property
    def _training(self) -> Training:
        """The store's run.

        Raises:
          StoreClosedError: this handle is closed, though others are not.
        """
        if self not in self._opened.holders and not self._run.is_closed:
            raise closed_error(self.path)
        return self._run

    def __repr__(self) -> str:
        commit = self._run.commit
        step = "new" if commit is None else f"step {commit.step}"
        return f"Store({str(self.path)!r}, {step})"

    def load(self, params: PyTree, opt_state: PyTree, *, step: int) -> None:
        """Makes params and an optax state the store's step, in one commit; blocks.

        For a run that has begun elsewhere, such as with plain optax and Orbax. The
        store must be at step 0, after ``tx.init(params)``; ``tx.init(params)`` then
        gives the state to go on with. Updates have the bits of a run that went on; a
        store in fewer bits rounds state that did not come from such a store. Until the
        commit the store stays at step 0. In a program of several processes all call it.

        Args:
          params: a tree like the params, or their float32 master.
          opt_state: a tree like the ``init`` of the optax transformation that
            `jaxinf.smart_update` was given; dicts and lists may take the place of named
            tuples. Of leaves of type `jaxinf.typing.DeferredArray`, in both trees, only
            one at a time is in memory.
          step: number of the step, at least 1.

        Raises:
          StoreMismatchError: the store is not at step 0, or a leaf is missing, or of
            another shape or dtype; names it. Nothing was written.
          StaleStateError: ``tx.init`` was not called.
          ProcessError: another process failed.
        """
        if not 1 <= step <= LAST_STEP:
            raise ValueError(
                f"load: step={step}: expected a number from 1 to {LAST_STEP}"
            )
        self._wait_for(None)
        tree = trained(params)
        self._check_like(tree, "params")
        self._training.load(jax.tree.leaves(tree), opt_state, step)

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[Path]:
        """Pins the last committed step for reading, also during a step.

        In a program of several processes all call it, after the same step; each has its
        member's part of that.

        Yields:
          A directory laid out like a slot: a zarr group, an Orbax checkpoint,
          ``commit.json``. It is removed after the context. No data is copied.

        Raises:
          ProcessError: another process did not call it after the same step.
        """
        group = self._training.group
        if group.is_alone:
            self._training.wait()
        else:
            self._wait_for(None)
        with contextlib.ExitStack() as stack:
            yield group.in_all(
                f"a snapshot of step {self.step}",
                lambda: stack.enter_context(snapshot(self._directory)),
            )

    # --- checkpoints ---------------------------------------------------------------

    def checkpoint(
        self, name: str | None = None, *, state: Any = None, overwrite: bool = False
    ) -> str:
        """Keeps the last finished step under a name; blocks until it is durable.

        No data is copied: the step's files are hard-linked, and the run goes on in
        other files. From then on the drives need room for that step in addition to the
        run's own two. In a program of several processes all call it, after the same
        step; if one does not, or fails, none keeps it.

        Args:
          name: name of the checkpoint. By default it is the step's number, since
            Orbax's CheckpointManager lists numbers; a checkpoint of that number of a
            run that has gone back is replaced. The latest n of these stay, as
            `keep_steps` of `open_store` says; a named one stays until it is removed.
          state: the transform state to wait for; by default all that this thread has
            dispatched, as JAX's dispatch is asynchronous.
          overwrite: whether to replace a checkpoint of that name, such as ``"best"``.
            It stays until the new one is complete, and if that fails.

        Returns:
          The name. The checkpoint is ``STORE/checkpoints/NAME``, an Orbax checkpoint
          and a zarr group; ``open_store(path, restore=name)`` goes on from it.

        Raises:
          ValueError: the name is invalid, or another step's number.
          StoreMismatchError: a checkpoint of that name exists.
          StoreSpaceError: the drives have too little room; nothing was made.
          ProcessError: another process failed, or did not call it after the same step.
        """
        self._wait_for(state)
        with self._training.paused():
            directory, given = self._directory, name or str(self.step)
            held = checkpoint_names(directory)
            replaces = overwrite or name is None

            def save() -> str:
                return save_checkpoint(directory, name, overwrite=replaces)

            try:
                what = f"checkpoint {given} of step {self.step}"
                made = self._training.group.in_all(what, save)
            except ProcessError:
                if given not in held and given in checkpoint_names(directory):
                    remove_checkpoint(directory, given)
                raise
            remove_surplus(directory, self._training.options.retention, made)
            return made

    def checkpoints(self) -> list[CheckpointInfo]:
        """Returns all checkpoints, by step; waits for one that is being made."""
        self._training.join()
        return list_checkpoints(self._directory)

    def remove_checkpoint(self, name: str) -> None:
        """Removes a checkpoint and frees its space.

        Raises:
          ValueError: there is no checkpoint of that name.
        """
        remove_checkpoint(self._directory, name)

    # --- exports -------------------------------------------------------------------

    def exports(self) -> list[ExportInfo]:
        """Returns the steps due for export since it was opened; does not block."""
        return self._training.exports.infos()

    def end_export(
        self, *, waits: bool = True, progress: ProgressCallback | None = None
    ) -> None:
        """Waits for the export under way, or gives it up.

        Args:
          waits: whether it waits. Ctrl-C then gives the export up, and is raised.
          progress: called from time to time with the bytes done and those in all.

        Raises:
          BaseException: the exception that stopped the store.
        """
        self._training.join()
        self._training.exports.end(waits=waits, progress=progress)

    # --- control -------------------------------------------------------------------

    def annotate(self, step: int, payload: JsonValue) -> None:
        """Sets the caller's payload for the commit of a future step.

        Args:
          step: the step.
          payload: JSON: position in the data, random seeds, ….

        Raises:
          ValueError, TypeError: it is not JSON, or the step is committed already.
        """
        self._training.annotate(step, payload)

    def check(self) -> None:
        """Raises the exception that stopped the store, if any, with its type."""
        self._training.tell()

    def close(self) -> None:
        """Closes this handle, and with the last handle the store. Idempotent.

        Closing waits for steps under way, commits, and releases the lock. JAX computes
        asynchronously, so it waits until all dispatched steps have arrived. Ctrl-C ends
        that wait, and steps that have not arrived are lost. A step that has begun but
        whose update is not finished is abandoned. An export under way is waited for;
        it is given up by Ctrl-C, or if the store has failed or an exception is being
        handled.

        Raises:
          StoreError: it was called in a JAX callback; the store stays open.
          BaseException: the exception that stopped the store, once, after everything is
            released, unless another method has raised it before, or JAX (whose error is
            being handled, or no result of the failed computation is left to read).
        """
        held = self._opened.holders
        if len(held) == 1 and not self._run.is_closed:
            check_thread(f"{self.path}: close")
        with _OPEN.lock(self.path):
            if self not in held or self._run.is_closed:
                return
            if len(held) > 1:
                held.remove(self)
                return
            self._close_last()
        if sys.exception() is None:
            raise_kept()
        if self._run.is_failure_untold:
            self._run.check()

    def _close_last(self) -> None:
        training = self._run
        try:
            wait_for_dispatched()
        except KeyboardInterrupt:
            self._release()
            _LOG.warning(
                "%s: interrupted while steps were under way: those after step %d, the "
                "last one that has arrived, are lost",
                self.path,
                training.opened.finished.step if training.has_files else 0,
            )
            raise
        finally:
            self._release()

    def _release(self) -> None:
        try:
            self._run.close()
        finally:
            _OPEN.forget(self._opened)

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
    csds: Sequence[PathLikeStr] | Mapping[PathLikeStr, float] | None = None,
    csd: str | CsdSpec | None = None,
    memory_bytes: int | str | None = None,
    durability: Durability | None = None,
    restore: str | None = None,
    master: MasterChoice | None = None,
    state: StateFormat | None = None,
    keep_steps: KeepSteps | None = None,
    tiers: Mapping[str, int | str] | None = None,
    export_every: int | None = None,
    export_to: str | None = None,
) -> Store:
    """Opens a store, or sets the place where `tx.init` will make one.

    Nothing is written here, except with `restore`. An existing store resumes at its
    last committed step. If this process has the path open already, the result is
    another handle on that store, and options that are not given are the open store's. A
    store that a failure has stopped is opened anew.

    Args:
      path: the store's directory; missing or empty for a new one.
      csds: CSD roots, each a mounted drive, to spread a new store's chunks over; by
        default the chunks are in the store itself. An existing store records its roots.
        Drives of unequal speed should get unequal shares, as in ``{"/mnt/a": 3,
        "/mnt/b": 1}``. No bit depends on them.
      csd: the processor that updates the chunks: ``"host"`` (the default), the CPU
        beside the drive; ``"smartssd"``, the card beside it; ``"emulated"``, an
        emulated card. Options may follow: see `jaxinf.csd.parse_csd`. A
        `jaxinf.csd.CsdSpec` may wrap the CSDs, for example to emulate another system.
      memory_bytes: all memory that state passes through: on the host; or for each card,
        its own memory and the host's for its gradients and results; in bytes, or as a
        text such as ``"512MiB"``, which is the default.
      durability: the steps that become durable by themselves: ``"step"`` (the default),
        each; a number k, every k-th; ``"checkpoint"``, none. `wait`, `close`,
        `checkpoint` and methods that read the store's state also commit. A crash or an
        error costs the steps since the last commit.
      restore: a checkpoint to continue from: it becomes the committed step again, and
        is kept. Later steps are given up, unless a checkpoint keeps them.
      master: the form of the fp32 master params. With ``"auto"``, the default, fp32
        params on the JAX device are the master, and bfloat16 params are its upper half:
        a new store keeps 16-bit remainders beside them, so that no bit is lost. If the
        params can be handed over without a copy (on a CPU), a step reads only the
        remainders, and compares the params' checksum with the stored one. With
        ``"none"``, for bfloat16 params, a new store keeps only these, rounded
        stochastically: parts of an update below their precision are kept on average.
        float16 params, and bfloat16 ones on cards, have a float32 master. An existing
        store records its form.
      state: the format of the optimizer's float32 state in a new store: ``"fp32"``
        (the default), unchanged; ``"bf16"``, rounded stochastically; ``"int8"``, in
        blocks of 256 with a scale for each. The update computes in float32 in any case.
        Leaves of fewer than 4,096 elements stay in float32. An existing store records
        its format.
      keep_steps: ``k``, ``(k, n)`` or ``(k, n, offset)``. Steps that are multiples of
        k, or by offset more than these, are kept as checkpoints named by their step,
        with any `durability`; with k = 0 `Store.checkpoint` alone makes some. Of all
        that are named by their step the last n (by default 2) stay, and with n = 0
        all. `init` checks that there is room for 2 + n states. By default none is made,
        and all stay.
      tiers: ``{"host": bytes}``: so much of `memory_bytes` holds state from step to
        step, which is then not read again. Short chunks stay first. A step that commits
        writes it all the same, so what is promised of crashes does not change; steps
        between commits do not (`durability`), which makes drives last. By default none;
        cards refuse it, and so does a machine or container with less memory free.
      export_every, export_to: each step that is a multiple of the first is exported
        to ``URL/STEP`` (``file://``, ``gs://``, ``s3://``) in a thread beside training;
        docs/checkpoints.md, "Exports beside training". `Store.exports` shows what came
        of it. Some five times the largest chunk of `memory_bytes` is theirs.

    In a program of several processes (`jax.distributed.initialize`), all open one path,
    and each has its member of the run in it, ``path/process-00000`` and so on; or each
    has a path and a store of its own. ``{process}`` in `csds` is the process's number.

    Raises:
      ValueError: an argument is out of range, or differs from the open store's; or
        there is no such checkpoint.
      CsdError: a card is missing or not set up.
      NotADirectoryError, PermissionError: `path` cannot be a store.
      StoreLockedError: a live process has the store open; names the process.
      StoreFormatError: it is not a store, is damaged, or has a newer format.
    """
    path, group = _joined(_absolute(path))
    if memory_bytes is not None:
        memory_bytes = given_bytes("memory_bytes", memory_bytes)
    given = {
        "csd_roots": None if csds is None else [_of_process(root) for root in csds],
        "csd": csd,
        "memory_bytes": memory_bytes,
        "durability": durability,
        "restore": restore,
        "master": master,
        "state": state,
        "keep_steps": keep_steps,
        "tiers": tiers,
        "export_every": export_every,
        "export_to": export_to,
        "csd_shares": [*csds.values()] if isinstance(csds, Mapping) else None,
    }
    given = {name: value for name, value in given.items() if value is not None}
    options = StoreOptions(path, **{**_DEFAULTS, **given})
    with _OPEN.lock(path):
        return Store(_OPEN.open(options, given, group))


def _joined(path: Path) -> tuple[Path, Group | None]:
    """Returns the path of this process's store, and who has it, unless it is open."""
    held = _open_at(path)
    if held is not None and held.training.failure is None:
        return held.training.options.path, None
    group = join_run(path)
    if group.is_alone:
        return path, None
    # JAX ends its service at the exit; what is registered later, runs before.
    atexit.unregister(_close_all)
    atexit.register(_close_all)
    return path / member_name(group.number), group


def _of_process(root: PathLikeStr) -> Path:
    """Returns a CSD root of this process; see `open_store`."""
    number = str(all_processes("program").number)
    return _absolute(os.fspath(root).replace("{process}", number))


def _open_at(path: Path) -> Opened | None:
    """Returns the open store of a path, or this process's member of a run there."""
    program, held = all_processes("program"), _OPEN.get(path)
    if held is None and not program.is_alone:
        held = _OPEN.get(path / member_name(program.number))
    return held


def store_of(path: PathLikeStr) -> Store:
    """Returns the open store of a path, for a program that has no variable for it.

    The result is not a further handle, and need not be closed.

    Raises:
      ValueError: no store is open there; lists the open ones.
    """
    held = _open_at(_absolute(path))
    if held is None or not held.holders:
        others = [str(one.training.options.path) for one in _OPEN.all()][:5]
        raise ValueError(
            f"{path}: expected a store that is open in this process, found "
            f"{', '.join(others) or 'none'}; open it with jaxinf.open_store"
        )
    return held.holders[0]


def close(path: PathLikeStr) -> None:
    """Closes the store at a path with all its handles; see `Store.close`.

    Does nothing if no store is open there.
    """
    held = _open_at(_absolute(path))
    if held is not None:
        _close_all_handles(held)


def _close_all_handles(held: Opened) -> None:
    for store in list(held.holders):
        store.close()


def _absolute(path: PathLikeStr) -> Path:
    return Path(os.path.abspath(os.path.expanduser(path)))


@atexit.register
def _close_all() -> None:
    """Waits for dispatched steps, drains and commits, at the interpreter's exit.

    A failure that no call has raised so far is logged, and becomes the exit status.
    """
    for held in _OPEN.all():
        try:
            if getattr(sys, "last_value", None) is not None:  # it ends by an exception
                held.training.exports.end(waits=False)
            _close_all_handles(held)
            if held.training.is_failure_unreported:
                held.training.check()
        except (Exception, KeyboardInterrupt) as error:
            path = held.training.options.path
            _LOG.error("%s: stopped by %s: %s", path, type(error).__name__, error)
            fail_at_exit()
        if held.training.failure is not None:
            compat.forget_failed_tokens()


def _forget_all() -> None:
    """Ends the use of all stores in a forked child; the parent keeps them."""
    _OPEN.begin_anew()
    for held in _OPEN.all():
        held.training.disown()
        _OPEN.forget(held)


os.register_at_fork(after_in_child=_forget_all)
