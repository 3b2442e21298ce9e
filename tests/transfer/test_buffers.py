import threading
import time

import numpy as np
import pytest

from jaxinf.errors import StoreClosedError
from jaxinf.transfer import PAGE_BYTES, BufferPool, huge_page_ceil, huge_page_floor

PAGE = 4096


def rss_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * PAGE


def start(target):
    thread = threading.Thread(target=target)
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("num_bytes", "rounded"), [(0, 4096), (1, 4096), (4096, 4096), (4097, 8192)]
)
def test_buffers_are_whole_aligned_pages(num_bytes, rounded):
    with BufferPool(1 << 20).acquire(num_bytes) as buffer:
        assert (buffer.num_bytes, buffer.array.shape) == (rounded, (rounded,))
        assert buffer.array.dtype == np.uint8
        assert buffer.array.ctypes.data % PAGE_BYTES == 0
        buffer.array[:] = 255
    for name in ("array", "address"):  # native code would write to another's memory
        with pytest.raises(AttributeError):
            getattr(buffer, name)


def test_long_buffers_are_whole_huge_pages_within_their_share():
    # Beyond 4 MiB huge pages would at first add nearly a half.
    rounded = {1: PAGE, (4 << 20) - 1: 4 << 20, (4 << 20) + 1: (4 << 20) + PAGE}
    rounded |= dict.fromkeys((8_306_688, 8_355_840), 8 << 20)
    assert {num_bytes: huge_page_ceil(num_bytes) for num_bytes in rounded} == rounded
    for limit in (PAGE, 5000, 3 << 20, (4 << 20) - 1, 9_300_000):
        most = huge_page_floor(limit)
        assert 0 < most <= limit
        assert all(huge_page_ceil(n) <= most for n in (most, most - 1, most * 9 // 10))


def test_accounting():
    pool = BufferPool(5 * PAGE + 1)
    assert pool.capacity_bytes == 5 * PAGE
    first, second = pool.acquire(2 * PAGE), pool.acquire(3 * PAGE)
    assert pool.used_bytes == 5 * PAGE
    assert pool.try_acquire(1) is None
    address = first.array.ctypes.data
    first.release()
    first.release()
    assert pool.used_bytes == 3 * PAGE
    with pool.acquire(2 * PAGE) as again:
        assert again.array.ctypes.data == address  # released memory is used again
    second.release()
    assert (pool.used_bytes, pool.peak_bytes) == (0, 5 * PAGE)
    pool.resize(2 * PAGE - 1)
    assert pool.capacity_bytes == PAGE


def test_impossible_requests():
    pool = BufferPool(2 * PAGE)
    with pytest.raises(ValueError, match=r"8193 .* budget of 8192; .* at least 12288"):
        pool.acquire(2 * PAGE + 1)


def test_a_waiter_gets_what_is_released():
    pool = BufferPool(PAGE)
    held, got = pool.acquire(1), []
    thread = start(lambda: got.append(pool.acquire(1)))
    time.sleep(0.02)
    assert not got
    held.release()
    thread.join()
    got[0].release()
    assert pool.used_bytes == 0


def test_close_wakes_waiters_and_refuses_more():
    pool = BufferPool(PAGE)
    held, errors = pool.acquire(1), []

    def wait():
        with pytest.raises(StoreClosedError, match="closed while 4096 bytes were aske"):
            pool.acquire(1)
        errors.append(1)

    threads = [start(wait) for _ in range(3)]
    time.sleep(0.02)
    pool.close()
    pool.close()
    for thread in threads:
        thread.join()
    assert len(errors) == 3
    held.array[:] = 1  # a lent buffer outlives the close
    held.release()
    with pytest.raises(StoreClosedError):
        pool.try_acquire(1)


def test_resident_memory_stays_within_the_capacity():
    capacity = 64 << 20
    pool, before, stale = BufferPool(capacity), rss_bytes(), []
    for num_bytes in [60 << 20, 33 << 20, 20 << 20, 64 << 20, 5 << 20, 48 << 20]:
        with pool.acquire(num_bytes) as buffer:
            buffer.array[:] = 1
            stale.append(buffer.array)  # even where a view is kept against the rules
            assert rss_bytes() - before < capacity + (4 << 20)
    pool.close()
    assert rss_bytes() - before < 4 << 20


def test_idle_memory_is_freed():
    pool, before = BufferPool(64 << 20), rss_bytes()
    held = pool.acquire(8 << 20)
    with pool.acquire(32 << 20) as buffer:
        held.array[:] = buffer.array[:] = 1
    pool.free_idle()
    assert rss_bytes() - before < 12 << 20
    assert (held.array == 1).all()


def huge_ranges():
    """Where this process has asked for huge pages: first and last address."""
    ranges, where = [], (0, 0)
    with open("/proc/self/smaps") as file:
        for line in file:
            first, *rest = line.split()
            if "-" in first:
                where = tuple(int(address, 16) for address in first.split("-"))
            elif first == "VmFlags:" and "hg" in rest:
                ranges.append(where)
    return ranges


def test_short_buffers_lie_in_huge_pages_and_are_freed_one_by_one():
    pool, length, before = BufferPool(8 << 20), 256 << 10, rss_bytes()
    buffers = [pool.acquire(length) for _ in range(32)]
    ranges = huge_ranges()
    huge = [b for b in buffers if any(s <= b.address < e for s, e in ranges)]
    assert len(huge) >= 32 - 8  # mapped 1, 1, 2, 4, 8 … together: the first are not
    assert pool.used_bytes == 32 * length
    for buffer in buffers:
        buffer.array[:] = 7
    kept = buffers.pop(20)  # beside others of one mapping
    for buffer in buffers:
        buffer.release()
    with pool.acquire((8 << 20) - length) as whole:
        whole.array[:] = 1
        assert rss_bytes() - before < 12 << 20
        assert (kept.array == 7).all()
    with pool.acquire(length) as again:
        again.array[:] = 2
    assert (kept.array == 7).all()
