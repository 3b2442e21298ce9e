"""A place at a URL, through tensorstore's key-value stores: file://, gs://, s3://.

Invariant: nothing is believed to be atomic or kept: an object counts as written when it
  was read back. No credential, and no part of a URL that may be one, is in an error.
"""

import os
import re
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import tensorstore

from jaxinf.errors import ExchangeError
from jaxinf.terminal import format_bytes
from jaxinf.transfer import crc32c

_SCHEMES = ("file", "gs", "s3")
_URL = re.compile(r"([a-z][a-z0-9+.-]*)://(.*)", re.DOTALL)
# What tensorstore raises: of a wrong spec, of a file system, of any other service.
_FAILURES = (ValueError, OSError, RuntimeError)
_SLICE_S = 0.1  # between looks at whether to stop

Stamp: TypeAlias = tuple[int, int]
"""The length of an object in bytes, and its CRC-32C."""


def is_url(text: str) -> bool:
    """Whether a destination or a source is a URL, and not a path."""
    return _URL.match(text) is not None


class ObjectStore:
    """Objects below a URL. Thread-safe; all methods block.

    Rights and credentials are tensorstore's: the environment, and files that the
    tools of the clouds have. For an S3-compatible server ``AWS_ENDPOINT_URL`` is its
    URL, and ``AWS_REGION`` its region.

    Args:
      url: ``file:///directory``, ``gs://bucket/path`` or ``s3://bucket/path``.
      stop: once it is set, methods raise ExchangeError.

    Attributes:
      where: the URL, for messages.
      directory: the directory of a ``file://`` URL.

    Raises:
      ExchangeError: the URL is of another kind; nothing was read or written. Methods
        raise it for what cannot be done there.
    """

    def __init__(self, url: str, stop: threading.Event | None = None) -> None:
        self._stop = stop
        self.where, spec = _parsed(url)
        self.directory = Path(spec["path"]) if spec["driver"] == "file" else None
        self._store: Any = self._result("open", lambda: tensorstore.KvStore.open(spec))

    def names(self) -> set[str]:
        """Returns the names of all objects."""
        keys = self._result("list its objects", self._store.list)
        return {key.decode() for key in keys}

    def read(self, name: str) -> bytes | None:
        """Returns an object; None if there is none."""
        found = self._result(f"read {name}", lambda: self._store.read(name))
        return found.value if found.state == "value" else None

    def stamp(self, name: str) -> Stamp | None:
        """Returns the stamp of an object that is read; None if there is none."""
        found = self.read(name)
        return None if found is None else stamp_of(found)

    def get(self, name: str, stamp: Stamp) -> bytes:
        """Returns an object of a known stamp."""
        found = self.read(name)
        if found is None or stamp_of(found) != stamp:
            raise ExchangeError(
                f"{self.where}: {name}: expected {stamp[0]} bytes of CRC-32C "
                f"{stamp[1]:08x}, found {_shown(found)}; the export is torn: export to "
                "this URL again, which writes what is missing or differs"
            )
        return found

    def put(self, name: str, value: bytes) -> None:
        """Writes an object, and reads it back."""
        self._result(f"write {name}", lambda: self._store.write(name, value))
        if (found := self.read(name)) != value:
            raise ExchangeError(
                f"{self.where}: {name}: expected the {_shown(value)} that were "
                f"written, found {_shown(found)}; this place does not keep what it is "
                "given, or not at once: try again"
            )

    def check_all(self, wanted: Iterable[str], remedy: str) -> None:
        """Refuses a place that lacks objects, by their names."""
        missing = sorted(set(wanted) - self.names())
        if missing:
            more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
            raise ExchangeError(
                f"{self.where}: expected all objects of an export, found none of "
                f"{', '.join(missing[:8])}{more}; {remedy}"
            )

    def _result(self, action: str, begin: Callable[[], Any]) -> Any:
        """Waits for tensorstore; it asks a server that is busy again for minutes."""
        try:
            future = begin()
            if self._stop is None:
                return future.result()
            while not self._stop.is_set():
                try:
                    return future.result(timeout=_SLICE_S)
                except TimeoutError:
                    if future.done():  # by now, or the error is the service's
                        return future.result()
            future.cancel()
        except _FAILURES as error:
            # What follows " [" are details of the request, which may name a key's id.
            why = str(error).split(" [", 1)[0]
            raise ExchangeError(
                f"{self.where}: cannot {action}: {why}; check the URL, and the rights "
                "and the room that this user has there"
            ) from None
        raise ExchangeError(f"{self.where}: it was given up")


def _parsed(url: str) -> tuple[str, dict[str, Any]]:
    """Returns a URL as it may be shown, and tensorstore's spec."""
    match = _URL.match(url)
    scheme, rest = match.groups() if match else ("", url)
    if scheme not in _SCHEMES:
        raise ExchangeError(
            f"expected a URL of {', '.join(f'{s}://' for s in _SCHEMES)}, found "
            f"{scheme + '://…' if scheme else 'none'}; give a directory without a "
            "scheme for the other formats"
        )
    plain = re.split(r"[?#]", rest, maxsplit=1)[0]
    if scheme != "file" and (plain != rest or "@" in plain.split("/", 1)[0]):
        raise ExchangeError(
            f"{scheme}://…: expected {scheme}://BUCKET/PATH alone, found more; "
            "credentials and an endpoint are taken from the environment"
        )
    shown = f"{scheme}://{plain.rstrip('/')}"
    try:
        spec = tensorstore.KvStore.Spec(f"{shown}/").to_json()
    except _FAILURES as error:
        why = str(error).rsplit(": ", 1)[-1]
        raise ExchangeError(f"{shown}: not a URL to export to: {why}") from None
    env = os.environ.get
    endpoint = env("AWS_ENDPOINT_URL_S3") or env("AWS_ENDPOINT_URL")
    if scheme == "s3" and endpoint:
        region = env("AWS_REGION") or env("AWS_DEFAULT_REGION")
        spec |= {"endpoint": endpoint, "aws_region": region or "us-east-1"}
    if scheme == "s3" and "AWS_ACCESS_KEY_ID" in os.environ:
        # Otherwise AWS prints that there are no files with credentials.
        spec["aws_credentials"] = {"type": "environment"}
    if not spec.get("path", "").endswith("/"):
        spec["path"] = spec.get("path", "") + "/"
    if spec["path"] == "/":
        if scheme == "file":
            raise ExchangeError(f"{shown}: expected a directory, found the root")
        spec["path"] = ""
    return shown, spec


def stamp_of(value: bytes) -> Stamp:
    return len(value), crc32c(np.frombuffer(value, np.uint8)) if value else 0


def _shown(found: bytes | None) -> str:
    if found is None:
        return "none"
    num_bytes, checksum = stamp_of(found)
    return f"{num_bytes} bytes ({format_bytes(num_bytes)}) of CRC-32C {checksum:08x}"
