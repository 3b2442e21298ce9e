"""Values of a step that leave memory for drives until they are needed again.

Invariant: a value comes back with its bits, but for the low ones if it was coded, and
nothing is left on a drive when the process ends, however it ends.
"""

from jaxinf.activations.cache import Cache, CacheCounts, writing_bytes
from jaxinf.activations.forms import FORMS, Coding, Form, coding_of
from jaxinf.activations.scratch import (
    PART_BYTES,
    Part,
    Place,
    RateLimits,
    Scratch,
    aligned,
    raw_bytes,
    stored_bytes,
)
from jaxinf.activations.tiers import NUM_COPIES, TieredCache
from jaxinf.activations.wear import ENDURANCE_TBW, Wear

__all__ = [
    "ENDURANCE_TBW",
    "FORMS",
    "NUM_COPIES",
    "PART_BYTES",
    "Cache",
    "CacheCounts",
    "Coding",
    "Form",
    "Part",
    "Place",
    "RateLimits",
    "Scratch",
    "TieredCache",
    "Wear",
    "aligned",
    "coding_of",
    "raw_bytes",
    "stored_bytes",
    "writing_bytes",
]
