"""`python -m jaxinf.train --distributed` in two processes."""

import json
import signal
from pathlib import Path

import numpy as np
import pytest
from places import LONG
from processes import running

from jaxinf.train.run_file import read_run

TRAINER = ("-m", "jaxinf.train", "--distributed")
SMALL = ("--preset", "nano", "--seq-len", 16, "--batch-size", 4, "--sample-bytes", 0)


def lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def trained(place, name, *arguments):
    place = place / name
    place.mkdir()
    with running(
        place, *SMALL, "--log-dir", place / "logs", *arguments, program=TRAINER
    ) as processes:
        assert processes.wait() == [0, 0], processes
    return lines(place / "logs" / "metrics.jsonl")


def test_all_stop_after_the_step_in_which_one_gets_a_signal(tmp_path):
    store = ("--store", tmp_path / "store")
    logs = tmp_path / "logs"
    arguments = (*SMALL, *store, "--log-dir", logs, "--steps", 2000, "--eval-every", 4)
    with running(tmp_path, *arguments, program=TRAINER) as processes:
        processes.wait_for("step 4: validation")
        processes.all[1].send_signal(signal.SIGTERM)
        assert processes.wait() == [143, 143], processes
        assert "stopped" in processes.output(0), processes
        assert processes.output(1).count("step") == 0, processes
    own = [lines(logs / f"process-0000{n}" / "metrics.jsonl") for n in (0, 1)]
    sums = lines(logs / "metrics.jsonl")
    last = sums[-1]["step"]
    assert [one[-1]["step"] for one in own] == [last, last]
    assert 4 <= last < 2000
    for name in ("tokens", "drive_write_bytes"):
        assert sums[1][name] == sum(one[1][name] for one in own)
    assert sums[-1]["loss"] == own[1][-1]["loss"]
    for number in (0, 1):
        held = read_run(logs / f"process-0000{number}" / "config.toml")
        assert (held.process_id, held.num_processes) == (number, 2)
        assert (held.store, held.log_dir) == (tmp_path / "store", logs)
    run_file = logs / "process-00000" / "config.toml"
    again = trained(tmp_path, "again", "--config", run_file, "--steps", last + 2)
    assert [line["step"] for line in again][-2:] == [last + 1, last + 2]


def test_a_batch_that_does_not_divide_is_refused(tmp_path):
    store = tmp_path / "store"
    arguments = (*SMALL, "--batch-size", 3, "--store", store, "--steps", 1)
    with running(tmp_path, *arguments, program=TRAINER) as processes:
        assert 0 not in processes.wait(), processes
        for output in processes.outputs():
            assert "--batch-size: expected a multiple of the 2 processes" in output
    assert not list(tmp_path.glob("store/**/jaxinf.json"))


@pytest.mark.skipif(not LONG, reason="two runs more; JAXINF_FAULTS=long")
def test_the_losses_are_those_in_memory(tmp_path):
    arguments = ("--steps", 4, "--fsdp")
    near = trained(tmp_path, "near", "--store", tmp_path / "store", *arguments)
    memory = ("--mode", "memory", "--reference", "split")
    plain = trained(tmp_path, "plain", *memory, *arguments)
    found, expected = ([line["loss"] for line in run] for run in (near, plain))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
