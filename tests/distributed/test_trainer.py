"""`python -m jaxinf.train --distributed`, in two processes, and in one on the mesh."""

import json
import re
import signal
from pathlib import Path

import pytest
from families import LONG
from processes import ran, running

from jaxinf.train.run_file import read_run_file

pytestmark = pytest.mark.optimized("long")

TRAINER = ("-m", "jaxinf.train")
SMALL = ("--seq-len", 16, "--batch-size", 4)
SMALL += ("--data", Path(__file__).with_name("test_deaths.py"))
STREAM = ("--mode", "stream", "--memory", "64MiB")
FIRST = ("", "process-00000")
"""The folder of the first process's logs, if it is alone, or one of several."""

TINY = {"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 16}
TINY |= {"n_positions": 16, "vocab_size": 257}


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    file = tmp_path_factory.mktemp("model") / "config.json"
    file.write_text(json.dumps(TINY))
    return ("--preset", file, *SMALL)


def trained(place, name, *arguments, count=2, num_devices=1, evaluations=(1,)):
    """Trains to the last step; returns the lines of the first process."""
    place = place / name
    place.mkdir()
    options = {"program": TRAINER, "count": count, "num_devices": num_devices}
    arguments = ("--log-dir", place / "logs", *arguments)
    processes = ran(place, *arguments, **options)
    said = processes.output(0)
    assert said.count("validation loss") in evaluations, processes
    assert f"jaxinf report {place}/logs{'/process-*' * (count > 1)}\n" in said
    assert not re.search("inspect .*process-", said), processes
    return lines(place / "logs" / FIRST[count > 1] / "metrics.jsonl")


@pytest.mark.parametrize("mode", [(), (*STREAM, "--fsdp")], ids=["update", "stream"])
def test_all_stop_after_the_step_in_which_one_gets_a_signal(small, tmp_path, mode):
    """The run goes on then; all its losses have the bits of one process's."""
    store = ("--store", tmp_path / "store")
    logs = tmp_path / "logs"
    arguments = (*small, *store, *mode, "--log-dir", logs, "--steps", 2000)
    arguments += ("--eval-every", 4)
    with running(tmp_path, *arguments, program=TRAINER) as processes:
        processes.wait_for("step 4: validation")
        processes.all[1].send_signal(signal.SIGTERM)
        assert processes.wait() == [143, 143], processes
        assert "stopped" in processes.output(0), processes
        assert "step " not in processes.output(1), processes
    own = [lines(logs / f"process-0000{n}" / "metrics.jsonl") for n in (0, 1)]
    last = own[0][-1]["step"]
    assert 4 <= last == own[1][-1]["step"] < 2000
    assert own[0][-1]["loss"] == own[1][-1]["loss"]
    for number in (0, 1):
        held = read_run_file(logs / f"process-0000{number}" / "config.toml")
        assert held.distributed.split(",")[1:] == ["2", str(number)]
        assert (held.store, held.log_dir) == (tmp_path / "store", logs)
    run_file = logs / "process-00000" / "config.toml"
    # At the end; and at a fourth step, or at first if the best step was the last one.
    kept = ("--config", run_file, "--steps")
    again = trained(tmp_path, "again", *kept, last + 2, evaluations=(1, 2))
    assert [line["step"] for line in again][-2:] == [last + 1, last + 2]
    more = trained(tmp_path, "more", *kept, last + 3, evaluations=(1, 2))
    assert [line["step"] for line in more][-1:] == [last + 3]
    if mode or LONG:
        one = (*small, "--store", tmp_path / "one", *mode, "--steps", last + 2)
        expected = trained(tmp_path, "alone", *one, count=1, num_devices=2)
        found = [line["loss"] for line in own[0] + again[-2:]]
        assert [line["loss"] for line in expected] == found


def test_an_export_beside_several_processes_is_refused(small, tmp_path):
    """One of a checkpoint of all members can be made beside the run."""
    store, export = tmp_path / "store", ("--export-to", f"file://{tmp_path}/out")
    arguments = (*small, "--store", store, "--checkpoint-every", 4, *export)
    with running(tmp_path, *arguments, program=TRAINER) as processes:
        assert set(processes.wait()) == {1}, processes
        assert "jaxinf checkpoint export" in processes.output(0), processes
    assert not [*store.glob("process-*/jaxinf.json")]


@pytest.mark.long
@pytest.mark.timeout(1200)  # four runs, of which each starts JAX and compiles
@pytest.mark.parametrize(
    "mode", [("--fsdp",), (*STREAM, "--fsdp")], ids=["update", "stream"]
)
def test_elastic_runs_have_the_losses_of_one(small, tmp_path, mode):
    """On as many devices, in two processes, in one, and in two again."""
    whole = trained(
        tmp_path, "whole", *small, *mode, "--steps", 6, "--store", tmp_path / "one"
    )
    found = []
    for name, count, last in (("a", 2, 2), ("b", 1, 4), ("c", 2, 6)):
        arguments = (*small, *mode, "--steps", last, "--store", tmp_path / "store")
        options = {"count": count, "num_devices": 2 // count}
        found += trained(tmp_path, name, *arguments, "--elastic", **options)
    losses = [{s["step"]: s["loss"] for s in one} for one in (found, whole)]
    assert losses[0] == losses[1]
