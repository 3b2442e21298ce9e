"""Runs kernels: lowers them, emits C++, compiles it, also for cards.

Invariant: nothing here imports JAX or optax; a kernel is data that `jaxinf.program` has
extracted from an optimizer.
"""

from jaxinf.kernels.calls import Checksums, stored_arrays
from jaxinf.kernels.card_kernels import (
    ESTIMATES_BYTES,
    STATUS_BYTES,
    CardKernel,
    CardStatus,
    card_kernel,
    named_card_kernel,
)
from jaxinf.kernels.card_library import card_function, card_library, rsqrt_estimates
from jaxinf.kernels.card_source import card_source
from jaxinf.kernels.compiled import CompiledKernel, compiled, initialise
from jaxinf.kernels.specialise import scalars_used, specialise, state_read
