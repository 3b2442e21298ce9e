"""Exports whose chunks never reach their place, until the export is given up."""

from jaxinf.exchange import ObjectStore

__all__ = ["put"]

_put = ObjectStore.put


def put(self, name, value):
    """As `ObjectStore.put`, but that of a chunk waits for ever."""
    if "/c/" in f"{name}/" and self._stop is not None:
        self._stop.wait()
    _put(self, name, value)
