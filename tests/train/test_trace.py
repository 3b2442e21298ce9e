"""`--trace`: what Perfetto opens; and what `metrics.jsonl` says of phases and tiers."""

import json
import math
from collections import defaultdict

import pytest

MODES = {"update": (), "stream": ("--mode", "stream", "--memory", "64MiB")}


def checked(path):
    """Reads a trace as Perfetto does; returns spans by process and track."""
    document = json.loads(path.read_text())
    names, tracks, by_number = {}, defaultdict(list), defaultdict(list)
    for event in document["traceEvents"]:
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        match event["ph"]:
            case "M":
                key = event["pid"], event["tid"] if "thread" in event["name"] else 0
                names[key] = event["args"]["name"]
            case "C":
                assert all(value >= 0 for value in event["args"].values())
            case "X":
                assert math.isfinite(event["ts"])
                assert event["dur"] >= 0
                place = names[event["pid"], 0], names[event["pid"], event["tid"]]
                tracks[place].append(event)
                by_number[event["tid"]].append(event)
            case other:
                raise AssertionError(other)
    for spans in by_number.values():  # several threads may have one name
        _check_nested(spans)
    return document, tracks


def _check_nested(spans):
    """Spans of a track lie apart or one in the other, or Perfetto drops some."""
    open_ends = []
    for span in sorted(spans, key=lambda one: (one["ts"], -one["dur"])):
        while open_ends and open_ends[-1] <= span["ts"] + 0.2:
            open_ends.pop()
        end = span["ts"] + span["dur"]
        assert not open_ends or end <= open_ends[-1] + 0.2  # us; times are rounded
        open_ends.append(end)


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_a_trace_has_steps_threads_drives_and_programs(run, tmp_path, mode):
    words = ("--store", tmp_path / "s", "--steps", 4, *MODES[mode])
    assert run(*words, "--trace", "3:4") == 0
    document, tracks = checked(tmp_path / "s-log" / "trace.json")
    assert document["otherData"] == {"version": 1, "steps": [3, 4]}
    steps = tracks["threads", "steps"]
    assert [one["name"] for one in steps] == ["step 3", "step 4"]
    drives = {
        name: spans for (process, name), spans in tracks.items() if process == "drives"
    }
    assert all(name.startswith(f"{tmp_path / 's'}: ") for name in drives)
    on_drive = [one for spans in drives.values() for one in spans]
    assert {one["cat"] for one in on_drive} == {"read", "write"}
    assert all(one["args"]["bytes"] > 0 for one in on_drive)
    names = " ".join(one["name"] for spans in tracks.values() for one in spans)
    assert "h0/attn/qkv/kernel" in names
    kinds = {one.get("cat") for spans in tracks.values() for one in spans}
    assert kinds >= {"read", "update", "write", "commit", "checksum"}
    programs = tracks.get(("JAX device", "programs"), ())
    assert bool(programs) == (mode == "stream")
    commits = [
        one["ts"] + one["dur"]
        for spans in tracks.values()
        for one in spans
        if one["name"].startswith("publish")
    ]
    assert max(commits) >= steps[-1]["ts"]  # the last step's commit, too

    lines = (tmp_path / "s-log" / "metrics.jsonl").read_text().splitlines()
    for line in map(json.loads, lines):
        phases, memory = line["phases"], line["memory"]
        assert {*phases} >= {"read", "update", "write", "wait", "program", "commit"}
        assert all(seconds >= 0 for seconds in phases.values())
        assert phases["program"] <= line["step_s"] + 1e-3
        assert phases["update"] > 0
        assert all(0 <= share <= 1 for share in line["drives"].values())
        assert memory["host"] == line["rss_bytes"]
        assert memory["buffers"] > 0
        assert memory["drives"] > 0
    assert {*line["drives"]} == {str(tmp_path / "s")}


def test_no_steps_named_are_three_early_ones(run, tmp_path):
    words = ("--mode", "memory", "--log-dir", tmp_path, "--steps", 8)
    assert run(*words, "--trace") == 0
    document, _ = checked(tmp_path / "trace.json")
    assert document["otherData"]["steps"] == [3, 4, 5]
    (line, *_) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["phases"]["program"] > 0
    assert json.loads(line)["drives"] == {}


@pytest.mark.parametrize("words", ["3", "5:3", "0:2", "1:1000000"])
def test_what_are_no_steps_is_refused(run, tmp_path, words, capsys):
    with pytest.raises(SystemExit) as ended:
        run("--mode", "memory", "--log-dir", tmp_path, "--trace", words)
    assert ended.value.code == 2
    assert "expected" in capsys.readouterr().err
