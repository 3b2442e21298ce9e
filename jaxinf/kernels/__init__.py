"""Runs kernels: evaluates with NumPy, lowers, emits C++, compiles, also for cards.

Invariant: nothing here imports JAX or optax; a kernel is data that `jaxinf.program` has
extracted from an optimizer.
"""

from jaxinf.kernels.card import (
    CardArgument,
    CardKernel,
    CardStatus,
    card_kernel,
    named_card_kernel,
)
from jaxinf.kernels.card_library import card_function, card_library
from jaxinf.kernels.card_source import card_source
from jaxinf.kernels.compiled import CompiledKernel, compiled, runner
from jaxinf.kernels.evaluator import evaluate, initialise
from jaxinf.kernels.passage import Passage
from jaxinf.kernels.repeated import RepeatedCall

__all__ = [
    "CardArgument",
    "CardKernel",
    "CardStatus",
    "CompiledKernel",
    "Passage",
    "RepeatedCall",
    "card_function",
    "card_kernel",
    "card_library",
    "card_source",
    "compiled",
    "evaluate",
    "initialise",
    "named_card_kernel",
    "runner",
]
