"""A kernel over a sparse gradient: the bits and checksums of the dense one."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxinf.compress import SparseGradient
from jaxinf.csd import sparse
from jaxinf.csd.sparse import run_sparse
from jaxinf.kernels import CallInputs, Passage, compiled
from jaxinf.layout import CodedSlot
from jaxinf.program import trace_update

rng = np.random.default_rng(0)
KERNEL = trace_update(optax.adam(1e-3), jnp.zeros(8)).leaves[0].kernel
SCALARS = [np.float32(0.1), np.float32(0.001)]


def slots_of(num, codec):
    if not codec:
        return [np.zeros(num, np.float32) for _ in range(2)]
    slots = [
        CodedSlot(np.zeros(num, np.uint8), np.zeros(-(-num // 256), np.float32), n, 0)
        for n in range(2)
    ]
    for slot in slots:
        slot.encode(np.abs(rng.standard_normal(num)).astype(np.float32))
    return slots


def memory_of(slot):
    return slot if isinstance(slot, np.ndarray) else np.append(slot.codes, slot.scales)


@pytest.mark.parametrize("codec", ["", "int8"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("num", [1, 1023, 1024, 1025, 5000])
def test_bits_and_checksums(num, dtype, codec, monkeypatch):
    monkeypatch.setattr(sparse, "_PIECE_ELEMENTS", 1024)
    k = min(num, 40)
    indices = np.sort(rng.choice(num, k, replace=False)).astype(np.int32)
    values = rng.standard_normal(k).astype(dtype)
    dense = np.zeros(num, dtype)
    dense[indices] = values
    given = rng.standard_normal(num).astype(np.float32)
    wanted = [True] * (5 if codec else 3)
    state = slots_of(num, codec)
    results = []
    for gradient in (dense, SparseGradient(indices, values, num)):
        params, out = np.empty((2, num), np.float32)
        slots = [
            CodedSlot(s.codes.copy(), s.scales.copy(), s.key, s.first)
            if codec
            else s.copy()
            for s in state
        ]
        passage = Passage(given=given, reads=wanted, writes=wanted)
        states, kernel = [params, *slots], compiled(KERNEL)
        inputs = CallInputs(dense, out, SCALARS)
        if gradient is dense:
            is_finite = kernel.call(states, inputs).run(inputs, passage)
        else:
            is_finite = run_sparse(kernel, states, gradient, inputs, passage)
        assert is_finite
        memory = [params, out, *map(memory_of, slots)]
        results.append((memory, passage.read, passage.written))
    (memory, *sums), (other, *others) = results
    assert sums == others
    for a, b in zip(memory, other, strict=True):
        np.testing.assert_array_equal(a, b)


def test_parts():
    sent = SparseGradient(
        np.array([0, 7, 8, 99], np.int32), np.arange(4, dtype=np.float32), 100
    )
    part = sent.part(7, 99)
    assert part.num_elements == 92
    assert part.indices.tolist() == [0, 1]
    assert part.values.tolist() == [1, 2]
    assert sent.part(9, 99).indices.size == 0
    assert sent.part(0, 100) is sent
    assert sent.nbytes == 32
