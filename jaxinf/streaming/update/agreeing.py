"""Compares the updates of a device with those of the host's kernel, on a sample.

Invariant: a device whose updates are others than the host's gets none.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from jaxinf.errors import StreamError
from jaxinf.kernels import compiled
from jaxinf.program import Kernel
from jaxinf.typing import FLOAT32, Array

Sample: TypeAlias = Callable[
    [Kernel, Sequence[Array], Array, Sequence[np.generic | Array]],
    Sequence[Array | None],
]
"""Returns new states for a kernel, states, a gradient and scalars."""

_NUM_ELEMENTS = 4099
# Of the largest element: other products fused with sums, and a device's own division
# and square root, change a few units in the last place.
_TOLERANCES = {4: 1e-5, 2: 2e-2}


def check_agrees(
    sample: Sample,
    device: Any,
    kernel: Kernel,
    scalars: Sequence[np.generic | Array],
    *,
    has_bits: bool,
) -> None:
    """Refuses a device whose update of a sample is not that of the host's kernel.

    Args:
      scalars: Those of a step, or like them.
      has_bits: Whether the bits of the compiled kernel are expected.

    Raises:
      StreamError: Names the state, and the largest difference.
    """
    rng = np.random.default_rng(0)
    normal = partial(rng.standard_normal, _NUM_ELEMENTS, FLOAT32)
    gradient, params, out = normal(), normal(), normal()
    slots = [np.abs(normal()).astype(dtype) for dtype in kernel.slot_dtypes]
    found = sample(kernel, [params, *slots], gradient, scalars)
    compiled(kernel).run(
        gradient=gradient,
        params=params,
        slots=slots,
        scalars=scalars,
        arrays=[],
        out=out,
    )
    names = ("params", *kernel.slots)
    for name, one, other in zip(names, found, (params, *slots), strict=True):
        difference = 0.0 if one is None else _difference(one, other)
        if difference > (0 if has_bits else _TOLERANCES.get(other.itemsize, 0)):
            raise StreamError(
                f"device_updates: {device} computes {name} otherwise than the "
                f"host's kernel, by up to {difference:.2g} of its largest element; "
                "leave device_updates out"
            )


def _difference(found: Array, expected: Array) -> float:
    """The largest difference, in the largest element; NaN equals NaN alone."""
    one, other = (np.asarray(array, np.float64) for array in (found, expected))
    if not np.array_equal(np.isnan(one), np.isnan(other)):
        return np.inf
    largest = np.nanmax(np.abs(other), initial=np.finfo(FLOAT32).tiny)
    with np.errstate(invalid="ignore"):  # of two infinities
        return float(np.nanmax(np.abs(one - other), initial=0.0) / largest)
