"""Payloads of the caller for the commits of future steps.

Invariant: a payload for a finished step is refused; older payloads are dropped.
"""

import threading
from pathlib import Path

from jaxinf.documents import encode, parse_json
from jaxinf.typing import JsonValue

_MOST_BYTES = 16 << 20  # the record must stay within the limit of a document


class Annotations:
    """Payloads by step. Thread-safe.

    Args:
      path: the store's path, for errors.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._guard = threading.Lock()
        self._payloads: dict[int, JsonValue] = {}
        self._last = -1  # the last finished step

    def set(self, step: int, payload: JsonValue) -> None:
        """Keeps a payload for the commit of a step that has not finished.

        Raises:
          ValueError: the step is finished already, or the payload holds NaN or Inf.
          TypeError: the payload has no form in JSON.
        """
        raw = encode({"payload": payload})  # nested as it will be in the record
        payload = parse_json(raw, most_bytes=_MOST_BYTES)["payload"]
        with self._guard:
            if step <= self._last:
                raise ValueError(
                    f"{self._path}: annotate(step={step}): expected a step still to be "
                    f"committed, the store is at step {self._last}; annotate before "
                    "the update"
                )
            self._payloads[step] = payload

    def take(self, step: int) -> JsonValue:
        """Returns the payload of the step that ends now, and drops earlier ones."""
        with self._guard:
            self._last = step
            payload = self._payloads.pop(step, None)
            self._payloads = {s: p for s, p in self._payloads.items() if s > step}
        return payload

    def go_on_from(self, step: int, payload: JsonValue = None) -> None:
        """Notes the step that the store is at; -1 before its first.

        Args:
          payload: the payload of the step after it, if that was given up and is likely
            to be run again; it does not replace a newer one.
        """
        with self._guard:
            self._last = step
            if payload is not None:
                self._payloads.setdefault(step + 1, payload)
