"""Updates of the host: arrays that are refused, and sparse gradients."""

from dataclasses import replace

import numpy as np
import pytest
from csd_contract import ADAMW, SIMPLE, Chunk, assert_same

from jaxinf.compress import SparseGradient
from jaxinf.csd import Rounding, Update, host_kernels, parse_csd
from jaxinf.program import LeafInputs

HOST = parse_csd("host")


def test_arrays_that_a_kernel_does_not_take_are_refused(tmp_path):
    chunk = Chunk(HOST, tmp_path, SIMPLE, 1000).initialise()
    params = chunk.states()[0]

    def run(gradient, out, buffer=chunk.buffer):
        inputs = LeafInputs()
        given = Update(
            chunk.extents, chunk.kernel, gradient, inputs, out, Rounding(0, 0)
        )
        chunk.csd.update(buffer, given)
        return out

    run(params, np.empty(1000, np.float32))
    small = chunk.csd.acquire(4096)
    for arguments in (
        (params[:999], np.empty(1000, np.float32)),
        (params.astype(np.float64), np.empty(1000, np.float32)),
        (params, np.empty(1000, np.float32), small),
        (params.copy(), np.empty(2000, np.float32)[::2]),
    ):
        with pytest.raises(AssertionError):
            run(*arguments)
    before = chunk.states()[1]
    gradient = np.arange(2000, dtype=np.float32)[::2]
    out = run(gradient, np.empty(1000, np.float32))
    np.testing.assert_array_equal(out, -0.5 * (gradient + before / 2))
    small.release()
    chunk.close()


@pytest.mark.parametrize("codec", ["", "int8"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("num", [1, 1023, 1024, 1025, 5000])
def test_a_sparse_gradient_has_the_bits_of_a_dense_one(
    tmp_path, num, dtype, codec, monkeypatch
):
    monkeypatch.setattr(host_kernels, "_PIECE_ELEMENTS", 1024)
    rng = np.random.default_rng(num)
    indices = np.sort(rng.choice(num, min(num, 40), replace=False)).astype(np.int32)
    values = rng.standard_normal(indices.size).astype(dtype)
    dense = np.zeros(num, dtype)
    dense[indices] = values
    case, results = replace(ADAMW, dtype=np.dtype(dtype).type, codec=codec), []
    for gradient in (dense, SparseGradient(indices, values, num)):
        root = tmp_path / f"{len(results)}"
        chunk = Chunk(HOST, root, case, num).initialise()
        outcome, out = chunk.update(gradient=gradient)
        assert outcome.is_finite
        found = chunk.checksums(), outcome.read_checksums
        results.append((found, [out, *chunk.states()]))
        chunk.close()
    (found, arrays), (wanted, expected) = results
    assert found == wanted
    assert_same(arrays, expected)
