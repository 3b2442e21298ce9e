"""Spans: sums by phase and drive, and names for a profiler; bytes are counted once."""

import threading
import time

import pytest

from jaxinf.transfer import ByteCounts, ByteMeters
from jaxinf.transfer.spans import Timeline


def test_a_drive_that_two_threads_use_is_busy_once():
    timeline, both, meters = Timeline(), threading.Barrier(2), ByteMeters()
    before = meters.snapshot()

    def read():
        with timeline.span("read", drive="/a"):
            both.wait()
            time.sleep(0.05)
        for _ in range(500):
            meters.add(drive_read_bytes=1)

    began_s = time.perf_counter()
    threads = [threading.Thread(target=read) for _ in range(2)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    wall_s = time.perf_counter() - began_s
    busy = timeline.take_busy()
    assert 0.05 <= busy.drives["/a"] <= wall_s
    assert 0.05 <= busy.phases["read"] <= wall_s
    assert timeline.take_busy().drives == {}
    assert meters.snapshot() - before == ByteCounts(drive_read_bytes=1000)


def test_a_profiler_gets_the_names():
    timeline, named = Timeline(), []

    class Annotation:
        def __init__(self, name):
            named.append(name)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            named.append("end")

    timeline.annotate = Annotation
    with pytest.raises(ValueError, match="stop"), timeline.span("fetch"):
        raise ValueError("stop")
    timeline.annotate = None
    timeline.add("program", 1.0, 3.0)
    with timeline.span("fetch"):
        pass
    assert named == ["fetch", "end"]
    assert timeline.take_busy().phases == {"program": 2.0}
