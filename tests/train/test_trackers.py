"""Scalars for TensorBoard and Weights & Biases: the metrics', each step once."""

import contextlib
import importlib
import struct
import sys
from collections import defaultdict

import pytest

from jaxinf.train.config import TrainConfig
from jaxinf.train.trackers import tracker


def records(content, begin, block=None):
    """Yields the records of a file of TensorFlow's, or of blocks as LevelDB's log."""
    at, whole = begin, b""
    while at < len(content):
        if block is None:
            (size,) = struct.unpack_from("<Q", content, at)
            if at + size + 16 > len(content):
                return  # cut off
            yield content[at + 12 : at + 12 + size]
            at += size + 16
            continue
        if block - at % block < 7:  # no room for a header
            at += block - at % block
            continue
        size, kind = struct.unpack_from("<HB", content, at + 4)
        whole += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            yield whole
            whole = b""


def read_tensorboard(folder):
    """Steps and values by name, as TensorBoard shows them."""
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    found = defaultdict(list)
    for path in sorted(
        folder.glob("events*"), key=lambda path: path.stat().st_mtime_ns
    ):
        for record in records(path.read_bytes(), 0):
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
    config = TrainConfig(log_dir=tmp_path / "logs", track="tensorboard")
    config.logs.mkdir()

    def write(committed, losses):
        with contextlib.ExitStack() as stack:
            send = tracker(config, config.logs, committed, stack)
            for step, loss in losses:
                send({"step": step, "loss": loss})

    write(0, [(1, 1.0), (2, 2.0), (3, 3.0)])
    write(2, [(3, 30.0), (4, 40.0)])
    found = read_tensorboard(config.logs)
    assert found["loss"] == near([(1, 1.0), (2, 2.0), (3, 30.0), (4, 40.0)])


def test_wandb_offline_has_the_numbers_of_the_metrics(
    run, lines, tmp_path, monkeypatch
):
    pytest.importorskip("wandb")
    proto = importlib.import_module("wandb.proto.wandb_internal_pb2")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logs = tmp_path / "store-log"
    for steps in (3, 5):
        words = ("--store", tmp_path / "store", "--track", "wandb", "--steps", steps)
        assert run(*words) == 0
    found, names = [], set()
    for path in sorted(logs.glob("wandb/offline-run-*/*.wandb")):
        for content in records(path.read_bytes(), 7, 32768):
            record = proto.Record.FromString(content)
            names |= {record.run.run_id} - {""}
            items = {
                item.key or "/".join(item.nested_key): item.value_json
                for item in record.history.item
            }
            if "loss" in items:
                found.append((int(items["_step"]), float(items["loss"])))
    written = [(line["step"], line["loss"]) for line in lines(logs)]
    assert found == near(written)
    assert names == {(logs / "wandb.id").read_text()}  # one run


@pytest.mark.parametrize(
    ("flag", "package"), [("tensorboard", "tensorboardX"), ("wandb", "wandb")]
)
def test_a_missing_package_is_named_before_the_run(
    run, flag, package, tmp_path, monkeypatch, capsys
):
    monkeypatch.setitem(sys.modules, package, None)
    assert run("--store", tmp_path / "store", "--track", flag) == 2
    assert f"pip install 'jaxinf[{flag}]'" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]
