"""Blocks of int8 codes in machine code, outside a kernel.

Invariant: the numbers are those of ``cpp/codecs.hpp``, bit for bit.
"""

import ctypes
import functools
import logging
from typing import Any

from jaxinf.native import libraries, toolchain
from jaxinf.typing import Array

_LOGGER = logging.getLogger("jaxinf.native")


def run(
    values: Array, codes: Array, scales: Array, *, key: int, first: int, decodes: bool
) -> bool:
    """Encodes or decodes numbers; releases the GIL; blocks.

    Args:
      values: ``(n,)`` float32.
      codes: ``(n,)`` uint8.
      scales: ``(ceil(n / 256),)`` float32.
      key: seed of the random bits that decide the rounding.
      decodes: whether to write `values`; otherwise `codes` and `scales` are written.

    Returns:
      False without native code; nothing is written then.
    """
    native = function()
    if native is None:
        return False
    addresses = (array.ctypes.data for array in (values, codes, scales))
    native(values.size, decodes, *addresses, first & 0xFFFFFFFF, key)
    return True


@functools.cache
def function() -> Any:
    """Returns the native code, or None after one log message.

    If the installed package lacks it, this blocks while it is compiled.
    """
    try:
        found: Any = libraries.load_helper(toolchain.BLOCK_CODES)
    except (toolchain.CompilerError, OSError) as error:
        _LOGGER.info("activations will be coded more slowly: %s", error)
        return None
    if found is not None:
        pointers = [ctypes.c_void_p] * 3
        found.argtypes = [ctypes.c_int64, ctypes.c_int, *pointers]
        found.argtypes += [ctypes.c_uint32, ctypes.c_uint32]
    return found
