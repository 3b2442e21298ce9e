"""A run goes on with another number of processes, with the bits that it would have."""

import shutil

import pytest
from killed_division import contents
from processes import losses, run_alone, running

from jaxinf.cli.commands import main


@pytest.mark.parametrize(
    "layout", [pytest.param("fsdp", marks=pytest.mark.long), "mixed"]
)
def test_losses_go_on(alone, tmp_path, layout):
    path, expected = tmp_path / "run", losses(alone("--layout", layout, "--steps", 6))
    words, found = (path, "--layout", layout), {}
    with running(tmp_path, *words, "--steps", 2) as processes:
        assert processes.wait() == [0, 0], processes
        found |= losses(processes.output(0))
    with running(tmp_path, *words, "--more", 1, count=1) as processes:
        assert processes.wait() != [0]
        assert "jaxinf store rebalance" in processes.output(0)
    assert main(["store", "rebalance", str(path), "--processes", "1"]) == 0
    found |= losses(run_alone(*words, "--more", 2, num_devices=2))
    options = ("--options", '{"processes": "rebalance"}')
    with running(tmp_path, *words, "--more", 2, *options) as processes:
        assert processes.wait() == [0, 0], processes
        found |= losses(processes.output(0))
    assert found == expected
    assert len(found) == 6
    assert main(["verify", str(path)]) == 0


@pytest.mark.long
def test_a_run_is_made_again_from_an_export(alone, tmp_path):
    path, made = tmp_path / "run", tmp_path / "made"
    expected = losses(alone("--layout", "mixed", "--steps", 6))
    with running(tmp_path, path, "--layout", "mixed", "--steps", 2) as processes:
        assert processes.wait() == [0, 0], processes
    url = f"file://{tmp_path}/export"
    assert main(["checkpoint", "export", str(path), url]) == 0
    shutil.rmtree(path / "process-00001")  # a drive is lost
    assert main(["checkpoint", "import", str(made), url]) == 0
    assert main(["store", "rebalance", str(made), "--processes", "2"]) == 0
    with running(tmp_path, made, "--layout", "mixed", "--more", 4) as processes:
        assert processes.wait() == [0, 0], processes
        found = losses(processes.output(0))
    assert found == {step: expected[step] for step in range(2, 6)}


@pytest.mark.long
def test_a_mesh_that_cuts_chunks_is_refused(tmp_path):
    """The members are divided by then; a rebalance takes that back, no bit is lost."""
    path, words = tmp_path / "run", ("--layout", "fsdp")
    with running(tmp_path, path, *words, "--steps", 2) as processes:
        assert processes.wait() == [0, 0], processes
    expected = contents(path)
    options = ("--options", '{"processes": "rebalance"}')
    with running(tmp_path, path, *words, "--more", 1, *options, count=4) as processes:
        assert 0 not in processes.wait(), processes
        assert any("run on a mesh whose shards" in o for o in processes.outputs())
    assert contents(path) == expected
    assert main(["store", "rebalance", str(path), "--processes", "2"]) == 0
    assert contents(path) == expected
