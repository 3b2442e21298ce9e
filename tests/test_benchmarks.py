"""Tiny runs of the benchmarks print the promised figures; no time is checked."""

import json
import shutil

import bench_gpu
import jax.numpy as jnp
import pytest
from late_copies import LateCopies
from run_scripts import figures, run_script


def bench_update(directory, *arguments):
    common = ["--store", directory, "--params", 20_000, "--reps", 2, "--steps", 2]
    return run_script("bench_update.py", *common, "--json", *arguments)


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "read_bytes", "write_bytes"),
    [
        ([], 0, 12),
        (["--params-dtype", "bf16", "--state", "int8"], 0, 6),
        (["--csd", "emulated"], 12, 12),
        (["--params-dtype", "bf16", "--csd", "emulated"], 12, 12),
        (["--params-dtype", "bf16", "--state", "int8", "--master", "none"], 0, 4),
        (["--state", "bf16"], 0, 8),
        (["--average", "bf16"], 0, 14),
    ],
)
def test_update_moves_what_it_says(tmp_path, options, read_bytes, write_bytes):
    """State that stays in memory is not read; that of cards does not stay there."""
    found = figures(bench_update(tmp_path, "--fio-seconds", 0, *options))
    padding = 5 * 4096 / 20_000
    assert 0 <= found["drive_read_bytes_per_param"] - read_bytes <= padding
    assert 0 <= found["drive_write_bytes_per_param"] - write_bytes <= padding
    for name in ("mparam_per_s", "step_s", "floor_mparam_per_s", "ratio_to_floor"):
        assert found[name] > 0
    assert {"rss_over_caller_bytes", "cpu_cores", "commit_s"} <= found.keys()
    assert found["cpu_user_ms"] > 0 <= found["cpu_system_ms"]
    assert {*found["floors_s"]} == {"loop, carried", "loop, split"}
    assert not [*tmp_path.iterdir()]


@pytest.mark.long
@pytest.mark.parametrize("clip_norm", [0, 1])
def test_train_compares(tmp_path, clip_norm):
    done = run_script(
        "bench_train.py", "--store", tmp_path, "--preset", "nano", "--batch-size", 1,
        "--seq-len", 16, "--reps", 1, "--steps", 1, "--clip-norm", clip_norm, "--json",
    )  # fmt: skip
    found = figures(done)
    low, high = found["ratio_interval"]
    assert 0 < low <= found["ratio"] <= high
    assert found["max_loss_difference"] < 1e-5


@pytest.mark.long
def test_memory_is_that_of_the_budget(tmp_path):
    options = ["--params", 4_000_000, "--durability", 1, "--json"]
    rows = figures(run_script("bench_memory.py", "--store", tmp_path, *options))
    shares = [row["hit_share"] for row in rows]
    assert shares == sorted(shares)
    assert rows[-1]["read_bytes"] == 0 < rows[0]["read_bytes"]


@pytest.mark.long
def test_the_kernel_is_timed():
    done = run_script("bench_kernel.py", "--elements", 1000, "--json")
    assert figures(done)["melements_per_s"] > 0


@pytest.mark.long
def test_stream_compares_with_a_step_of_smart_update(tmp_path):
    done = run_script(
        "bench_stream.py", "--store", tmp_path, "--preset", "nano", "--batch-size", 1,
        "--seq-len", 16, "--reps", 2, "--memory", "64MiB", "--json",
    )  # fmt: skip
    found = figures(done)
    assert found["pairs"] == 2
    assert found["update_step_s"] > 0
    for policy in ("recompute", "keep"):
        own = found[policy]
        low, high = own["ratio_interval"]
        assert 0 < low <= own["ratio"] <= high
        assert own["dispatch_share"] > 0
        # Beside 20 bytes a param: the master, once to update and twice to compute.
        assert 1 < own["bytes_ratio"] <= 32 / 20
    assert not [*tmp_path.iterdir()]


def bench_peers(directory, *arguments):
    common = ["--store", directory, "--preset", "nano", "--batch-size", 1]
    common += ["--seq-len", 16, "--memory", "64MiB", "--turns", 2, "--what"]
    return run_script("bench_peers.py", *common, *arguments)


@pytest.mark.long
def test_peers_run_in_turns(tmp_path):
    found = figures(bench_peers(tmp_path, "update", "--json"))
    ours, eights, memory = (found[n] for n in ("jaxinf", "jaxinf, int8", MEMORY))
    assert ours["step_s_ratio"] == 1
    for one, moved in ((ours, (0, 12)), (eights, (0, 6)), (memory, (0, 0))):
        assert one["turns"] == 2
        assert one["params"] == ours["params"]
        low, high = one["step_s_spread"]
        assert 0 < low <= one["step_s"] <= high
        assert one["peak_bytes"] > 4 * 4 * one["params"]
        counted = one["read_bytes"], one["written_bytes"]
        assert counted == pytest.approx(moved, abs=0.5)  # with the manifest's bytes
    assert not [*tmp_path.iterdir()]


MEMORY = "optax in memory"


@pytest.mark.long
@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
def test_update_runs_fio(tmp_path):
    found = figures(bench_update(tmp_path, "--fio-seconds", 0.2, "--reps", 1))
    assert any(name.startswith("fio ") for name in found["floors_s"])


@pytest.mark.long
def test_gpu_times_every_way_that_there_is(tmp_path):
    options = ["--only", "link", "--megabytes", 1, "--reps", 1]
    done = run_script("bench_gpu.py", "--store", tmp_path, *options)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["parts"]["link"]["result"]
    pageable = {"pageable_to_device", "pageable_to_host"}
    assert pageable | {"pinned_to_device", "pinned_to_host", "pinned_both"} <= {*found}


def test_gpu_measures_registered_memory(monkeypatch):
    late = LateCopies(monkeypatch)
    values = jnp.ones(1 << 18)
    pinned = values.sharding.with_memory_kind("pinned_host")
    found = bench_gpu.registered(values, pinned, 1)
    assert found.keys() == {"register", "registered_to_device", "registered_both"}
    late.settle()
    assert not late.registered
    ways = {(one.source, one.target, one.num_copies) for one in late.copies}
    assert ways == {("registered", "device", 1), ("device", "pinned_host", 1)}


@pytest.mark.long
def test_gpu_stops_at_nothing(tmp_path):
    """Parts that take too long, or find no store, are noted."""
    out = tmp_path / "result.json"
    options = ["--only", "link", "bits", "--limit", 0.01, "--out", out]
    done = run_script("bench_gpu.py", "--store", tmp_path, *options)
    assert done.returncode == 0, done.stderr
    parts = json.loads(out.read_text())["parts"]
    assert [*parts] == ["link", "bits"]
    assert all("took too long" in one["error"] for one in parts.values())
    assert [*tmp_path.iterdir()] == [out]


@pytest.mark.long
@pytest.mark.timeout(900)  # five programs, each of which compiles a step
def test_gpu_compares_runs(tmp_path):
    options = ["--only", "bits", "--limit", 400]
    done = run_script("bench_gpu.py", "--store", tmp_path, *options)
    assert done.returncode == 0, done.stderr
    [bits] = json.loads(done.stdout)["parts"].values()
    assert bits["result"]["same"]
    assert [len(one) for one in bits["result"]["losses"].values()] == [6, 6, 6]
