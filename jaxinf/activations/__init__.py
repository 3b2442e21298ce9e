"""Values of a step that leave memory for drives until they are needed again.

Invariant: a value comes back with its bits, and nothing is left on a drive when the
process ends, however it ends.
"""

from jaxinf.activations.cache import Cache, CacheCounts, writing_bytes
from jaxinf.activations.scratch import (
    PART_BYTES,
    Part,
    Place,
    RateLimits,
    Scratch,
    aligned,
    raw_bytes,
)
from jaxinf.activations.wear import ENDURANCE_TBW, Wear

__all__ = [
    "ENDURANCE_TBW",
    "PART_BYTES",
    "Cache",
    "CacheCounts",
    "Part",
    "Place",
    "RateLimits",
    "Scratch",
    "Wear",
    "aligned",
    "raw_bytes",
    "writing_bytes",
]
