"""The coordination service of a program in several processes.

Invariant: nothing here starts JAX's backend.
"""

import contextlib
import functools
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import jax
from jax._src.dispatch import runtime_tokens as _tokens
from jax._src.distributed import global_state as _distributed
from jax._src.xla_bridge import backends_are_initialized


class Coordination:
    """The coordination service that `jax.distributed.initialize` has connected to.

    Its calls are host-side gRPC; all block, without the GIL. Thread-safe. JAX waits
    without end for a service whose process is stopped, so each call has a limit here.
    """

    def __init__(self, client: Any, process: int, num_processes: int) -> None:
        self._client = client
        self.process = process
        self.num_processes = num_processes
        # Made now: a thread cannot be started at the program's exit.
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="jaxinf-service", daemon=True).start()

    def _serve(self) -> None:
        while True:
            self._calls.get()()

    def put(
        self, key: str, value: str, limit_s: float, *, replaces: bool = False
    ) -> None:
        """Sets a key, once unless it replaces a value."""
        self._in_time(limit_s, self._client.key_value_set, key, value, replaces)

    def get(self, key: str, timeout_s: float) -> str | None:
        """Waits for the value of a key; None if there is none in time."""
        try:
            milliseconds = max(1, round(1000 * timeout_s))
            return self._client.blocking_key_value_get(key, milliseconds)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            return None

    def remove(self, folder: str, limit_s: float) -> None:
        """Removes the keys below a name."""
        self._in_time(limit_s, self._client.key_value_delete, f"{folder}/")

    def read_folder(self, folder: str, limit_s: float) -> dict[str, str]:
        """Returns the keys below a name with their values."""
        pairs = self._in_time(limit_s, self._client.key_value_dir_get, f"{folder}/")
        return dict(pairs)

    def leave(self, limit_s: float) -> None:
        """Leaves the service when all processes do, or gives up; this one ends then."""
        gone = jax.errors.JaxRuntimeError, TimeoutError
        with contextlib.suppress(*gone):
            self._in_time(limit_s, self._client.shutdown)

    def _in_time(self, limit_s: float, call: Callable[..., Any], *args: Any) -> Any:
        """Makes a call on the thread of all calls, in turn.

        Raises:
          TimeoutError: The call did not return in time.
        """
        done: Future[Any] = Future()

        def run() -> None:
            try:
                done.set_result(call(*args))
            except BaseException as error:
                done.set_exception(error)

        self._calls.put(run)
        try:
            return done.result(limit_s)
        except TimeoutError:
            if done.done():
                raise  # the call's own
            raise TimeoutError(f"no answer in {limit_s:g} s") from None


def coordination() -> Coordination | None:
    """Returns the service of this program; None in a program of one process."""
    client, count = _distributed.client, _distributed.num_processes
    if client is None or not count or count < 2:
        return None
    return _connect(client, _distributed.process_id, count)


_connect = functools.lru_cache(1)(Coordination)


def has_backend() -> bool:
    """Whether this process has used JAX."""
    return backends_are_initialized()


def forget_failed_tokens() -> None:
    """Keeps JAX from raising a computation's exception once more at the exit."""
    if has_backend():
        try:
            jax.effects_barrier()
        except jax.errors.JaxRuntimeError:
            _tokens.clear()
