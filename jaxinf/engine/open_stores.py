"""`open_store`, and the stores that are open in this process, one for each path.

Invariant: a path, with symlinks resolved, is open once, and has one `Store`.
"""

import atexit
import ctypes
import logging
import os
import sys
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from functools import partial
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

# By path, with symlinks resolved. Strong references: a store without other references
# may have a commit in flight.
_open_stores: dict[Path, Store] = {}
_path_locks: dict[Path, threading.RLock] = {}
"""Each is held while the store at its path opens or closes."""

_PER_PROCESS = ("path", "csds", "csd", "memory_bytes")
"""Options that may differ between the processes of a run. The others decide about
commits, and are the same in all."""


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
    last committed step. A store that a failure has stopped is opened anew.

    In a program of several processes (`jax.distributed.initialize`), all open one path,
    and each has its member of the run in it, ``path/process-00000`` and so on; or each
    has a path and a store of its own. ``{process}`` in `csds` is the process's number.
    In one run only `csds`, `csd` and `memory_bytes` may differ between processes.

    Args:
      path: The store's directory; missing or empty for a new one.
      csds: CSD roots, each on a mounted drive, among which a new store spreads its
        chunks; by default these are in the store itself. An existing store records its
        roots. Bits do not depend on them.
      csd: The processor that updates the chunks: ``"host"`` (the default), the CPU
        beside the drive; ``"smartssd"``, the card beside it; ``"emulated"``, an
        emulated card. Options may follow: see `jaxinf.csd.parse_csd`. A
        `jaxinf.csd.CsdSpec` may wrap the CSDs, for example to emulate another system.
      memory_bytes: Memory on the host that state passes through, or with cards, each
        card's memory and the host's for its gradients and results; in bytes, or as
        text such as ``"512MiB"`` (the default). On the host, state that fits stays from
        step to step, and is not read again. Only steps that commit write it
        (`durability`), so that rarer commits make drives last.
      durability: The steps that commit by themselves: ``"step"`` (the default), each;
        a number k, every k-th; ``"checkpoint"``, none. `wait`, `close`, `checkpoint`
        and methods that read the store's state also commit. A crash or an error costs
        the steps since the last commit.
      restore: A checkpoint to continue from, which is kept. The first step from there
        gives up the later ones that no checkpoint keeps, at each start with this
        argument. Opening gives up nothing, unless it is in several processes.
      master: The form of the fp32 master params. With ``"auto"``, the default, fp32
        params on the JAX device are the master, and bfloat16 params are its upper half:
        a new store keeps 16-bit remainders beside them, so that no bit is lost. Where
        params can be handed over without a copy (on a CPU), a step reads only the
        remainders, and compares the params' checksum with the stored one. With
        ``"none"`` a new store keeps bfloat16 params alone, rounded stochastically:
        parts of an update below their precision are kept on average. float16 params,
        and bfloat16 ones on cards, have a float32 master. An existing store records
        its form.
      state: The format of the optimizer's float32 state in a new store: ``"fp32"``
        (the default), unchanged; ``"bf16"``, rounded stochastically; ``"int8"``, in
        blocks of 256 with a scale for each. The update computes in float32 in any case.
        Leaves of fewer than 4,096 elements stay in float32. An existing store records
        its format.
      keep_steps: ``k`` or ``(k, n)``. Steps that are multiples of k are kept as
        checkpoints named by their step, with any `durability`; with k = 0 only
        `Store.checkpoint` makes checkpoints. Of those named by their step the last n
        (2 by default) stay, or all with n = 0. A new store is made only if there is
        room for 2 + n states. Without `keep_steps` none is made, and all stay.
      export_every, export_to: The interval of steps that are exported after their
        commit, and the URL (``file://``, ``gs://``, ``s3://``) under which they go to
        ``URL/STEP``. The next update waits for the export; `Store.exports` lists the
        results (docs/checkpoints.md, "Exports beside training"). Exports take some
        five times the largest chunk out of `memory_bytes`.

    Returns:
      The store of the path: the one that this process has open already, if it does, to
      whose options those that are given must be equal.

    Raises:
      ValueError: An argument is out of range, or differs from the open store's; or
        there is no such checkpoint.
      CsdError: A card is missing or not set up.
      NotADirectoryError, PermissionError: `path` cannot be a store.
      StoreLockedError: A live process has the store open; names the process.
      StoreFormatError: It is not a store, is damaged, or has a newer format.
    """
    options = {
        "csds": csds,
        "csd": csd,
        "memory_bytes": memory_bytes,
        "durability": durability,
        "keep_steps": keep_steps,
        "restore": restore,
        "master": master,
        "state": state,
        "export_to": export_to,
        "export_every": export_every,
    }
    arguments = {name: value for name, value in options.items() if value is not None}
    path = _absolute(path)
    store, group = _find_open(path), Group(path)
    if store is not None and engine_of(store).health.error is None:
        path = store.path
    else:
        group = join_run(path)
        if not group.is_alone:
            path = path / member_name(group.number)
            # JAX ends its service at the exit; what is registered later, runs before.
            atexit.unregister(_close_all)
            atexit.register(_close_all)
    lock = _path_locks.setdefault(path.resolve(), threading.RLock())
    with lock:
        return _open_locked(path, group, lock, arguments)


def _open_locked(
    path: Path, group: Group, lock: threading.RLock, arguments: Mapping[str, Any]
) -> Store:
    what = "the options of open_store"
    options = group.in_all(what, partial(_parse_options, path, arguments))
    if (store := _get_open(path)) is not None:
        engine = engine_of(store)
        error = engine.health.error
        if error is None:
            _check_same_options(engine, options, arguments)
            return store
        message = "%s: was stopped by %s: %s; it is opened anew"
        _LOG.warning(message, path, type(error).__name__, error)
        engine.close()
    names = {field.name for field in fields(options)}.difference(_PER_PROCESS)
    shared = {name: getattr(options, name) for name in sorted(names)}
    group.agree(what, lambda: shared, "give them alike in all of them")
    engine, place = open_engine(options, group, lock), path.resolve()
    store = _open_stores[place] = Store(engine)

    def forget() -> None:
        if _open_stores.get(place) is store:
            del _open_stores[place]

    engine.on_close.append(forget)
    return store


def _parse_options(path: Path, arguments: Mapping[str, Any]) -> StoreOptions:
    options = dict(arguments)
    if "csds" in arguments:
        number = str(all_processes("program").number)
        roots = [os.fspath(root) for root in arguments["csds"]]
        roots = [_absolute(root.replace("{process}", number)) for root in roots]
        options["csds"] = tuple(roots)
    if isinstance(arguments.get("csd"), str):
        options["csd"] = parse_csd(arguments["csd"])
    if "memory_bytes" in arguments:
        options["memory_bytes"] = given_bytes("memory_bytes", arguments["memory_bytes"])
    return StoreOptions(path, **options)


def _check_same_options(
    engine: Engine, options: StoreOptions, names: Collection[str]
) -> None:
    roots = engine.files.directory.manifest.csds if engine.has_files else None
    for name in names:
        value, current = getattr(options, name), getattr(engine.options, name)
        are_its_roots = name == "csds" and tuple(map(str, value)) == roots
        if value != current and not are_its_roots:
            raise ValueError(
                f"{options.path}: {name}={value!r}: the store is open in this process "
                f"with {name}={current!r}, and a path has one store; leave it out, or "
                f"close the store first (jaxinf.close({str(engine.path)!r}))"
            )


def _get_open(path: Path) -> Store | None:
    store = _open_stores.get(path.resolve())
    return None if store is None or engine_of(store).health.is_closed else store


def _find_open(path: Path) -> Store | None:
    """Returns the open store of a path, or this process's member of a run there."""
    program, store = all_processes("program"), _get_open(path)
    if store is None and not program.is_alone:
        store = _get_open(path / member_name(program.number))
    return store


def store_of(path: PathLikeStr) -> Store:
    """Returns the open store of a path, for a program that has no variable for it.

    Raises:
      ValueError: No store is open there; lists the open ones.
    """
    store = _find_open(_absolute(path))
    if store is None:
        others = [str(other.path) for other in list(_open_stores.values())][:5]
        raise ValueError(
            f"{path}: expected a store that is open in this process, found "
            f"{', '.join(others) or 'none'}; open it with jaxinf.open_store"
        )
    return store


def close(path: PathLikeStr) -> None:
    """Closes the store at a path; see `Store.close`. Does nothing if none is open."""
    store = _find_open(_absolute(path))
    if store is not None:
        store.close()


def _absolute(path: PathLikeStr) -> Path:
    return Path(os.path.abspath(os.path.expanduser(path)))


@atexit.register
def _close_all() -> None:
    """Waits for dispatched steps, drains and commits, at the interpreter's exit.

    A failure that no call has raised so far is logged, and becomes the exit status.
    """
    for store in list(_open_stores.values()):
        engine = engine_of(store)
        try:
            if getattr(sys, "last_value", None) is not None:  # an exception ends it
                engine.exports.stop.set()
            store.close()
            if engine.health.is_unraised:
                engine.health.check()
        except (Exception, KeyboardInterrupt) as error:
            message = "%s: stopped by %s: %s"
            _LOG.error(message, store.path, type(error).__name__, error)
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


def _detach_fork() -> None:
    """Ends the use of all stores in a forked child; the parent keeps them."""
    _path_locks.clear()  # a thread of the parent may hold some
    for store in _open_stores.values():
        engine_of(store).detach_fork()
    _open_stores.clear()


os.register_at_fork(after_in_child=_detach_fork)
