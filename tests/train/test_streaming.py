"""Runs in mode stream: like other modes, resumed, on every model, refused."""

import json
import re

import numpy as np
import pytest

STREAM = ("--mode", "stream", "--memory", "256MiB")
FIELDS = ["fetched_drive_bytes", "fetched_memory_bytes", "spilled_memory_bytes"]
FIELDS += ["spilled_drive_bytes", "offloaded_drive_bytes", "offloaded_host_bytes"]
FIELDS += ["prefetch_hit_rate"]
FIELDS += ["waited_params_s", "waited_values_s", "waited_device_s"]
FIELDS += ["waited_updates_s", "dispatched_s"]


@pytest.mark.long
def test_a_run_goes_on_in_other_modes(
    run, losses, lines, uninterrupted, tmp_path, capsys
):
    where = ("--store", tmp_path / "store")
    assert run(*where, *STREAM, "--steps", 2) == 0
    assert "compiling …" in capsys.readouterr().out
    assert run(*where, *STREAM, "--steps", 4) == 0
    assert "resuming at step 2" in capsys.readouterr().out
    assert run(*where, "--mode", "update", "--steps", 6) == 0
    assert run(*where, *STREAM, "--steps", 7) == 0
    log = tmp_path / "store-log"
    np.testing.assert_allclose(losses(log), uninterrupted[:7], rtol=1e-4)
    found = lines(log)
    assert ["stream" in line for line in found] == [True] * 4 + [False] * 2 + [True]
    params = json.loads((tmp_path / "store/jaxinf.json").read_text())["leaves"]
    num_bytes = 4 * sum(np.prod(leaf["shape"], dtype=int) for leaf in params)
    for line in found[:4]:
        missing = {name for name, value in line.items() if value is None}
        assert missing <= {"gradient_norm"}
        streamed = line["stream"]
        assert list(streamed) == FIELDS
        # Each at least once: params may stay in memory between their programs.
        assert num_bytes <= streamed["fetched_drive_bytes"] < 3 * num_bytes
        assert streamed["spilled_memory_bytes"] == num_bytes
        assert streamed["spilled_drive_bytes"] == 0
        assert 0 <= streamed["prefetch_hit_rate"] <= 1
        waited = [streamed[name] for name in FIELDS if name.startswith("waited")]
        assert 0 < sum(waited) <= line["step_s"]


@pytest.mark.long
def test_a_memory_too_small_is_refused_before_a_step(run, tmp_path, capsys):
    words = ("--store", tmp_path / "store", "--mode", "stream", "--steps", 1)
    assert run(*words, "--memory", "64KiB") == 1
    told = capsys.readouterr().err
    assert "--memory: init_fn: leaf wte takes 66372 bytes to make, found 65536" in told
    assert not (tmp_path / "store").exists()
    (works,) = re.findall(r'--memory="(\d+MiB)" works', told)
    assert run(*words, "--memory", works) == 0
