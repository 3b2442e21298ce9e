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


def move_many(
    files: Sequence[Path], places: "array[int]", *, writes: bool
) -> Sequence[int]:
    """Moves bytes between files and memory by direct I/O; releases the GIL; blocks.

    Args:
      places: For each transfer the address in memory, the offset in the file and the
        number of bytes; the first two are multiples of the page.
      writes: Whether to write to the files, with zeros up to the end of the last page.

    Returns:
      The bytes moved by each transfer, -1 if it is left to the caller: all of them
      without native code.
    """
    function = load()
    if function is None:
        return [-1] * len(files)
    paths = os.fsencode("\0".join(map(str, files))) + b"\0"
    moved_bytes = array("q", bytes(8 * len(files)))
    addresses = places.buffer_info()[0], moved_bytes.buffer_info()[0]
    function(len(files), writes, paths, *addresses)
    return moved_bytes


@functools.cache
def load() -> Any:
    """Returns the native code, or None after one log message.

    If the installed package lacks it, this blocks while it is compiled.
    """
    try:
        function: Any = libraries.load_helper(toolchain.TRANSFERS)
    except (toolchain.CompilerError, OSError) as error:
        _LOGGER.info("models of many small leaves will be slower: %s", error)
        return None
    if function is not None:
        types = ctypes.c_int64, ctypes.c_int, ctypes.c_char_p
        function.argtypes = [*types, ctypes.c_void_p, ctypes.c_void_p]
    return function
