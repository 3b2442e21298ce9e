"""Many short transfers between files and memory in one native call.

Invariant: a transfer that is not as most are (a file that is missing, short or not on
a drive) is left to the caller, who moves it in Python and finds out.
"""

import ctypes
import functools
import logging
import os
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxinf.native import libraries, toolchain

__all__ = ["function", "move"]

_LOGGER = logging.getLogger("jaxinf.native")


def move(
    files: Sequence[Path], places: "array[int]", *, writes: bool
) -> "array[int] | None":
    """Moves bytes between files and memory by direct I/O; releases the GIL; blocks.

    Args:
      files: one for each transfer.
      places: of each transfer the address in memory, the offset in the file and the
        number of bytes; the first two are multiples of the page.
      writes: to the files, with zeros behind the bytes in their last page.

    Returns:
      The bytes moved by each transfer, -1 where it is left to the caller; None where
      there is no native code.
    """
    native = function()
    if native is None:
        return None
    paths = b"".join([os.fsencode(file) + b"\0" for file in files])
    done = array("q", bytes(8 * len(files)))
    native(
        len(files),
        writes,
        paths,
        places.buffer_info()[0],
        done.buffer_info()[0],
    )
    return done


@functools.cache
def function() -> Any:
    """The native code, or None where there is none; says so once in the log.

    Blocks while it is compiled, where the installed package has none.
    """
    try:
        found: Any = libraries.load_helper(toolchain.TRANSFERS)
    except (toolchain.CompilerError, OSError) as error:
        _LOGGER.info("models of many small leaves will be slower: %s", error)
        return None
    if found is not None:
        found.argtypes = [
            ctypes.c_int64,
            ctypes.c_int,
            ctypes.c_char_p,
            ctypes.c_void_p,
            ctypes.c_void_p,
        ]
    return found
