"""The stores that are open in this process, one for each path.

Invariant: a path, with symlinks resolved, is open once, and its handles are counted.
"""

import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxinf.engine.options import StoreOptions
from jaxinf.engine.training import Training
from jaxinf.processes import Group

_LOG = logging.getLogger("jaxinf")


class Opened:
    """An open store and its handles.

    Attributes:
      holders: handles that are not closed, the oldest first.
    """

    def __init__(self, training: Training) -> None:
        self.training = training
        self.holders: list[Any] = []


class OpenStores:
    """All open stores of a process, by path. Thread-safe."""

    def __init__(self) -> None:
        self._guard = threading.RLock()
        self._by_path: dict[Path, Opened] = {}
        self._locks: dict[Path, threading.RLock] = {}

    def lock(self, path: Path) -> threading.RLock:
        """Returns the lock that is held while the store of a path opens or closes."""
        with self._guard:
            return self._locks.setdefault(path.resolve(), threading.RLock())

    def get(self, path: Path) -> Opened | None:
        """Returns the open store of a path; None if there is none, or it was closed."""
        with self._guard:
            held = self._by_path.get(path.resolve())
            if held is not None and held.training.is_closed:
                self.forget(held)
                return None
            return held

    def open(
        self,
        options: StoreOptions,
        given: Mapping[str, Any],
        group: Group | None = None,
    ) -> Opened:
        """Returns the store that is open at a path, or opens one.

        A store that a failure has stopped is closed and opened anew.

        Args:
          given: the options that the caller has set, by name.
          group: the processes that have the store together; by default this one.

        Raises:
          ValueError: an option that the caller has set differs from the open store's.
          StoreError: as `jaxinf.open_store` documents.
        """
        with self.lock(options.path):
            held = self.get(options.path)
            if held is not None and held.training.failure is not None:
                _LOG.warning(
                    "%s: was stopped by %s: %s; it is opened anew",
                    options.path,
                    type(held.training.failure).__name__,
                    held.training.failure,
                )
                held.training.close()
                self.forget(held)
                held = None
            if held is not None:
                _check_given(held.training, options, given)
                return held
            held = Opened(Training(options, group))
            with self._guard:
                self._by_path = {p: self._by_path[p] for p in self._live()}
                self._by_path[options.path.resolve()] = held
            return held

    def _live(self) -> list[Path]:
        return [p for p, h in self._by_path.items() if not h.training.is_closed]

    def begin_anew(self) -> None:
        """Gives up the locks, which a thread of this fork's parent may hold."""
        self._guard, self._locks = threading.RLock(), {}

    def forget(self, held: Opened) -> None:
        """Removes a store that is closed, or that belongs to this fork's parent."""
        with self._guard:
            self._by_path = {p: h for p, h in self._by_path.items() if h is not held}

    def all(self) -> list[Opened]:
        with self._guard:
            held = self._by_path.values()
            return [one for one in held if not one.training.is_closed]


def _check_given(
    training: Training, options: StoreOptions, given: Mapping[str, Any]
) -> None:
    held = training.options
    for name, value in given.items():
        if getattr(held, name) == getattr(options, name):
            continue
        if name == "csd_roots" and training.has_files:
            roots = training.opened.directory.manifest.csds
            if tuple(str(root) for root in options.csd_roots) == tuple(roots):
                continue
        if name == "csd_shares" and training.has_files:
            continue  # a new store alone is dealt by them
        public = {"csd_roots": "csds", "csd_shares": "csds"}.get(name, name)
        raise ValueError(
            f"{options.path}: {public}={value!r}: the store is open in this process "
            f"with {public}={getattr(held, name)!r}, and a path has one store; leave "
            f"it out, or close the store first (jaxinf.close({str(held.path)!r}))"
        )
