"""`--trace`: what Perfetto opens; and what `metrics.jsonl` says of phases and tiers."""

import gzip
import json

import pytest

MODES = {"update": (), "stream": ("--mode", "stream", "--memory", "64MiB")}


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_a_trace_has_steps_and_what_threads_and_drives_did(run, tmp_path, mode):
    words = ("--store", tmp_path / "s", "--steps", 9, *MODES[mode])
    assert run(*words, "--trace") == 0
    (path,) = (tmp_path / "s-log" / "trace").rglob("perfetto_trace.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = [one["name"] for one in events if one.get("ph") == "X"]
    assert [name for name in names if name == "step"] == ["step"] * 3
    for kind in ("update", "write"):
        assert any(name.startswith(kind) for name in names), kind

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
