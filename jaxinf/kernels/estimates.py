"""The host's estimates of 1 / sqrt(x) as a table, which cards refine.

Invariant: with the table of this host, a card's kernel gives the bits of the host's own
on every processor, since both compute ``cpp/rsqrt.hpp``.
"""

import ctypes
import functools
import logging
from typing import Any

import numpy as np

from jaxinf.native import libraries, toolchain
from jaxinf.typing import Array

ESTIMATES_BYTES = 64 + 2 * 8192
"""Length of the table: a block of 64 bytes, then 8,192 entries of 16 bits."""

_LOGGER = logging.getLogger("jaxinf.kernels")


@functools.cache
def rsqrt_estimates() -> Array:
    """Returns the read-only table, made once in a process.

    The first call takes 0.1 s, or runs the compiler.

    Returns:
      ``(ESTIMATES_BYTES / 4,)`` uint32. [0] is the number of Newton steps that the host
      takes, 1 or 2. It is 0 if the host has no such estimate: its processor is neither
      x86-64 nor aarch64, or the instruction does not read a table. A card then rounds
      sqrt(x) and its reciprocal. From [16] on follow the entries of ``cpp/rsqrt.hpp``,
      two in a word, the first in the lower half.
    """
    table = np.zeros(ESTIMATES_BYTES // 4, np.uint32)
    try:
        function = estimating_function()
    except (toolchain.CompilerError, OSError) as error:
        _warn(str(error))
        function = None
    if function is not None:
        table[0] = function(table[16:].ctypes.data)
        if not table[0]:
            _warn("this processor's instruction does not estimate by a table")
    table.flags.writeable = False
    return table


def estimating_function() -> Any:
    """Returns a function that fills the entries and returns the number of steps.

    None on processors other than x86-64 and aarch64.
    """
    function = libraries.load_helper(toolchain.RSQRT_ESTIMATES)
    if function is not None:
        function.argtypes = [ctypes.c_void_p]
    return function


def _warn(reason: str) -> None:
    _LOGGER.warning(
        "cards compute 1 / sqrt(x) with other last bits than this host: %s", reason
    )
