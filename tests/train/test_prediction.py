"""`plan.json`, and what is said of it at the end or when steps are slow."""

import json
import re
from concurrent.futures import Future

import pytest

from jaxinf.cli import main
from jaxinf.train.config import TrainConfig
from jaxinf.train.forecast import Forecast, RunPlan
from jaxinf.train.metrics import StepLine
from jaxinf.train.prediction import Prediction
from jaxinf.train.sizes import Sizes

SIZES = Sizes(10, 1 << 20, 1 << 20, 0, 4096, 8192)


def predicted(step_s, **phases):
    found = Forecast(SIZES, 1.0, phases, step_s, "drives", (), None)
    made = Future()
    made.set_result(RunPlan(TrainConfig(), SIZES, found=found))
    return Prediction(made)


def add(prediction, count, step_s, **phases):
    for number in range(count):
        prediction.add(StepLine(number + 1, step_s=step_s, phases=phases))


def test_slow_steps_are_one_warning_that_names_the_part(caplog):
    prediction = predicted(1.0, programs=0.6, update=0.1, state=0.3)
    slow = {"program": 0.7, "update": 0.1, "read": 0.4, "write": 0.4}
    add(prediction, 49, 1.4, **slow)
    add(prediction, 1, 1.2, **slow)  # within 30 %
    add(prediction, 49, 1.4, **slow)
    assert not caplog.records
    add(prediction, 60, 1.4, **slow)
    (record,) = caplog.records
    said = record.getMessage()
    assert "50 steps took 1.4 s each, 1 s were predicted" in said
    assert "slower than predicted is drives: 0.8 s, not 0.3" in said


def test_faster_steps_are_no_warning(caplog):
    add(predicted(1.0, update=1.0), 60, 0.1, update=0.1)
    assert not caplog.records


def test_the_end_says_predicted_and_found():
    prediction = predicted(0.5, update=0.5)
    assert len(prediction.lines()) == 1  # no step was made
    add(prediction, 5, 0.4)
    time, drives, memory = prediction.lines()
    assert time == "time    predicted 0.5 s a step, found 0.4 (-20 %)"
    assert "predicted 4.00 KiB read and 8.00 KiB written a step, found" in drives
    assert "predicted at most 1.00 MiB beside the process" in memory


def test_the_end_says_what_a_step_that_commits_takes():
    prediction = predicted(0.5, update=0.5)
    for number in range(1, 13):
        # The third commits, and the one after it waits for that.
        took_s = {0: 0.5, 1: 0.9}.get(number % 3, 0.4)
        commit_s = 0.6 if number % 3 == 0 else None
        prediction.add(StepLine(number, step_s=took_s, commit_s=commit_s))
    assert prediction.lines()[1] == "        0.9 s a step that commits (median)"


@pytest.mark.long
@pytest.mark.parametrize("mode", ["update", "stream"])
def test_a_run_begins_with_its_plan(mode, run, text, tiny, tmp_path, capsys):
    more = ("--mode", mode, "--memory", "64MiB")
    assert run("--store", tmp_path / "s", "--steps", 3, *more) == 0
    document = json.loads((tmp_path / "s-log" / "plan.json").read_text())
    said = capsys.readouterr().out
    words = ["plan", "--data", text, "--batch-size", 2, "--seq-len", 8, "--json", *more]
    with tiny():
        assert main([*map(str, words)]) == 0
    assert document.pop("version") == 1
    assert document.pop("first_step") == 1
    assert document.pop("num_steps") == 3
    assert document == json.loads(capsys.readouterr().out)
    assert "nothing predicted without --machine" in said
    assert re.search(r"predicted (at most )?\S+ \w+ read and .* found", said)
