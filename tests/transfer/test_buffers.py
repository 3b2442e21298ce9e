import threading
import time

import numpy as np
import pytest

from jaxinf.errors import StoreClosedError
from jaxinf.transfer import PAGE_BYTES, BufferPool

_PAGE = 4096


def _rss_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * _PAGE


def _start(target):
    thread = threading.Thread(target=target)
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("num_bytes", "rounded"), [(0, 4096), (1, 4096), (4096, 4096), (4097, 8192)]
)
def test_buffers_are_whole_aligned_pages(num_bytes, rounded):
    with BufferPool(1 << 20).acquire(num_bytes) as buffer:
        assert buffer.num_bytes == rounded
        assert buffer.array.shape == (rounded,)
        assert buffer.array.dtype == np.uint8
        assert buffer.array.ctypes.data % PAGE_BYTES == 0
        buffer.array[:] = 255


def test_accounting():
    pool = BufferPool(5 * _PAGE + 1)
    assert pool.capacity_bytes == 5 * _PAGE
    first, second = pool.acquire(2 * _PAGE), pool.acquire(3 * _PAGE)
    assert pool.used_bytes == 5 * _PAGE
    assert pool.acquire(1, block=False) is None
    first.release()
    first.release()
    assert pool.used_bytes == 3 * _PAGE
    second.release()
    assert (pool.used_bytes, pool.peak_bytes) == (0, 5 * _PAGE)


def test_released_memory_is_reused():
    pool = BufferPool(4 * _PAGE)
    with pool.acquire(100) as buffer:
        address = buffer.array.ctypes.data
    with pool.acquire(200) as buffer:
        assert buffer.array.ctypes.data == address


def test_a_released_buffer_cannot_be_used():
    with BufferPool(_PAGE).acquire(1) as buffer:
        pass
    with pytest.raises(ValueError, match="used after its release"):
        _ = buffer.array


def test_impossible_requests():
    pool = BufferPool(2 * _PAGE)
    with pytest.raises(ValueError, match=r"8193 .* budget of 8192; .* at least 12288"):
        pool.acquire(2 * _PAGE + 1)
    with pytest.raises(ValueError, match="buffer of -1 bytes"):
        pool.acquire(-1)
    with pytest.raises(ValueError, match="a budget of 4095 bytes holds no page"):
        BufferPool(4095)


def test_a_waiter_gets_what_is_released():
    pool = BufferPool(_PAGE)
    held, got = pool.acquire(1), []
    thread = _start(lambda: got.append(pool.acquire(1)))
    time.sleep(0.02)
    assert not got
    held.release()
    thread.join()
    got[0].release()
    assert pool.used_bytes == 0


def test_close_wakes_waiters_and_refuses_more():
    pool = BufferPool(_PAGE)
    held, errors = pool.acquire(1), []

    def wait():
        try:
            pool.acquire(1)
        except StoreClosedError as error:
            errors.append(str(error))

    threads = [_start(wait) for _ in range(3)]
    time.sleep(0.02)
    pool.close()
    pool.close()
    for thread in threads:
        thread.join()
    assert len(errors) == 3
    assert "closed while 4096 bytes were asked for; open the store again" in errors[0]
    held.array[:] = 1  # a lent buffer outlives the close
    held.release()
    with pytest.raises(StoreClosedError):
        pool.acquire(1, block=False)


def test_resident_memory_stays_within_the_capacity():
    capacity = 64 << 20
    pool = BufferPool(capacity)
    before = _rss_bytes()
    stale = []
    for num_bytes in [60 << 20, 33 << 20, 20 << 20, 64 << 20, 5 << 20, 48 << 20]:
        with pool.acquire(num_bytes) as buffer:
            buffer.array[:] = 1
            stale.append(buffer.array)  # even where a view is kept against the rules
            assert _rss_bytes() - before < capacity + (4 << 20)
    pool.close()
    assert _rss_bytes() - before < 4 << 20


def test_idle_memory_is_freed():
    pool, before = BufferPool(64 << 20), _rss_bytes()
    held = pool.acquire(8 << 20)
    with pool.acquire(32 << 20) as buffer:
        held.array[:] = buffer.array[:] = 1
    pool.free_idle()
    assert _rss_bytes() - before < 12 << 20
    assert (held.array == 1).all()


def _huge_ranges():
    """Where this process has asked for huge pages: first and last address."""
    ranges, where = [], (0, 0)
    with open("/proc/self/smaps") as file:
        for line in file:
            first, *rest = line.split()
            if "-" in first:
                start, end = first.split("-")
                where = int(start, 16), int(end, 16)
            elif first == "VmFlags:" and "hg" in rest:
                ranges.append(where)
    return ranges


def test_short_buffers_lie_in_huge_pages():
    pool, length = BufferPool(64 << 20), 64 * _PAGE
    buffers = [pool.acquire(length) for _ in range(64)]
    ranges = _huge_ranges()
    num_huge = sum(
        any(start <= buffer.address < end for start, end in ranges)
        for buffer in buffers
    )
    assert num_huge >= 64 - 8  # mapped 1, 1, 2, 4, 8 … together: the first are not
    assert pool.used_bytes == 64 * length


def test_short_buffers_are_freed_one_by_one():
    """Others beside them stay, with their contents."""
    pool, length = BufferPool(8 << 20), 256 << 10
    before = _rss_bytes()
    buffers = [pool.acquire(length) for _ in range(32)]
    for buffer in buffers:
        buffer.array[:] = 7
    kept = buffers.pop(20)  # beside others of one mapping
    for buffer in buffers:
        buffer.release()
    with pool.acquire((8 << 20) - length) as whole:
        whole.array[:] = 1
        assert _rss_bytes() - before < 12 << 20
        assert (kept.array == 7).all()
    with pool.acquire(length) as again:
        again.array[:] = 2
    assert (kept.array == 7).all()
