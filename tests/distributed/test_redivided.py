"""A run goes on with another number of processes, with the bits that it would have."""

import pytest
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
