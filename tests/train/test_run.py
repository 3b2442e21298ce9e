"""Whole runs: both modes, stopping and resuming, what a user reads."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

import jaxinf

from .conftest import lines, losses

KEYS = (
    "step, loss, tokens, step_s, update_s, drive_read_bytes, drive_write_bytes, "
    "link_down_bytes, link_up_bytes, rss_bytes"
).split(", ")


def test_modes_agree(run, tmp_path):
    common = ("--steps", 30, "--warmup-steps", 5)
    assert run("--mode", "memory", *common, "--log-dir", tmp_path / "memory") == 0
    assert run("--store", tmp_path / "store", *common) == 0
    memory, update = losses(tmp_path / "memory"), losses(tmp_path / "store-log")
    np.testing.assert_allclose(memory, update, rtol=1e-4)
    assert update[-1][1] < update[0][1] - 0.5


def test_metrics_of_update(run, tmp_path):
    assert run("--store", tmp_path / "store", "--steps", 5) == 0
    found = lines(tmp_path / "store-log")
    assert [line["step"] for line in found] == [1, 2, 3, 4, 5]
    num_params = sum(
        np.prod(leaf["shape"], dtype=int)
        for leaf in json.loads((tmp_path / "store/jaxinf.json").read_text())["leaves"]
    )
    for line in found:
        assert list(line) == KEYS
        assert None not in line.values()
        assert line["tokens"] == 16
        assert 0 < line["update_s"] < line["step_s"]
        assert line["link_down_bytes"] == line["link_up_bytes"] == 4 * num_params
        assert line["drive_write_bytes"] >= 12 * num_params
        assert line["rss_bytes"] > 1 << 20


def test_metrics_of_memory(run, tmp_path):
    assert run("--mode", "memory", "--steps", 2, "--log-dir", tmp_path / "log") == 0
    for line in lines(tmp_path / "log"):
        assert list(line) == KEYS
        assert line["update_s"] is None
        assert line["drive_read_bytes"] == line["link_up_bytes"] == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_stopped_and_resumed_is_uninterrupted(run, tmp_path, capsys, dtype):
    common = ("--param-dtype", dtype, "--warmup-steps", 4)
    assert run("--store", tmp_path / "whole", "--steps", 10, *common) == 0
    assert run("--store", tmp_path / "parts", "--steps", 4, *common) == 0
    capsys.readouterr()
    assert run("--store", tmp_path / "parts", "--steps", 10, *common) == 0
    assert "resuming at step 4" in capsys.readouterr().out
    assert losses(tmp_path / "parts-log") == losses(tmp_path / "whole-log")


def test_finished_run_reports_again(run, tmp_path, capsys):
    words = ("--store", tmp_path / "store", "--steps", 3)
    assert run(*words) == 0
    before = losses(tmp_path / "store-log")
    first = capsys.readouterr().out
    assert run(*words) == 0
    again = capsys.readouterr().out
    assert "already at step 3" in again
    report = first[first.index("validation loss") :].split("store  ")[0]
    assert report in again
    assert losses(tmp_path / "store-log") == before
    assert run(*words[:-1], 2) == 0
    assert "already at step 3, nothing to train: --steps is 2" in capsys.readouterr().out


def test_report(run, tmp_path, capsys):
    store = tmp_path / "a store"
    assert run("--store", store, "--steps", 4, "--eval-every", 2) == 0
    out = capsys.readouterr().out
    assert f"jaxinf inspect {shlex.quote(str(store))}" in out
    assert re.search(r"validation loss \d\.\d+ nats a byte", out)
    assert "worse than the bigram: train for more steps" in out
    assert re.search(r"store .*: step 4, [\d.]+ KiB on disk", out)
    assert "step 2: validation loss" in out
    evals = (tmp_path / "a store-log/validation.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in evals] == [2, 4]
    config = json.loads((tmp_path / "a store-log/config.json").read_text())
    assert config["steps"] == 4
    assert config["store"] == str(store)


def test_plain_output_has_no_control_characters(run, tmp_path, capsys):
    binary = tmp_path / "binary.dat"
    binary.write_bytes(np.random.default_rng(0).integers(0, 32, 5000, np.uint8))
    assert run("--store", tmp_path / "store", "--steps", 3, data=binary) == 0
    out = capsys.readouterr().out
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", out)


def test_commit_says_where_in_the_data(run, tmp_path):
    assert run("--store", tmp_path / "store", "--steps", 3) == 0
    with jaxinf.open_store(tmp_path / "store") as store:
        payload = store.payload
    assert payload["step"] == 3
    assert payload["tokens"] == 48
    assert payload["settings"]["seed"] == 0
    assert len(payload["data"]["sha256"]) == 64


def test_metrics_of_uncommitted_steps_are_dropped(run, tmp_path):
    assert run("--store", tmp_path / "whole", "--steps", 6) == 0
    assert run("--store", tmp_path / "parts", "--steps", 4) == 0
    metrics = tmp_path / "parts-log/metrics.jsonl"
    committed = lines(tmp_path / "parts-log")
    extra = json.dumps(committed[-1] | {"step": 5, "loss": 99.0})
    metrics.write_text(metrics.read_text() + extra + '\n{"step": 6, "lo')
    assert run("--store", tmp_path / "parts", "--steps", 6) == 0
    assert losses(tmp_path / "parts-log") == losses(tmp_path / "whole-log")


def test_other_log_dir_on_resume_starts_there(run, tmp_path):
    assert run("--store", tmp_path / "store", "--steps", 2) == 0
    log = tmp_path / "other"
    assert run("--store", tmp_path / "store", "--steps", 4, "--log-dir", log) == 0
    assert [step for step, _ in losses(log)] == [3, 4]


def test_new_run_keeps_the_previous_metrics(run, tmp_path):
    log = tmp_path / "log"
    assert run("--mode", "memory", "--steps", 2, "--log-dir", log) == 0
    assert run("--mode", "memory", "--steps", 1, "--log-dir", log) == 0
    assert len(lines(log)) == 1
    assert len((log / "metrics.previous.jsonl").read_text().splitlines()) == 2


# --- optimizers and options -----------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ("adam", "--schedule", "cosine"),
        ("sgd", "--learning-rate", "0.1"),
        ("sgd", "--learning-rate", "0.1", "--momentum", "0", "--clip-norm", "0"),
        ("lion", "--learning-rate", "3e-4", "--weight-decay", "0.5"),
        ("adagrad", "--learning-rate", "0.05", "--warmup-steps", "0"),
    ],
    ids=" ".join,
)
def test_optimizers_agree_in_both_modes(run, tmp_path, words):
    common = ("--optimizer", *words, "--steps", 5)
    assert run("--mode", "memory", *common, "--log-dir", tmp_path / "memory") == 0
    assert run("--store", tmp_path / "store", *common) == 0
    memory, update = losses(tmp_path / "memory"), losses(tmp_path / "store-log")
    np.testing.assert_allclose(memory, update, rtol=1e-4)


def test_csd_roots(run, tmp_path):
    roots = [tmp_path / "d0", tmp_path / "d1"]
    for root in roots:
        root.mkdir()
    words = ("--store", tmp_path / "store", "--csd-root", roots[0])
    words += ("--csd-root", roots[1], "--memory-bytes", "64MiB")
    assert run(*words, "--steps", 2) == 0
    assert run(*words, "--steps", 3) == 0
    assert all(list(root.glob("jaxinf-*")) for root in roots)


# --- non-finite gradients -------------------------------------------------------------

# A learning rate at which the second step's gradient is not finite.
EXPLODING = ("--optimizer", "sgd", "--learning-rate", "1e38", "--clip-norm", "0")
EXPLODING += ("--warmup-steps", "0", "--steps", "4")


@pytest.mark.parametrize("mode", ["memory", "update"])
def test_nonfinite_error(run, tmp_path, capsys, mode):
    place = ("--store", tmp_path / "store") if mode == "update" else ()
    log = tmp_path / "log"
    assert run("--mode", mode, *place, *EXPLODING, "--log-dir", log) == 1
    err = capsys.readouterr().err
    assert "NaN or Inf in" in err
    assert "Traceback" not in err
    assert [step for step, _ in losses(log)] == [1]


@pytest.mark.parametrize("mode", ["memory", "update"])
def test_nonfinite_skip(run, tmp_path, capsys, mode):
    place = ("--store", tmp_path / "store") if mode == "update" else ()
    log = tmp_path / "log"
    words = ("--mode", mode, *place, *EXPLODING, "--nonfinite", "skip")
    assert run(*words, "--log-dir", log) == 0
    assert "step 2: skipped" in capsys.readouterr().out
    assert [step for step, _ in losses(log)] == [1, 2, 3, 4]
    if mode == "update":  # only step 1 was committed: the others are tried again
        assert run(*words, "--log-dir", log) == 0
        assert "resuming at step 1" in capsys.readouterr().out
        assert [step for step, _ in losses(log)] == [1, 2, 3, 4]


# --- refusals -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("--seed", 1), "--seed: the run has 0, this command 1"),
        (("--batch-size", 3), "--batch-size: the run has 2, this command 3"),
        (("--seq-len", 7), "--seq-len: the run has 8, this command 7"),
        (("--preset", "small"), "--preset: the run has nano, this command small"),
        (("--optimizer", "adam"), "--optimizer: the run has adamw, this command adam"),
        (("--dtype", "bfloat16"), "--dtype: the run has float32, this command bfl"),
    ],
)
def test_resume_with_other_settings_is_refused(
    run, tmp_path, capsys, change, expected
):
    words = ("--store", tmp_path / "store")
    assert run(*words, "--steps", 2) == 0
    before = losses(tmp_path / "store-log")
    assert run(*words, "--steps", 4, *change) == 1
    err = capsys.readouterr().err
    assert expected in err
    assert "at step 2" in err
    assert "another --store" in err
    assert losses(tmp_path / "store-log") == before


def test_resume_with_other_data_is_refused(run, tmp_path, capsys):
    assert run("--store", tmp_path / "store", "--steps", 2) == 0
    other = tmp_path / "other.txt"
    other.write_text("something else entirely\n" * 100)
    assert run("--store", tmp_path / "store", "--steps", 4, data=other) == 1
    assert re.search(r"--data: the run has [\d,]+ bytes", capsys.readouterr().err)


def test_resume_says_what_changes_from_here(run, tmp_path, capsys):
    assert run("--store", tmp_path / "store", "--steps", 2) == 0
    words = ("--steps", 3, "--learning-rate", "1e-3")
    assert run("--store", tmp_path / "store", *words) == 0
    expected = "changed from here on: learning_rate 0.003 -> 0.001"
    assert expected in capsys.readouterr().out


def test_resume_of_another_programs_store_is_refused(run, tmp_path, capsys):
    assert run("--store", tmp_path / "store", "--steps", 2) == 0
    slot = (tmp_path / "store/current").resolve()
    record = json.loads((slot / "commit.json").read_text())
    (slot / "commit.json").write_text(json.dumps(record | {"payload": None}))
    assert run("--store", tmp_path / "store", "--steps", 3) == 1
    assert "another program made it" in capsys.readouterr().err


def test_locked_store(run, tmp_path, capsys):
    assert run("--store", tmp_path / "store", "--steps", 1) == 0
    with jaxinf.open_store(tmp_path / "store"):
        assert run("--store", tmp_path / "store", "--steps", 2) == 1
    err = capsys.readouterr().err
    assert "only writer" in err
    assert "Traceback" not in err


def test_failing_drive_is_one_message(run, tmp_path, capsys, monkeypatch):
    from jaxinf.store import StoreDirectory

    def fail(*_):
        raise jaxinf.StoreSpaceError("/mnt: no room left at all")

    monkeypatch.setattr(StoreDirectory, "prepare_write", fail)
    assert run("--store", tmp_path / "store", "--steps", 3) == 1
    err = capsys.readouterr().err
    assert err == "jaxinf.train: /mnt: no room left at all\n"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), "--store: expected a directory"),
        (("--store", "s", "--steps", 0), "--steps: expected at least 1, got 0"),
        (("--store", "s", "--seq-len", 17), "--seq-len: expected at most 16"),
        (("--store", "s", "--optimizer", "sgd"), "--learning-rate: expected"),
        (("--store", "s", "--momentum", "0.5"), "--momentum: --optimizer adamw"),
        (("--mode", "memory", "--store", "s"), "--store: --mode memory keeps nothing"),
        (("--mode", "memory", "--memory-bytes", "1GiB"), "--memory-bytes: --mode mem"),
        (("--store", "s", "--log-dir", "s/log"), "--log-dir"),
        (("--store", "s", "--csd-root", "/nowhere"), "CSD root /nowhere"),
        (("--store", "s", "--learning-rate", "nan"), "--learning-rate: expected more"),
    ],
)
def test_usage_errors(run, tmp_path, capsys, monkeypatch, words, expected):
    monkeypatch.chdir(tmp_path)
    assert run(*words) == 2
    err = capsys.readouterr().err
    assert expected in err
    assert not list(tmp_path.glob("s*"))


@pytest.mark.parametrize(
    "words",
    [
        ("--preset", "tiny"),
        ("--mode", "stream"),
        ("--optimizer", "adamax"),
        ("--memory-bytes", "much"),
        ("--compress", "top_k:0.01"),
        ("--steps", "ten"),
    ],
    ids=" ".join,
)
def test_unknown_values_exit_2(run, tmp_path, capsys, words):
    with pytest.raises(SystemExit) as status:
        run("--store", tmp_path / "store", *words)
    assert status.value.code == 2
    assert words[0] in capsys.readouterr().err


def test_data_that_matches_nothing(run, tmp_path, capsys):
    assert run("--store", tmp_path / "s", data=tmp_path / "no/*.txt") == 2
    assert "found no file" in capsys.readouterr().err
    short = tmp_path / "short.txt"
    short.write_text("abc")
    assert run("--store", tmp_path / "s", data=short) == 2
    assert "name more text" in capsys.readouterr().err


def test_help_is_complete(capsys):
    from jaxinf.train.__main__ import main

    with pytest.raises(SystemExit) as status:
        main(["--help"])
    assert status.value.code == 0
    text = capsys.readouterr().out
    assert "None" not in text
    for word in ("--store DIR", "--csd-root DIR", "512MiB", "standard library"):
        assert word in text


# --- signals --------------------------------------------------------------------------

SLOW = """
import sys, time
from jaxinf_models import PRESETS, GPT2Config
PRESETS["nano"] = GPT2Config(256, 16, num_layers=1, num_heads=2, num_features=16)
from jaxinf.train import evaluate, loop
from jaxinf.train.__main__ import main
quick = evaluate.batch
def batch(*arguments):
    time.sleep(0.05)
    return quick(*arguments)
loop.batch = batch
sys.exit(main())
"""


@pytest.fixture
def start(text, tmp_path):
    """Starts the trainer in a process of its own, 50 ms a step."""
    processes = []

    def call(*words):
        fixed = ["--data", text, "--batch-size", 2, "--seq-len", 8, "--sample-bytes", 8]
        fixed += ["--store", tmp_path / "store"]
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(SLOW), *map(str, [*fixed, *words])],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"COLUMNS": "200"},
        )
        processes.append(process)
        return process

    yield call
    for process in processes:
        process.kill()
        process.communicate()


def wait_for_steps(log_dir, num_steps):
    deadline = time.monotonic() + 60
    metrics = log_dir / "metrics.jsonl"
    while time.monotonic() < deadline:
        if metrics.exists() and len(metrics.read_text().splitlines()) >= num_steps:
            return
        time.sleep(0.02)
    raise AssertionError(f"{num_steps} steps were not done in 60 s")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_commits_and_resumes(start, run, tmp_path, number):
    process = start("--steps", 1000)
    wait_for_steps(tmp_path / "store-log", 5)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert f"{number.name}: finishing this step" in out
    step = int(re.search(r"stopped after step (\d+) of 1000", out)[1])
    command = shlex.split(out.strip().splitlines()[-1])
    assert command[:3] == ["python", "-m", "jaxinf.train"]
    assert command[command.index("--store") + 1] == str(tmp_path / "store")

    with jaxinf.open_store(tmp_path / "store") as store:
        assert store.step == store.payload["step"] == step
    assert run("--store", tmp_path / "store", "--steps", step + 3) == 0
    assert run("--store", tmp_path / "whole", "--steps", step + 3) == 0
    assert losses(tmp_path / "store-log") == losses(tmp_path / "whole-log")


def test_killed_run_has_each_line_once(start, run, tmp_path):
    process = start("--steps", 1000)
    wait_for_steps(tmp_path / "store-log", 5)
    process.kill()
    process.communicate(timeout=60)
    with jaxinf.open_store(tmp_path / "store") as store:
        step = store.step
    assert run("--store", tmp_path / "store", "--steps", step + 2) == 0
    assert run("--store", tmp_path / "whole", "--steps", step + 2) == 0
    assert losses(tmp_path / "store-log") == losses(tmp_path / "whole-log")


def test_second_signal_ends_at_once(start, tmp_path):
    process = start("--steps", 1000)
    wait_for_steps(tmp_path / "store-log", 2)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode in (0, 143)  # 0 where both arrived as one
