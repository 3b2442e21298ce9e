"""Compiled C++: the toolchain, shared headers, libraries and their cache.

Invariant: the same source gives the same bits with every compiler and level of x86-64.
"""

from jaxinf.native import libraries, toolchain, transfers
from jaxinf.native.libraries import cached_library, load_library
