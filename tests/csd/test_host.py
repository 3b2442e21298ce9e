"""The host CSD: what is on the drive, in the buffer and in the kernel agree."""

import jax.numpy as jnp
import ml_dtypes
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
    UpdateOutcome,
    initialise_states,
    parse_csd,
)
from jaxinf.errors import StoreIOError
from jaxinf.program import trace_init, trace_update
from jaxinf.transfer import BufferPool, ByteMeters, allocate_file, crc32c

ROUNDING = Rounding(0, 0)
SIZES = [1, 1023, 1024, 1025, 4096, 40_000]


class Chunk:
    """A chunk with master params and a float32 momentum on a drive."""

    def __init__(self, root, num_elements, dtypes=(np.float32, np.float32)):
        self.pool = BufferPool(1 << 20)
        self.meters = ByteMeters()
        self.csd = HostCsd(root, self.pool, self.meters)
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


@pytest.mark.parametrize("num_elements", SIZES)
@pytest.mark.parametrize(
    "dtype", [np.float32, ml_dtypes.bfloat16, np.float16], ids=["f32", "bf16", "f16"]
)
def test_initialise_write_read_update(tmp_path, num_elements, dtype):
    chunk = Chunk(tmp_path, num_elements)
    init, update = kernels(dtype)
    params = np.arange(num_elements).astype(dtype)
    initialise_states(
        chunk.csd, chunk.buffer, chunk.extents, init, params, ScalarInputs(), ROUNDING
    )
    chunk.move("write")
    for view in chunk.views():
        view[...] = np.nan
    chunk.move("read")
    master, momentum = chunk.views()
    np.testing.assert_array_equal(master, params.astype(np.float32))
    np.testing.assert_array_equal(momentum, 0)

    gradient = np.full(num_elements, 2, dtype)
    out = np.empty(num_elements, dtype)
    outcome = chunk.csd.update(
        chunk.buffer,
        Update(chunk.extents, update, gradient, ScalarInputs(), out, ROUNDING),
    )
    assert outcome == UpdateOutcome(is_finite=True)
    wanted = params.astype(np.float32) - 1
    np.testing.assert_array_equal(master, wanted)
    np.testing.assert_array_equal(momentum, 2)
    is_update = dtype == np.float32
    np.testing.assert_array_equal(out, -1 if is_update else wanted.astype(dtype))

    gradient[num_elements // 2] = np.inf
    outcome = chunk.csd.update(
        chunk.buffer,
        Update(chunk.extents, update, gradient, ScalarInputs(), out, ROUNDING),
    )
    assert outcome == UpdateOutcome(is_finite=False)


@pytest.mark.parametrize("num_elements", SIZES)
def test_counts_whole_pages(tmp_path, num_elements):
    chunk = Chunk(tmp_path, num_elements, (np.float32, ml_dtypes.bfloat16, np.int8))
    chunk.move("write")
    chunk.move("read")
    moved = sum(-(-num_elements * size // 4096) * 4096 for size in (4, 2, 1))
    counts = chunk.meters.snapshot()
    assert (counts.drive_read_bytes, counts.drive_write_bytes) == (moved, moved)


def test_parts_of_a_chunk(tmp_path):
    chunk = Chunk(tmp_path, 8192)
    master, _ = chunk.views()
    master[...] = np.arange(8192)
    chunk.move("write")
    second = Extent(np.dtype(np.float32), 4096, 4 * 4096, 8 * 4096)
    chunk.csd.read([Transfer(chunk.buffer, second, chunk.files[0])])
    view = chunk.csd.view(chunk.buffer, second)
    np.testing.assert_array_equal(view, np.arange(4096, 8192))


def test_checksums_in_the_updates_own_pass(tmp_path):
    chunk = Chunk(tmp_path, 5000)
    init, update = kernels()
    params, gradient = np.arange(5000, dtype=np.float32), np.ones(5000, np.float32)
    initialise_states(
        chunk.csd, chunk.buffer, chunk.extents, init, params, ScalarInputs(), ROUNDING
    )
    before = [crc32c(view) for view in chunk.views()]
    assert [chunk.csd.checksum(chunk.buffer, e) for e in chunk.extents] == before
    chunk.move("write")
    chunk.move("read")
    assert chunk.csd.checksum(chunk.buffer, chunk.extents[1]) is None

    assert chunk.csd.checksum(chunk.buffer, chunk.extents[0]) is None
    arguments = (chunk.extents, update, gradient, ScalarInputs())
    out = np.empty(5000, np.float32)
    given = Update(*arguments, out, ROUNDING, tells=[1])
    outcome = chunk.csd.update(chunk.buffer, given)
    assert outcome.read_checksums == {1: before[1]}  # what was asked for
    after = [crc32c(view) for view in chunk.views()]
    assert after != before
    assert [chunk.csd.checksum(chunk.buffer, e) for e in chunk.extents] == after


def test_params_of_the_caller_in_and_out(tmp_path):
    chunk = Chunk(tmp_path, 700)
    init, update = kernels()
    params, gradient = np.arange(700, dtype=np.float32), np.ones(700, np.float32)
    initialise_states(
        chunk.csd,
        chunk.buffer,
        chunk.extents,
        init,
        params * 0,
        ScalarInputs(),
        ROUNDING,
    )
    out = np.empty(700, np.float32)
    outcome = chunk.csd.update(
        chunk.buffer,
        Update(
            chunk.extents, update, gradient, ScalarInputs(), out, ROUNDING,
            given=params,
        ),
    )  # fmt: skip
    assert outcome.read_checksums == {0: crc32c(params)}
    np.testing.assert_array_equal(out, np.full(700, np.float32(-0.5)))
    np.testing.assert_array_equal(chunk.views()[0], params + out)


@pytest.mark.parametrize("num_elements", [1000, 20_000])
@pytest.mark.parametrize("is_given", [False, True])
def test_an_update_that_repeats_has_the_bits_of_the_first(
    tmp_path, num_elements, is_given
):
    """Over the same extents, later ones reuse what the first has worked out."""
    init, update = kernels()
    params = np.arange(num_elements, dtype=np.float32)
    gradient = np.linspace(-1, 1, num_elements, dtype=np.float32)
    chunk, found = Chunk(tmp_path, num_elements), []
    extents = tuple(chunk.extents)
    for _ in range(2):
        buffer = chunk.csd.acquire(chunk.buffer.num_bytes)
        initialise_states(
            chunk.csd, buffer, extents, init, params, ScalarInputs(), ROUNDING
        )
        out = np.empty(num_elements, np.float32)
        outcome = chunk.csd.update(
            buffer,
            Update(
                extents, update, gradient, ScalarInputs(), out, ROUNDING,
                given=params if is_given else None, tells=[1],
            ),
        )  # fmt: skip
        sums = [chunk.csd.checksum(buffer, extent) for extent in extents]
        views = [chunk.csd.view(buffer, extent) for extent in extents]
        assert sums == [crc32c(view) for view in views]
        found.append((outcome, sums, out.tobytes()))
    assert found[0] == found[1]
    assert found[0][0].read_checksums.keys() == ({0, 1} if is_given else {1})


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
    before = chunk.views()[1].copy()
    out = run(gradient.copy(), np.empty(2000, np.float32)[::2])
    np.testing.assert_array_equal(out, -0.5 * (gradient + before / 2))


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
    with pytest.raises(StoreIOError, match="nowhere"):
        HostCsd(tmp_path / "nowhere", chunk.pool, chunk.meters)


def test_info(tmp_path):
    info = Chunk(tmp_path, 1).csd.info()
    assert info.kind == "host"
    assert info.kind in CSD_KINDS
    assert info.root == tmp_path
    assert 0 < info.free_bytes <= info.total_bytes


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
