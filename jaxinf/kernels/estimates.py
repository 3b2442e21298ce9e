"""The processor's estimates of 1 / sqrt(x) as a table, from which cards go on.

Invariant: with the table of this host a card's kernel gives the bits of this host's,
whoever made the processor, as ``cpp/rsqrt.hpp`` is what both compute.
"""

import ctypes
import functools
import logging
from typing import Any

import numpy as np

from jaxinf.native import libraries, toolchain
from jaxinf.typing import Array

__all__ = ["ESTIMATES_BYTES", "rsqrt_estimates"]

ESTIMATES_BYTES = 64 + 2 * 8192
"""Of the table: a block of 64 bytes, then 8,192 entries of 16 bits."""

_LOGGER = logging.getLogger("jaxinf.kernels")


@functools.cache
def rsqrt_estimates() -> Array:
    """The table, read-only; made once in a process, which takes 0.1 s or a compiler.

    Returns:
      ``(ESTIMATES_BYTES / 4,)`` uint32. [0]: the Newton steps that the host takes, 1
      or 2; 0 where it has no such estimate (another processor than x86-64, or one whose
      instruction is no table): a card then rounds sqrt(x) and its reciprocal. From [16]
      on the entries of ``cpp/rsqrt.hpp``, two a word, the first in the lower half.
    """
    table = np.zeros(ESTIMATES_BYTES // 4, np.uint32)
    try:
        function = _function()
    except (toolchain.CompilerError, OSError) as error:
        _warn(str(error))
        function = None
    if function is not None:
        table[0] = function(table[16:].ctypes.data)
        if not table[0]:
            _warn("this processor's instruction does not estimate by a table")
    table.flags.writeable = False
    return table


def _function() -> Any:
    """What fills the entries and returns the steps; None on other processors."""
    function = libraries.load_helper(toolchain.RSQRT_ESTIMATES)
    if function is not None:
        function.argtypes = [ctypes.c_void_p]
    return function


def _warn(reason: str) -> None:
    _LOGGER.warning(
        "cards compute 1 / sqrt(x) with other last bits than this host: %s", reason
    )
