"""The host CSD: what is on the drive, in the buffer and in the kernel agree."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxinf.csd import (
    CSD_KINDS,
    Extent,
    HostCsd,
    Rounding,
    ScalarInputs,
    Transfer,
    Update,
    initialise_states,
    parse_csd,
)
from jaxinf.errors import StoreIOError
from jaxinf.program import trace_init, trace_update
from jaxinf.transfer import BufferPool, ByteMeters, allocate_file

ROUNDING = Rounding(0, 0)
SIZES = [1, 1023, 1024, 1025, 4096, 40_000]


class Chunk:
    """A chunk with master params and a float32 momentum on a drive."""

    def __init__(self, root, num_elements, dtypes=(np.float32, np.float32)):
        self.pool = BufferPool(1 << 20)
        self.meters = ByteMeters()
        self.csd = HostCsd(self.pool, self.meters)
        self.files, self.extents, offset = [], [], 0
        for number, dtype in enumerate(dtypes):
            dtype = np.dtype(dtype)
            pages = -(-num_elements * dtype.itemsize // 4096)
            self.files.append(root / f"state{number}")
            allocate_file(self.files[-1], pages * 4096, pages * 4096)
            self.extents.append(Extent(dtype, num_elements, 0, offset))
            offset += pages * 4096
        self.buffer = self.csd.acquire(offset)
        assert self.buffer is not None
        assert self.buffer.num_bytes == offset

    def move(self, action):
        for extent, file in zip(self.extents, self.files, strict=True):
            getattr(self.csd, action)([Transfer(self.buffer, extent, file)])

    def views(self):
        return [self.csd.view(self.buffer, extent) for extent in self.extents]


def kernels(dtype=np.float32):
    tx = optax.sgd(0.5, momentum=0.5)
    params = {"w": jnp.ones((4,), dtype)}
    init = trace_init(tx, params).leaves[0].kernel
    return init, trace_update(tx, params, {}).leaves[0].kernel


def test_parts_of_a_chunk(tmp_path):
    chunk = Chunk(tmp_path, 8192)
    master, _ = chunk.views()
    master[...] = np.arange(8192)
    chunk.move("write")
    second = Extent(np.dtype(np.float32), 4096, 4 * 4096, 8 * 4096)
    chunk.csd.read([Transfer(chunk.buffer, second, chunk.files[0])])
    view = chunk.csd.view(chunk.buffer, second)
    np.testing.assert_array_equal(view, np.arange(4096, 8192))


def test_an_update_that_repeats_is_checked_like_the_first(tmp_path):
    init, update = kernels()
    chunk = Chunk(tmp_path, 1000)
    extents, params = tuple(chunk.extents), np.ones(1000, np.float32)
    initialise_states(
        chunk.csd, chunk.buffer, extents, init, params, ScalarInputs(), ROUNDING
    )

    def run(gradient, out, buffer=chunk.buffer):
        inputs = ScalarInputs()
        given = Update(extents, update, gradient, inputs, out, ROUNDING)
        chunk.csd.update(buffer, given)
        return out

    run(params, np.empty(1000, np.float32))
    with pytest.raises(ValueError, match=r"gradient: the kernel expects shape"):
        run(params[:999], np.empty(1000, np.float32))
    with pytest.raises(TypeError, match=r"gradient: the kernel expects float32"):
        run(params.astype(np.float64), np.empty(1000, np.float32))
    with pytest.raises(ValueError, match=r"expects shape"):
        run(params, np.empty(1000, np.float32), chunk.csd.acquire(4096))
    before = chunk.views()[1].copy()
    gradient = np.arange(2000, dtype=np.float32)[::2]
    out = run(gradient, np.empty(1000, np.float32))
    np.testing.assert_array_equal(out, -0.5 * (gradient + before / 2))
    with pytest.raises(ValueError, match="out: the kernel expects contiguous memory"):
        run(gradient.copy(), np.empty(2000, np.float32)[::2])


def test_never_waits_for_memory(tmp_path):
    chunk = Chunk(tmp_path, 4096)
    assert chunk.csd.acquire(chunk.pool.capacity_bytes) is None
    chunk.buffer.release()
    chunk.buffer.release()
    rest = chunk.csd.acquire(chunk.pool.capacity_bytes)
    assert rest is not None
    rest.release()
    assert chunk.pool.used_bytes == 0


def test_errors_name_the_file(tmp_path):
    chunk = Chunk(tmp_path, 4096)
    chunk.files[0].unlink()
    with pytest.raises(StoreIOError, match=r"state0: read at byte 0 failed"):
        chunk.move("read")
    with pytest.raises(StoreIOError, match=r"state0: write at byte 0 failed"):
        chunk.move("write")


def test_kinds_have_names():
    assert all(parse_csd(kind).kind == kind for kind in CSD_KINDS)
    for text, message in (
        ("gpu", "csd='gpu': expected one of 'host'"),
        ("host:buffers=1", "buffers: expected no option"),
        ("emulated:drive=1GB/s", "drive: expected buffers"),
        ("emulated:buffers=0", "buffers=0: expected a number of subgroups"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_csd(text)
