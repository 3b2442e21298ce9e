import threading

from jaxinf.transfer import ByteCounts, ByteMeters


def test_differences_of_snapshots():
    meters = ByteMeters()
    meters.add(drive_read_bytes=5, link_up_bytes=1)
    before = meters.snapshot()
    meters.add(drive_read_bytes=2, drive_write_bytes=3, link_down_bytes=4)
    assert meters.snapshot() - before == ByteCounts(2, 3, 4, 0)
    assert before == ByteCounts(drive_read_bytes=5, link_up_bytes=1)


def test_threads_lose_no_count():
    meters = ByteMeters()

    def count():
        for _ in range(500):
            meters.add(drive_write_bytes=1)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert meters.snapshot().drive_write_bytes == 2000
