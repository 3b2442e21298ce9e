"""Arithmetic from a leaf to its chunk files, subgroups and CSDs; it touches no file.

Invariant: every element of a leaf lies in exactly one chunk and in exactly one
subgroup, and the elements of a chunk are a contiguous prefix of its file.
"""

from jaxinf.layout.codecs import (
    CODE_BLOCK,
    SCALES_ALIGNMENT_ELEMENTS,
    CodedSlot,
    rounding_of_chunk,
    scale_chunks,
    scales_length,
)
from jaxinf.layout.grid import (
    CHUNK_ALIGNMENT_ELEMENTS,
    DEFAULT_CHUNK_ELEMENTS,
    Box,
    Chunk,
    LeafGrid,
    choose_grid,
    chunks_of_box,
    shared_grid,
)
from jaxinf.layout.runs import (
    ChunkBox,
    box_runs,
    cut_portions,
    gather,
    scatter,
    target_view,
)
from jaxinf.layout.subgroups import Subgroup, cut_subgroups, deal_chunks
