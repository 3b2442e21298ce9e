"""Many short transfers between files and memory in one native call.

Invariant: an unusual transfer (the file is missing, short or not on a drive) is left to
  the caller, who repeats it in Python and gets the error.
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

_LOGGER = logging.getLogger("jaxinf.native")


def move(
    files: Sequence[Path], places: "array[int]", *, writes: bool
) -> "array[int] | None":
    """Moves bytes between files and memory by direct I/O; releases the GIL; blocks.

    Args:
      places: for each transfer the address in memory, the offset in the file and the
        number of bytes; the first two are multiples of the page.
      writes: whether to write to the files, with zeros up to the end of the last page.

    Returns:
      The bytes moved by each transfer, -1 if it is left to the caller; None without
      native code.
    """
    native = function()
    if native is None:
        return None
    paths = os.fsencode("\0".join(map(str, files))) + b"\0"
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
    """Returns the native code, or None after one log message.

    If the installed package lacks it, this blocks while it is compiled.
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
