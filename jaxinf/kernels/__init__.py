"""Optimizers as kernels: an optax update split between JAX and the storage.

Invariant: optax is the only definition of an optimizer; nothing here knows one by
name. `trace_update` divides ``tx.update`` into a *prologue* (scalars and reductions,
run in JAX) and one elementwise `Kernel` per leaf, run on chunks near the storage.
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
from jaxinf.kernels.codecs import CodedSlot
from jaxinf.kernels.compiled import CompiledKernel, compiled, runner
from jaxinf.kernels.evaluator import evaluate, initialise
from jaxinf.kernels.init import InitProgram, LeafInit, trace_init
from jaxinf.kernels.kernel import InitKernel, Kernel
from jaxinf.kernels.passage import Passage
from jaxinf.kernels.program import LeafUpdate, UpdateProgram, trace_update
from jaxinf.kernels.prologue import LeafInputs
from jaxinf.kernels.state import StateLayout, StateSlot, state_layout
from jaxinf.kernels.tree import LeafInfo, leaf_infos

__all__ = [
    "CardArgument",
    "CardKernel",
    "CardStatus",
    "CodedSlot",
    "CompiledKernel",
    "InitKernel",
    "InitProgram",
    "Kernel",
    "LeafInfo",
    "LeafInit",
    "LeafInputs",
    "LeafUpdate",
    "Passage",
    "StateLayout",
    "StateSlot",
    "UpdateProgram",
    "card_function",
    "card_kernel",
    "card_library",
    "card_source",
    "compiled",
    "evaluate",
    "initialise",
    "leaf_infos",
    "named_card_kernel",
    "runner",
    "state_layout",
    "trace_init",
    "trace_update",
]
