"""The engine: streams state through a fixed memory, step by step, and commits.

Invariant: host memory does not grow with the model; a step is all or nothing.
"""

from jaxinf.engine.chunks import VerifyMode
from jaxinf.engine.convert import convert_store
from jaxinf.engine.decoding import decoded_pieces
from jaxinf.engine.description import LeafDescription, StoreDescription
from jaxinf.engine.options import Durability, MasterChoice, MasterFormat, StateFormat
from jaxinf.engine.parts import LeafPart
from jaxinf.engine.steps import StepMetrics
from jaxinf.engine.store import DEFAULT_MEMORY_BYTES, Store, open_store
from jaxinf.engine.training import Training

__all__ = [
    "DEFAULT_MEMORY_BYTES",
    "Durability",
    "LeafDescription",
    "LeafPart",
    "MasterChoice",
    "MasterFormat",
    "StateFormat",
    "StepMetrics",
    "Store",
    "StoreDescription",
    "Training",
    "VerifyMode",
    "convert_store",
    "decoded_pieces",
    "open_store",
]
