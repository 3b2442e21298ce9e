"""Scalars for TensorBoard: the metrics', each step once."""

import contextlib
import struct
import sys
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


@pytest.mark.long
def test_tensorboard_has_the_numbers_of_the_metrics(run, lines, tmp_path):
    pytest.importorskip("tensorboardX")
    words = ["--store", tmp_path / "store", "--track", "tensorboard"]
    for steps in (3, 5):  # the second one resumes
        assert run(*words, "--eval-every", 2, "--steps", steps) == 0
    found = read_tensorboard(tmp_path / "store-log")
    written = lines(tmp_path / "store-log")
    assert found["loss"] == near((line["step"], line["loss"]) for line in written)
    assert [step for step, _ in found["held_out/loss"]] == [0, 2, 3, 4, 5]
    for name, part in (("phases", "program"), ("memory", "host")):
        values = [(line["step"], line[name][part]) for line in written]
        assert found[f"{name}/{part}"] == near(values)


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


def test_a_missing_package_is_named_before_the_run(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    assert run("--store", tmp_path / "store", "--track", "tensorboard") == 2
    assert "pip install 'jaxinf[tensorboard]'" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]
