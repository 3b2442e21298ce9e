"""Scalars for TensorBoard: the metrics', each step once."""

import contextlib
import struct
from collections import defaultdict

import pytest

from jaxinf.train.metrics import tracker


def records(content):
    """Yields the records of a file of TensorFlow's."""
    at = 0
    while at < len(content):
        (size,) = struct.unpack_from("<Q", content, at)
        yield content[at + 12 : at + 12 + size]
        at += size + 16


def read_tensorboard(folder):
    """Steps and values by name, as TensorBoard shows them."""
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    found = defaultdict(list)
    for path in sorted(
        folder.glob("events*"), key=lambda path: path.stat().st_mtime_ns
    ):
        for record in records(path.read_bytes()):
            event = Event.FromString(record)
            if event.session_log.status == SessionLog.START:
                for points in found.values():
                    points[:] = [one for one in points if one[0] < event.step]
            for value in event.summary.value:
                found[value.tag].append((event.step, value.simple_value))
    return found


def near(points):
    return [(step, pytest.approx(value, rel=1e-6)) for step, value in points]


def test_steps_of_a_killed_run_are_not_doubled(tmp_path):
    pytest.importorskip("tensorboardX")
    logs = tmp_path / "logs"
    logs.mkdir()

    def write(committed, losses):
        with contextlib.ExitStack() as stack:
            send = tracker(logs, committed, stack)
            for step, loss in losses:
                send({"step": step, "loss": loss}, "")

    write(0, [(1, 1.0), (2, 2.0), (3, 3.0)])
    write(2, [(3, 30.0), (4, 40.0)])
    found = read_tensorboard(logs)
    assert found["loss"] == near([(1, 1.0), (2, 2.0), (3, 30.0), (4, 40.0)])
