"""Finds Xilinx's runtime (XRT): its C library, or its Python module.

Invariant: nothing is loaded before a store of cards is opened, and an error names the
missing part and the command that sets it up.
"""

import importlib.util
import os
from pathlib import Path
from typing import Any

from jaxinf.csd.cards.library import XrtLibrary
from jaxinf.errors import CsdError

LIBRARY = "libxrt_coreutil.so.2"
"""XRT's library, in ``lib`` below XILINX_XRT, or on the loader's path."""


def has_runtime() -> bool:
    """Whether XRT seems to be set up; nothing is loaded."""
    prefix = os.environ.get("XILINX_XRT")
    if not prefix:
        return False
    own = Path(prefix) / "lib" / LIBRARY
    return own.exists() or importlib.util.find_spec("pyxrt") is not None


def load_runtime() -> Any:
    """Returns the runtime under pyxrt's names.

    The C library is preferred: any Python can load it, and its calls release the GIL,
    which pyxrt holds while bytes move to or from a card. pyxrt is used if the library
    lacks a function.

    Raises:
      CsdError: XRT is not installed, or its environment is not set up.
    """
    prefix = os.environ.get("XILINX_XRT")
    if not prefix:  # without its environment the runtime would end the process
        raise CsdError(
            "csd='smartssd': expected the variable XILINX_XRT to name XRT's directory, "
            "found it unset; install XRT, and run `source /opt/xilinx/xrt/setup.sh` "
            "before Python. csd='emulated' runs the same kernels with no card"
        )
    own = Path(prefix) / "lib" / LIBRARY
    try:
        return XrtLibrary(own if own.exists() else Path(LIBRARY))
    except (OSError, AttributeError) as error:
        return _import_pyxrt(error)


def _import_pyxrt(refusal: Exception) -> Any:
    try:
        import pyxrt  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise CsdError(
            f"csd='smartssd': expected Xilinx's runtime (XRT), found neither {LIBRARY} "
            f"({refusal}) nor its Python module ({error}); install XRT, and run "
            "`source /opt/xilinx/xrt/setup.sh` before Python. csd='emulated' runs the "
            "same kernels with no card"
        ) from error
    return pyxrt
