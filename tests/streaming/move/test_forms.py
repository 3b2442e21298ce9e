"""Values in fewer bits: precision, the same bits with and without machine code."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxinf.io.buffers import aligned
from jaxinf.io.pages import page_ceil
from jaxinf.native import block_codes
from jaxinf.streaming.move.mover import Mover, drive_threads
from jaxinf.streaming.move.scratch import Scratch, raw_bytes
from jaxinf.streaming.move.tensors import Evicted
from jaxinf.streaming.plan.forms import PART_BYTES, Coding, coding_of, stored_bytes

pytestmark = pytest.mark.optimized("long")

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
LENGTHS = [1, 255, 256, 257, 65_536, 65_537, 200_001]


def normal(count, dtype=np.float32):
    return np.random.default_rng(count).standard_normal(count).astype(dtype)


def stored(coding, values):
    """Returns the bytes on a drive, in memory aligned as there."""
    out = aligned(coding.stored_bytes(values.nbytes))
    out = out[: coding.stored_bytes(values.nbytes)]
    assert coding.encode(raw_bytes(values), out, start=0)
    return out


def there_and_back(coding, values):
    back = np.empty_like(values)
    coding.decode(stored(coding, values), raw_bytes(back))
    return back


@pytest.mark.parametrize("count", LENGTHS)
def test_bf16_is_the_nearest(count):
    values = normal(count)
    coding = Coding("bf16", values.dtype, 0)
    assert coding.stored_bytes(values.nbytes) == 2 * count
    back = there_and_back(coding, values)
    np.testing.assert_array_equal(back, values.astype(BFLOAT16).astype(np.float32))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16, np.float64])
@pytest.mark.parametrize("count", LENGTHS)
def test_int8_rounds_to_either_neighbour(dtype, count):
    values = normal(count, dtype)
    coding = Coding("int8", np.dtype(dtype), 7)
    assert coding.stored_bytes(values.nbytes) == count + 4 * -(-count // 256)
    back = there_and_back(coding, values).astype(np.float64)
    exact = values.astype(np.float64)
    starts = range(0, count, 256)
    largest = np.repeat(np.maximum.reduceat(np.abs(exact), starts), 256)[:count]
    # The first decade has 64 numbers; the next one up is at most so far away.
    assert (np.abs(back - exact) <= (0.9 / 64 + 2**-8) * largest).all()
    if count > 60_000:
        assert abs(np.mean(back - exact)) < 1e-3  # rounding is unbiased
        assert np.linalg.norm(back - exact) < 0.02 * np.linalg.norm(exact)


@pytest.mark.parametrize("count", LENGTHS)
@pytest.mark.parametrize("scale", [1.0, 1e-38])
@pytest.mark.parametrize("is_signed", [True, False])
def test_machine_code_and_numpy_have_the_same_bits(
    count, scale, is_signed, monkeypatch
):
    values = normal(count) * np.float32(scale)
    values = values if is_signed else np.abs(values)
    coding = Coding("int8", values.dtype, 2**31 + 5)
    compiled = stored(coding, values)
    decoded = there_and_back(coding, values)
    assert block_codes.function() is not None
    monkeypatch.setattr(block_codes, "function", lambda: None)
    np.testing.assert_array_equal(stored(coding, values), compiled)
    np.testing.assert_array_equal(there_and_back(coding, values), decoded)


def test_a_run_is_coded_alike_wherever_it_begins():
    values = normal(4096)
    coding = Coding("int8", values.dtype, 3)
    second = values[2048:]
    out = aligned(coding.stored_bytes(second.nbytes))
    out = out[: coding.stored_bytes(second.nbytes)]
    assert coding.encode(raw_bytes(second), out, start=second.nbytes)
    back = np.empty_like(second)
    coding.decode(out, raw_bytes(back))
    np.testing.assert_array_equal(back, there_and_back(coding, values)[2048:])


@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        (None, np.float32),
        ("bf16", np.int32),
        ("bf16", BFLOAT16),
        ("bf16", np.float16),
        ("int8", np.bool_),
        ("int8", np.int64),
        ("int8", ml_dtypes.float8_e4m3fn),
        ("int8", np.complex64),
    ],
)
def test_other_values_stay_as_they_are(form, dtype):
    assert coding_of(form, np.dtype(dtype), 0) is None


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan, -3e38])
def test_a_part_that_has_no_codes_is_exact(tmp_path, bad):
    """Such as masked scores; the parts beside it are coded."""
    count = 2 * PART_BYTES // 4 + 300
    values = normal(count)
    values[5] = bad
    coding = Coding("int8", values.dtype, 1)
    scratch = Scratch([tmp_path])
    place = scratch.allocate(values.nbytes, coding)
    assert place.num_bytes == stored_bytes(values.nbytes, coding)
    assert place.memory_bytes == page_ceil(values.nbytes)
    mover = Mover(drive_threads(1), has_link=False, read_bytes=place.memory_bytes)
    first = PART_BYTES // 4

    def through(given):
        mover.evict(Evicted("a", value=jnp.array(given), scratch=scratch, place=place))
        mover.wait_evicted("a")
        mover.prefetch("a")
        back = np.array(mover.get("a"))
        mover.release("a")
        counts = mover.take_counts()
        assert counts.num_written_bytes == counts.num_read_bytes
        return back, counts.num_written_bytes

    back, num_bytes = through(values)
    np.testing.assert_array_equal(back[:first], values[:first])
    assert 0 < np.linalg.norm(back[first:] - values[first:]) < 20
    assert num_bytes == PART_BYTES + coding.stored_bytes(values.nbytes - PART_BYTES)
    values[5] = 1.0  # what was found out about a part holds for one write
    back, num_bytes = through(values)
    assert 0 < np.linalg.norm(back[:first] - values[:first]) < 20
    assert num_bytes == coding.stored_bytes(values.nbytes)
    mover.close()
    scratch.close()
