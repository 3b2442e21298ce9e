"""Sparse gradients: the selection of the elements to send, and their form on the link.

Invariant: the selection depends on the gradient, the store's chunks and the compression
alone, not on a run's memory, workers, CSDs or mesh.
"""

from jaxinf.compress.sparse import (
    SparseGradient,
    SparseLeaf,
    SparsifyState,
    compress_leaf,
    dense_leaf,
    sparsify,
)
from jaxinf.compress.topk import TopK, ValueDType, parse_compression, top_k
