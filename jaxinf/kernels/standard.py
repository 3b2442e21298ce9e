"""The kernels that come compiled with the package.

Invariant: no two of them have the same C++.
"""

import functools
from collections.abc import Mapping
from types import MappingProxyType

from jaxinf.kernels.emitter import emit
from jaxinf.kernels.lowering import lower
from jaxinf.program import Kernel, traced_kernels


@functools.cache
def standard_kernels() -> Mapping[str, Kernel]:
    """Returns kernels by name; of several with the same C++, the first.

    The first call traces them all, which takes about a second.
    """
    kernels: dict[str, Kernel] = {}
    known: set[str] = set()
    for name, kernel in traced_kernels().items():
        text = emit(lower(kernel)).text
        if text not in known:
            known.add(text)
            kernels[name] = kernel
    return MappingProxyType(kernels)
