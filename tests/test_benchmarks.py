"""Tiny runs of the benchmarks print the promised figures; no time is checked."""

import itertools
import json
import shutil
import subprocess
import tempfile

import gpu_parts
import jax.numpy as jnp
import pytest
from bench_peers import DriveLimit
from late_copies import LateCopies
from run_scripts import figures, run_script


def bench_update(directory, *arguments):
    common = ["--store", directory, "--params", 20_000, "--reps", 2, "--steps", 2]
    return run_script("bench_update.py", *common, "--json", *arguments)


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "read_bytes", "write_bytes"),
    [
        ([], 8, 12),
        (["--params-dtype", "bf16", "--state", "int8"], 4, 6),
        pytest.param(["--master", "stored"], 12, 12, marks=pytest.mark.long),
        pytest.param(["--params-dtype", "bf16"], 10, 12, marks=pytest.mark.long),
        pytest.param(
            ["--params-dtype", "bf16", "--master", "stored"],
            12,
            12,
            marks=pytest.mark.long,
        ),
        pytest.param(
            ["--params-dtype", "bf16", "--state", "int8", "--master", "none"],
            2,
            4,
            marks=pytest.mark.long,
        ),
        pytest.param(["--state", "bf16"], 4, 8, marks=pytest.mark.long),
        pytest.param(["--state", "int8"], 2, 6, marks=pytest.mark.long),
        pytest.param(["--average", "fp32"], 12, 16, marks=pytest.mark.long),
        pytest.param(["--average", "bf16"], 10, 14, marks=pytest.mark.long),
    ],
)
def test_update_moves_what_it_says(tmp_path, options, read_bytes, write_bytes):
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
def test_update_runs_a_peer_and_kernels_in_turn(tmp_path):
    peer = """echo '{"mparam_per_s": 0.01}'"""
    beside = ("--peer", peer, "--beside", "--leaves", 3, "--csd", "host:drive=1GB/s")
    found = figures(bench_update(tmp_path, "--fio-seconds", 0, *beside))
    assert found["peer_mparam_per_s"] == 0.01
    assert found["ratio_to_peer"] > 0
    assert found["ratio_to_floor_beside_kernels"] > 0
    assert (found["leaves"], found["csd"]) == (3, "host:drive=1GB/s")


@pytest.mark.long
def test_update_refuses_what_no_store_offers(tmp_path):
    done = bench_update(tmp_path, "--master", "none")
    assert done.returncode == 2
    assert "--master none: expected with --params-dtype bf16" in done.stderr
    assert not [*tmp_path.iterdir()]


@pytest.mark.long
@pytest.mark.parametrize("clip_norm", [0, 1])
def test_train_compares_and_keeps_a_timeline(tmp_path, clip_norm):
    timeline = tmp_path / "step.json"
    done = run_script(
        "bench_train.py", "--store", tmp_path / "store", "--preset", "nano",
        "--batch-size", 1, "--seq-len", 16, "--reps", 1, "--steps", 1,
        "--clip-norm", clip_norm, "--timeline", timeline, "--json",
    )  # fmt: skip
    found = figures(done)
    assert found["ratio"] > 0
    assert found["max_loss_difference"] < 1e-5
    document = json.loads(timeline.read_text())
    kinds = {span["kind"] for span in document["spans"]}
    assert kinds >= {"read", "checksum", "update", "write", "leaf", "drain", "publish"}
    assert all(s["began_s"] <= s["ended_s"] for s in document["spans"])


@pytest.mark.long
def test_stream_compares_with_a_step_of_smart_update(tmp_path):
    timeline = tmp_path / "step.json"
    done = run_script(
        "bench_stream.py", "--store", tmp_path, "--preset", "nano", "--batch-size", 1,
        "--seq-len", 16, "--reps", 2, "--memory", "64MiB", "--json",
        "--timeline", timeline,
    )  # fmt: skip
    found = figures(done)
    assert found["pairs"] == 2
    assert min(found["update_step_s"], found["compile_s"]) > 0
    for policy in ("recompute", "keep"):
        own = found[policy]
        low, high = own["ratio_interval"]
        assert 0 < low <= own["ratio"] <= high
        assert own["dispatch_share"] > 0
        # Beside 20 bytes a param: the master, once to update and twice to compute.
        assert 1 < own["bytes_ratio"] <= 32 / 20
    document = json.loads(timeline.read_text())
    programs = [s for s in document["spans"] if s["kind"] == "program"]
    assert len(programs) == found["recompute"]["calls"]
    for before, after in itertools.pairwise(programs):
        assert before["began_s"] <= before["ended_s"] <= after["began_s"]
    assert programs[0]["began_s"] >= 0
    assert programs[-1]["ended_s"] <= document["step_s"]
    assert {"fetch", "update", "write"} <= {s["kind"] for s in document["spans"]}
    assert [*tmp_path.iterdir()] == [timeline]


def bench_peers(directory, *arguments):
    common = ["--store", directory, "--preset", "nano", "--batch-size", 1]
    common += ["--seq-len", 16, "--memory", "64MiB", "--turns", 2, "--what"]
    return run_script("bench_peers.py", *common, *arguments)


@pytest.mark.long
def test_peers_run_in_turns(tmp_path):
    found = figures(bench_peers(tmp_path, "update", "--json"))
    ours, eights, memory = (found[n] for n in ("jaxinf", "jaxinf, int8", MEMORY))
    assert ours["step_s_ratio"] == [1, 1, 1]
    for one, moved in ((ours, (8, 12)), (eights, (2, 6)), (memory, (0, 0))):
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
def test_peers_take_whole_steps_in_a_table(tmp_path):
    done = bench_peers(tmp_path, "step", "--micro-batches", 2, "--anew")
    assert done.returncode == 0, done.stderr
    first, _, ours, memory, *_ = done.stdout.splitlines()
    assert first.startswith("| step, GPT-2 nano, 2 parts of 1 x 16, drive as it is |")
    assert ours.startswith("| jaxinf, keep | ")
    assert memory.startswith(f"| {MEMORY} | ")
    assert "| 0.0, 0.0 |" in memory


def test_a_drive_is_slowed_by_the_kernel(tmp_path):
    try:
        limit = DriveLimit(tmp_path, 5e6)
    except OSError as error:
        pytest.skip(f"no control group for this drive: {error}")
    with limit:
        shown = ["sh", "-c", 'cat /proc/self/cgroup "$0"/*bps_device "$0"/io.max; :']
        command = limit.command([*shown, str(limit.group)])
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert f"/{limit.group.name}\n" in done.stdout
        assert done.stdout.count("5000000") == 2
    assert not limit.group.exists()


@pytest.mark.long
def test_a_drive_that_cannot_be_slowed_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="none"):
        DriveLimit(tmp_path, 5e6, groups=tmp_path / "none")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as in_memory:
        done = bench_peers(in_memory, "update", "--drive-limit", 5)
    assert done.returncode == 2
    assert "--drive-limit: this kernel does not slow the drive: " in done.stderr


@pytest.mark.long
@pytest.mark.parametrize("mode", ["stream", "update"])
def test_a_step_copies_no_gradient_or_param(mode, tmp_path):
    options = ["--mode", mode, "--clip-norm", 1, "--reps", 1, "--json"]
    found = figures(run_script("count_copies.py", "--store", tmp_path, *options))
    assert found["needed_bytes"] == 4 * found["params"] > 0
    assert found["copied_bytes_of_leaves"] == found["compiled_bytes"] == 0


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
def test_update_runs_fio(tmp_path):
    found = figures(bench_update(tmp_path, "--fio-seconds", 0.2, "--reps", 1))
    assert any(name.startswith("fio ") for name in found["fio"])


@pytest.mark.long
def test_gpu_times_every_way_that_there_is(tmp_path):
    options = ["--only", "link", "--megabytes", 1, "--reps", 1]
    done = run_script("bench_gpu.py", "--store", tmp_path, *options)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["parts"]["link"]["result"]
    assert {"io_callback", "device_get"} <= found["round_trip_gb_per_s"].keys()
    assert found["fastest"] in found["round_trip_gb_per_s"]
    assert {"pageable_to_device", "pageable_to_host"} <= found["gb_per_s"].keys()
    assert {"pinned_to_device", "pinned_to_host", "pinned_both"} <= found[
        "gb_per_s"
    ].keys()


def test_gpu_measures_registered_memory(monkeypatch):
    late = LateCopies(monkeypatch)
    values = jnp.ones(1 << 18)
    pinned = values.sharding.with_memory_kind("pinned_host")
    found = gpu_parts.registered(values, pinned, 1)
    assert found.keys() == {"register", "registered_to_device", "registered_both"}
    late.settle()
    assert not late.registered
    ways = {(one.source, one.target, one.num_copies) for one in late.copies}
    assert ways == {("registered", "device", 1), ("device", "pinned_host", 1)}


def test_gpu_stops_at_nothing(tmp_path):
    """Parts that take too long, or find no store, are noted."""
    out = tmp_path / "result.json"
    options = ["--only", "link", "bits", "memory", "--limit", 0.01, "--out", out]
    done = run_script("bench_gpu.py", "--store", tmp_path, *options)
    assert done.returncode == 0, done.stderr
    parts = json.loads(out.read_text())["parts"]
    assert [*parts] == ["link", "bits", "memory"]
    assert all("took too long" in one["error"] for one in parts.values())
    assert [*tmp_path.iterdir()] == [out]


@pytest.mark.long
@pytest.mark.timeout(900)  # five programs, each of which compiles a step
def test_gpu_compares_runs_and_memory(tmp_path):
    options = ["--only", "bits", "memory", "--presets", "nano"]
    done = run_script("bench_gpu.py", "--store", tmp_path, *options)
    assert done.returncode == 0, done.stderr
    bits, memory = json.loads(done.stdout)["parts"].values()
    assert bits["result"]["same"]
    assert bits["result"]["runs"]["resumed"]["first"] == 3
    assert memory["result"]["planned_bytes"] > 0


@pytest.mark.long
def test_gpu_tells_what_updates_on_the_device_take(tmp_path):
    options = ["--tiers", "--presets", "nano", "--megabytes", 1, "--reps", 1]
    done = run_script("bench_gpu.py", "--store", tmp_path, *options)
    assert done.returncode == 0, done.stderr
    parts = json.loads(done.stdout)["parts"]
    assert parts.keys() == {"link", "tiers"}
    found = parts["tiers"]["result"]["host"]
    assert found["largest_loss_difference"] < 1e-4
    assert found["subgroups_on_device"][:2] == [0, max(found["subgroups_on_device"])]
    assert [*found["step_s"]] == ["0", "1", "2", "3", "4", "0 waits", "2 waits"]
    assert all(s > 0 for one in found["s_per_1e9_params"] for s in one.values())


@pytest.mark.long
def test_compression():
    found = figures(
        run_script("bench_compress.py", "--elements", 40_000, "--repetitions", 1)
    )
    assert found["kept"] == 400
    assert found["found"] > 0.95
    assert min(v for name, v in found.items() if name.endswith("_ms")) > 0


@pytest.mark.long
def test_errors_of_coded_activations(tmp_path):
    options = ("--model", "gpt2", "--batch", 2)
    done = run_script("activation_forms.py", "--store", tmp_path, *options)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[1:]]
    errors = {form: float(whole) for _, form, _, whole, *_ in rows}
    written = {form: float(num_mib) for _, form, num_mib, *_ in rows}
    assert errors["exact"] == 0
    assert 0 < errors["bf16"] < 0.01
    assert errors["bf16"] < errors["int8"] < 0.05
    assert written["int8"] < written["bf16"] < written["exact"]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_offload_takes_longer_sequences(tmp_path):
    options = ("--memory", "48MiB", "--hidden", 128, "--run")
    done = run_script("longest_sequence.py", "--store", tmp_path, *options)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert 0 < found["keep"]["length"] < found["offload"]["length"]
    assert found["offload"]["written_bytes"] > 0 == found["keep"]["written_bytes"]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_long_sequence_in_turns(tmp_path):
    options = ("--memory", "48MiB", "--hidden", 128, "--chunk", 256)
    turns = ("--length", 1024, "--turns", 1)
    done = run_script("longest_sequence.py", "--store", tmp_path, *options, *turns)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert list(found) == ["keep", "recompute", "offload", "plan"]
    assert found["keep"]["ratio"] == 1
    assert found["offload"]["written_bytes"] > 0 == found["keep"]["written_bytes"]
    assert "expected" in done.stdout


@pytest.mark.long
def test_a_length_needs_something_to_do():
    done = run_script("longest_sequence.py", "--store", "here", "--length", 512)
    assert done.returncode == 2
    assert "--length goes with one of --policy and --turns" in done.stderr
