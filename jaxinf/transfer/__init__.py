"""Bytes between drives, host memory and devices.

Invariant: what stays in memory is decided from the order of uses, which is known.
"""

from jaxinf.transfer.cache import stays

__all__ = ["stays"]
