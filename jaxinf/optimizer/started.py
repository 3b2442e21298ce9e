"""Updates that run while JAX goes on: started with a gradient, fetched later.

Invariant: waiting gradients take no more memory than the store's budget, except for a
single longer one; every started update ends, fetched or not.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeAlias

from jaxinf.engine import Store

_Key: TypeAlias = tuple[int, ...]


class StartedUpdates:
    """The updates of one store that are under way. Thread-safe.

    Args:
      store: the store, whose workers and memory are the limits; its `close` waits.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._changed = threading.Condition()
        self._taken_bytes = 0
        self._pool: ThreadPoolExecutor | None = None
        self._under_way: dict[_Key, tuple[Future[None], Any]] = {}

    def start(
        self,
        key: _Key,
        results: Any,
        update: Callable[[], None],
        num_bytes: int,
    ) -> None:
        """Begins an update; blocks while those under way hold too much memory.

        Args:
          key: key of the call; an unfetched update of the same key is forgotten.
          update: fills the results; blocks until done.
          num_bytes: bytes that it holds until then.

        Raises:
          BaseException: the exception that stopped the store.
        """
        self._store._training.check()
        limit = self._store._training.options.memory_bytes
        with self._changed:
            self._changed.wait_for(
                lambda: not self._taken_bytes or self._taken_bytes + num_bytes <= limit
            )
            self._taken_bytes += num_bytes
            future = self._threads().submit(self._run, update, num_bytes)
            self._under_way[key] = future, results

    def finish(self, key: _Key) -> Any:
        """Waits for an update and returns its results.

        Raises:
          BaseException: the update's own.
        """
        with self._changed:
            future, results = self._under_way.pop(key)
        future.result()
        return results

    def _run(self, update: Callable[[], None], num_bytes: int) -> None:
        try:
            update()
        finally:
            with self._changed:
                self._taken_bytes -= num_bytes
                self._changed.notify_all()

    def _threads(self) -> ThreadPoolExecutor:
        if self._pool is None:
            training = self._store._training
            num_csds = len(training.opened.csds) if training.has_files else 1
            self._pool = ThreadPoolExecutor(
                training.options.workers_of(num_csds),
                thread_name_prefix="jaxinf-leaf",
            )
            training.on_close(self._pool.shutdown)
        return self._pool
