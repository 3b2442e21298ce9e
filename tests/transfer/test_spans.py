"""Spans: sums by phase and drive, and pieces on demand; bytes are counted once."""

import threading
import time

import pytest

from jaxinf.transfer import ByteCounts, ByteMeters
from jaxinf.transfer.spans import Timeline


def test_a_drive_that_two_threads_use_is_busy_once():
    timeline, both, meters = Timeline(), threading.Barrier(2), ByteMeters()
    before = meters.snapshot()

    def read():
        with timeline.span("read", drive="/a", num_bytes=4):
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
    assert timeline.stop() == []  # nothing was recorded
    assert timeline.take_busy().drives == {}
    assert meters.snapshot() - before == ByteCounts(drive_read_bytes=1000)


def test_what_is_under_way_counts_up_to_now():
    timeline = Timeline()
    with timeline.span("write", drive="/a"):
        time.sleep(0.02)
        assert timeline.take_busy().phases["write"] >= 0.02
    assert timeline.take_busy().phases["write"] < 0.02


def test_spans_are_recorded_from_start_to_stop():
    timeline, named = Timeline(), []

    class Annotation:
        def __init__(self, name):
            named.append(name)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            named.append("end")

    timeline.start(annotate=Annotation)
    with pytest.raises(ValueError, match="stop"), timeline.span("fetch", "h0"):
        raise ValueError("stop")
    timeline.add("program", "forward 0", 1.0, 3.0)
    fetch, program = timeline.stop()
    assert (fetch.kind, fetch.what, named) == ("fetch", "h0", ["fetch", "end"])
    assert fetch.thread == (threading.current_thread().name, threading.get_ident())
    assert 0 < fetch.began_s <= fetch.ended_s <= time.perf_counter()
    assert (program.kind, program.began_s, program.ended_s) == ("program", 1.0, 3.0)
    with timeline.span("fetch"):
        pass
    assert timeline.stop() == []
    assert timeline.take_busy().phases == {"program": 2.0}
