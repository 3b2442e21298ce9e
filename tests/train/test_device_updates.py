"""Updates that a JAX device computes, in the trainer."""

import numpy as np
import pytest

from jaxinf.engine import requests

pytestmark = pytest.mark.optimized

STREAM = ("--mode", "stream", "--memory", "256MiB", "--steps", 4)


@pytest.mark.long
def test_losses_are_those_of_other_runs(run, losses, tmp_path, monkeypatch, capsys):
    shared = ("--store", tmp_path / "shared", *STREAM, "--device-updates", 2)
    assert run(*shared) == 1
    assert "expected more subgroups that the device can" in capsys.readouterr().err
    monkeypatch.setattr(requests, "LEAST_ELEMENTS", 256)
    assert run(*shared) == 0
    resumed = ("--store", tmp_path / "shared", *STREAM[:-1], 5)
    for other in ("3", "0"):
        assert run(*resumed, "--device-updates", other) == 1
        expected = f"with --device-updates 2, found --device-updates {other}; leave it"
        assert expected in capsys.readouterr().err
    assert run(*resumed) == 0
    assert run("--store", tmp_path / "plain", *STREAM[:-1], 5) == 0
    memory = ("--mode", "memory", "--log-dir", tmp_path / "memory-log", "--steps", 5)
    assert run(*memory) == 0
    found = losses(tmp_path / "shared-log")
    assert found == losses(tmp_path / "plain-log")
    np.testing.assert_allclose(found, losses(tmp_path / "memory-log"), rtol=1e-4)
