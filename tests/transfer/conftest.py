import numpy as np
import pytest

from jaxinf.transfer import BufferPool


@pytest.fixture
def aligned():
    """Make page-aligned arrays of any length that hold random bytes."""
    pool = BufferPool(64 << 20)
    buffers = []

    def make(num_bytes, seed=0):
        buffers.append(pool.acquire(num_bytes))
        array = buffers[-1].array
        rng = np.random.default_rng(seed)
        array[:] = rng.integers(1, 256, array.shape[0], np.uint8)
        return array[:num_bytes]

    return make


@pytest.fixture(params=["disk", "tmpfs"])
def any_dir(request):
    """Directories of the test machine's disk and of a tmpfs."""
    return request.getfixturevalue("tmp_path" if request.param == "disk" else "place")
