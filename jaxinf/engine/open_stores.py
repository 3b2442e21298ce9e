"""`open_store`, and the stores that are open in this process, one for each path.

Invariant: a path, with symlinks resolved, is open once, and has one `Store`.
"""

import atexit
import ctypes
import logging
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxinf import compat
from jaxinf.csd import CsdSpec, parse_csd
from jaxinf.engine.engine import Engine
from jaxinf.engine.opening import join_run, open_engine
from jaxinf.engine.options import (
    Durability,
    KeepSteps,
    MasterChoice,
    StateFormat,
    StoreOptions,
)
from jaxinf.engine.store import Store, engine_of
from jaxinf.processes import Group, all_processes, exit_if_peer_is_silent
from jaxinf.store import member_name
from jaxinf.terminal import given_bytes
from jaxinf.typing import PathLikeStr

_LOG = logging.getLogger("jaxinf")

# Strong references: a store without other references may have a commit in flight.
_open: dict[Path, Store] = {}
_locks: dict[Path, threading.RLock] = {}
"""By path, with symlinks resolved; held while the store of the path opens or closes."""


def open_store(
    path: PathLikeStr,
    *,
    csds: Sequence[PathLikeStr] | None = None,
    csd: str | CsdSpec | None = None,
    memory_bytes: int | str | None = None,
    durability: Durability | None = None,
    restore: str | None = None,
    master: MasterChoice | None = None,
    state: StateFormat | None = None,
    keep_steps: KeepSteps | None = None,
    export_every: int | None = None,
    export_to: str | None = None,
) -> Store:
    """Opens a store, or sets the place where `tx.init` will make one.

    Nothing is written here, except with `restore`. An existing store resumes at its
    last committed step. If this process has the path open already, the result is that
    store, and options that are not given are its own. A store that a failure has
    stopped is opened anew.

    Args:
      path: the store's directory; missing or empty for a new one.
      csds: CSD roots, each a mounted drive, to spread a new store's chunks over; by
        default the chunks are in the store itself. An existing store records its roots.
        No bit depends on them.
      csd: the processor that updates the chunks: ``"host"`` (the default), the CPU
        beside the drive; ``"smartssd"``, the card beside it; ``"emulated"``, an
        emulated card. Options may follow: see `jaxinf.csd.parse_csd`. A
        `jaxinf.csd.CsdSpec` may wrap the CSDs, for example to emulate another system.
      memory_bytes: all memory that state passes through: on the host; or for each card,
        its own memory and the host's for its gradients and results; in bytes, or as a
        text such as ``"512MiB"``, which is the default. On the host, state that fits
        beside what passes through stays from step to step, and is not read again. A
        step that commits writes it all the same; steps between commits do not
        (`durability`), which makes drives last.
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
      keep_steps: ``k`` or ``(k, n)``. Steps that are multiples of k are kept as
        checkpoints named by their step, with any `durability`; with k = 0
        `Store.checkpoint` alone makes some. Of all that are named by their step the
        last n (by default 2) stay, and with n = 0 all. A new store is made if there is
        room for 2 + n states. By default none is made, and all stay.
      export_every, export_to: each step that is a multiple of the first is exported
        to ``URL/STEP`` (``file://``, ``gs://``, ``s3://``) after its commit, for which
        the next update waits; docs/checkpoints.md, "Exports beside training".
        `Store.exports` shows what came of it. Some five times the largest chunk of
        `memory_bytes` is theirs.

    In a program of several processes (`jax.distributed.initialize`), all open one path,
    and each has its member of the run in it, ``path/process-00000`` and so on; or each
    has a path and a store of its own. ``{process}`` in `csds` is the process's number.
    Of one run only `csds`, `csd` and `memory_bytes` may differ.

    Raises:
      ValueError: an argument is out of range, or differs from the open store's; or
        there is no such checkpoint.
      CsdError: a card is missing or not set up.
      NotADirectoryError, PermissionError: `path` cannot be a store.
      StoreLockedError: a live process has the store open; names the process.
      StoreFormatError: it is not a store, is damaged, or has a newer format.
    """
    own: dict[str, Any] = {"csds": csds, "csd": csd, "memory_bytes": memory_bytes}
    alike = {  # in all processes of a run, as they decide about commits
        "durability": durability,
        "keep_steps": keep_steps,
        "restore": restore,
        "master": master,
        "state": state,
        "export_to": export_to,
        "export_every": export_every,
    }
    given = {name: value for name, value in (own | alike).items() if value is not None}
    path = _absolute(path)
    held, group = _open_at(path), Group(path)
    if held is not None and engine_of(held).health.error is None:
        path = held.path
    else:
        group = join_run(path)
        if not group.is_alone:
            path = path / member_name(group.number)
            # JAX ends its service at the exit; what is registered later, runs before.
            atexit.unregister(_close_all)
            atexit.register(_close_all)

    def read() -> StoreOptions:
        if csds is not None:
            given["csds"] = tuple(map(_of_process, csds))
        if isinstance(csd, str):
            given["csd"] = parse_csd(csd)
        if memory_bytes is not None:
            given["memory_bytes"] = given_bytes("memory_bytes", memory_bytes)
        return StoreOptions(path, **given)

    lock = _locks.setdefault(path.resolve(), threading.RLock())
    with lock:
        options = group.in_all("the options of open_store", read)
        if (held := _get(path)) is not None:
            error = engine_of(held).health.error
            if error is None:
                _check_given(engine_of(held), options, given)
                return held
            said = f"{type(error).__name__}: {error}"
            _LOG.warning("%s: was stopped by %s; it is opened anew", path, said)
            engine_of(held).close()
        agreed = {name: getattr(options, name) for name in alike}
        what, remedy = "the options of open_store", "give them alike in all of them"
        group.agree(what, lambda: agreed, remedy)
        engine, place = open_engine(options, group, lock), path.resolve()
        store = _open[place] = Store(engine)

        def forget() -> None:
            if _open.get(place) is store:
                del _open[place]

        engine.on_close.append(forget)
        return store


def _get(path: Path) -> Store | None:
    held = _open.get(path.resolve())
    return None if held is None or engine_of(held).health.is_closed else held


def _check_given(
    engine: Engine, options: StoreOptions, given: Mapping[str, Any]
) -> None:
    """Refuses options that are not those of the open store."""
    held = engine.options
    roots = engine.files.directory.manifest.csds if engine.has_files else None
    for name, value in given.items():
        if getattr(held, name) == getattr(options, name):
            continue
        if name == "csds" and tuple(map(str, value)) == roots:
            continue
        raise ValueError(
            f"{options.path}: {name}={value!r}: the store is open in this process with "
            f"{name}={getattr(held, name)!r}, and a path has one store; leave it out, "
            f"or close the store first (jaxinf.close({str(held.path)!r}))"
        )


def _of_process(root: PathLikeStr) -> Path:
    """Returns a CSD root of this process; see `open_store`."""
    number = str(all_processes("program").number)
    return _absolute(os.fspath(root).replace("{process}", number))


def _open_at(path: Path) -> Store | None:
    """Returns the open store of a path, or this process's member of a run there."""
    program, held = all_processes("program"), _get(path)
    if held is None and not program.is_alone:
        held = _get(path / member_name(program.number))
    return held


def store_of(path: PathLikeStr) -> Store:
    """Returns the open store of a path, for a program that has no variable for it.

    Raises:
      ValueError: no store is open there; lists the open ones.
    """
    held = _open_at(_absolute(path))
    if held is None:
        others = [str(one.path) for one in list(_open.values())][:5]
        raise ValueError(
            f"{path}: expected a store that is open in this process, found "
            f"{', '.join(others) or 'none'}; open it with jaxinf.open_store"
        )
    return held


def close(path: PathLikeStr) -> None:
    """Closes the store at a path; see `Store.close`. Does nothing if none is open."""
    held = _open_at(_absolute(path))
    if held is not None:
        held.close()


def _absolute(path: PathLikeStr) -> Path:
    return Path(os.path.abspath(os.path.expanduser(path)))


@atexit.register
def _close_all() -> None:
    """Waits for dispatched steps, drains and commits, at the interpreter's exit.

    A failure that no call has raised so far is logged, and becomes the exit status.
    """
    for store in list(_open.values()):
        engine = engine_of(store)
        try:
            if getattr(sys, "last_value", None) is not None:  # it ends by an exception
                engine.exports.stop.set()
            store.close()
            if engine.health.is_unreported:
                engine.health.check()
        except (Exception, KeyboardInterrupt) as error:
            kind = type(error).__name__
            _LOG.error("%s: stopped by %s: %s", store.path, kind, error)
            _fail_at_exit()
        if engine.health.error is not None:
            compat.forget_failed_tokens()
    exit_if_peer_is_silent()


def _fail_at_exit() -> None:
    """Makes the process end with status 1; called while the interpreter exits.

    Python offers no way to change the status at that time. The C library calls its own
    functions after Python's, the last one first.
    """
    c = ctypes.CDLL(None)
    c.fflush(None)
    c.__cxa_atexit(c._exit, ctypes.c_void_p(1), None)


def _forget_all() -> None:
    """Ends the use of all stores in a forked child; the parent keeps them."""
    _locks.clear()  # a thread of the parent may hold some
    for store in _open.values():
        engine_of(store).disown()
    _open.clear()


os.register_at_fork(after_in_child=_forget_all)
