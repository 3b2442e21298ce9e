"""Runs kernels: lowers them, emits C++, compiles it, also for cards.

Invariant: nothing here imports JAX or optax; a kernel is data that `jaxinf.program` has
extracted from an optimizer.
"""

from jaxinf.kernels.calls import Call, Passage
from jaxinf.kernels.card import (
    CardArgument,
    CardKernel,
    CardStatus,
    card_kernel,
    named_card_kernel,
)
from jaxinf.kernels.card_library import card_function, card_library
from jaxinf.kernels.card_source import card_source
from jaxinf.kernels.compiled import CompiledKernel, compiled, initialise

__all__ = [
    "Call",
    "CardArgument",
    "CardKernel",
    "CardStatus",
    "CompiledKernel",
    "Passage",
    "card_function",
    "card_kernel",
    "card_library",
    "card_source",
    "compiled",
    "initialise",
    "named_card_kernel",
]
