"""Updates of the host: calls that are kept for the next step, and sparse gradients.

The host keeps a call for extents that come as one tuple; a list is checked every time.
"""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from csd_contract import ADAMW, CASES, SIMPLE, Chunk, assert_same
from families import family

from jaxinf.compress import SparseGradient
from jaxinf.csd import Rounding, ScalarInputs, Update, host_kernels, parse_csd
from jaxinf.kernels import KernelCall
from jaxinf.native import toolchain
from jaxinf.transfer import crc32c

HOST = parse_csd("host")
SIZES = [1, 257, 8192, 8193]  # the last takes long enough to release the GIL

pytestmark = pytest.mark.skipif(
    not toolchain.levels(), reason="no compiled kernel runs on this processor"
)


@pytest.fixture
def pair(tmp_path, monkeypatch):
    """Makes equal chunks: one keeps its calls, the other has them checked."""
    made, checked = [], []

    def make(case, num_elements):
        made.extend(
            Chunk(HOST, tmp_path / f"chunk{n}", case, num_elements).initialise()
            for n in range(2)
        )
        made[0].extents = tuple(made[0].extents)
        return made

    def init(self, *arguments, **options):
        checked.append(self)
        original(self, *arguments, **options)

    original = KernelCall.__init__
    monkeypatch.setattr(KernelCall, "__init__", init)
    yield make
    # One chunk makes a call for each of four updates, the other for the first alone.
    assert len(checked) == 5
    for chunk in made:
        chunk.close()


def update(chunk, step, *, tells):
    rng = np.random.default_rng([step, 7])
    gradient = rng.standard_normal(chunk.num_elements).astype(chunk.case.dtype)
    scalars = [np.array(1 + step / 8, d)[()] for d in chunk.kernel.scalar_dtypes]
    out = np.empty(chunk.num_elements, chunk.case.dtype)
    outcome = chunk.csd.update(
        chunk.buffer,
        Update(
            chunk.extents, chunk.kernel, gradient, ScalarInputs(tuple(scalars)), out,
            Rounding(0x9ABCDEF0 + step, 0),
            tells=tells,
        ),
    )  # fmt: skip
    return outcome, out


ROWS = list(product(CASES, SIZES))
SHORT = [(case, num) for case, num in ROWS if num == 8193 or case is SIMPLE]


@pytest.mark.parametrize(("case", "num_elements"), family(ROWS, short=SHORT), ids=str)
def test_bits_and_checksums(pair, case, num_elements):
    chunks = pair(case, num_elements)
    last = len(chunks[0].extents) - 1
    for step, tells in enumerate([range(last + 1), range(last + 1), [last], []]):
        before = [crc32c(state) for state in chunks[0].states()]
        (found, out), (wanted, expected) = [
            update(c, step, tells=tells) for c in chunks
        ]
        assert found == wanted
        assert found.read_checksums == {n: before[n] for n in tells}
        assert_same([out, *chunks[0].states()], [expected, *chunks[1].states()])
        after = [crc32c(state) for state in chunks[0].states()]
        assert chunks[0].checksums() == chunks[1].checksums() == after


def test_an_update_that_repeats_is_checked_like_the_first(tmp_path):
    chunk = Chunk(HOST, tmp_path, SIMPLE, 1000).initialise()
    chunk.extents = tuple(chunk.extents)
    params = chunk.states()[0]

    def run(gradient, out, buffer=chunk.buffer):
        inputs = ScalarInputs()
        given = Update(
            chunk.extents, chunk.kernel, gradient, inputs, out, Rounding(0, 0)
        )
        chunk.csd.update(buffer, given)
        return out

    run(params, np.empty(1000, np.float32))
    small = chunk.csd.acquire(4096)
    for message, arguments in (
        (r"gradient: .*found float32 of shape \(999,\)", (params[:999],)),
        (r"gradient: .*found float64", (params.astype(np.float64),)),
        (r"expects contiguous", (params, np.empty(1000, np.float32), small)),
        (
            r"out: the kernel expects contiguous",
            (params.copy(), np.empty(2000, np.float32)[::2]),
        ),
    ):
        given = arguments if arguments[1:] else (*arguments, np.empty(1000, "f4"))
        with pytest.raises(ValueError, match=message):
            run(*given)
    before = chunk.states()[1]
    gradient = np.arange(2000, dtype=np.float32)[::2]
    out = run(gradient, np.empty(1000, np.float32))
    np.testing.assert_array_equal(out, -0.5 * (gradient + before / 2))
    small.release()
    chunk.close()


# --- sparse gradients --------------------------------------------------------------


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
