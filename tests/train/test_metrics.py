"""The metrics file: one line for each step, however the process ended."""

import json

import pytest

from jaxinf.train.metrics import MetricsLog, StepLine


def steps_in(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def write(log_dir, first, last):
    log = MetricsLog(log_dir, first)
    for step in range(first + 1, last + 1):
        log.write(StepLine(step, loss=float(step)))
    log.close()


@pytest.mark.parametrize("rest", ["", '{"step": 3', "\0\0\0", '{"step": null}', "[]"])
@pytest.mark.parametrize("resumed_at", [0, 1, 5])
def test_continues_after_the_committed_step(tmp_path, resumed_at, rest):
    """Also behind what a crash or somebody else has left at the end."""
    path = tmp_path / "metrics.jsonl"
    write(tmp_path, 0, 5)
    path.write_text(path.read_text() + rest)
    write(tmp_path, resumed_at, 7)
    assert steps_in(path) == [1, 2, 3, 4, 5, 6, 7]
    assert '"loss": null' not in path.read_text()
    assert (tmp_path / "metrics.previous.jsonl").exists() == (resumed_at == 0)


def test_line_held_when_killed_is_written_on_resume(tmp_path):
    write(tmp_path, 0, 4)
    log = MetricsLog(tmp_path, 4)
    log.add(StepLine(5, loss=5.5), dict)
    log._lines.close()  # as by a kill, which writes nothing
    write(tmp_path, 5, 6)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert steps_in(tmp_path / "metrics.jsonl") == [1, 2, 3, 4, 5, 6]
    assert json.loads(lines[4])["loss"] == 5.5
    assert not (tmp_path / "metrics.last.json").exists()


def test_held_line_of_an_uncommitted_step_is_dropped(tmp_path):
    log = MetricsLog(tmp_path, 0)
    log.write(StepLine(1))
    log.add(StepLine(2, loss=2.0), dict)
    log.close()
    write(tmp_path, 1, 1)
    assert steps_in(tmp_path / "metrics.jsonl") == [1]


def test_lost_line_is_there_without_its_costs(tmp_path):
    write(tmp_path, 0, 2)
    write(tmp_path, 4, 4)
    path = tmp_path / "metrics.jsonl"
    assert steps_in(path) == [1, 2, 3, 4]
    assert json.loads(path.read_text().splitlines()[3])["loss"] is None
