"""Tiny runs of the scripts that measure print what they promise; no time is checked."""

import json
from pathlib import Path

import finetune_quality as quality
import finetune_tasks as tasks
import pytest

from jaxinf.train.data.files import standard_library_files

pytestmark = pytest.mark.long

NANO = ["--preset", "nano", "--batch-size", 1, "--seq-len", 16]
UPDATE = ["--params", 20_000, "--reps", 2, "--steps", 2, "--fio-seconds", 0]
METHODS = {"BASE": 8, "SU": 8, "SU+O": 8, "SU+O+C": 5, "overlap": 8}
"""Methods of scaling: bytes a param on the link, of gradients and results."""


def assert_in_order(interval, value):
    low, high = interval
    assert 0 < low <= value <= high


def moves(read_bytes, write_bytes):
    """State that stays in memory is not read; that of cards does not stay there."""

    def check(found):
        padding = 5 * 4096 / 20_000
        assert 0 <= found["drive_read_bytes_per_param"] - read_bytes <= padding
        assert 0 <= found["drive_write_bytes_per_param"] - write_bytes <= padding
        for name in ("mparam_per_s", "step_s", "floor_mparam_per_s", "ratio_to_floor"):
            assert found[name] > 0
        assert {"rss_over_caller_bytes", "cpu_cores", "commit_s"} <= found.keys()
        assert {*found["floors_s"]} == {"loop, carried", "loop, split"}

    return check


def train(found):
    assert_in_order(found["ratio_interval"], found["ratio"])
    assert found["max_loss_difference"] < 1e-5


def memory(rows):
    shares = [row["hit_share"] for row in rows]
    assert shares == sorted(shares)
    assert rows[-1]["read_bytes"] == 0 < rows[0]["read_bytes"]


def stream(found):
    assert found["pairs"] == 2
    assert found["update_step_s"] > 0
    for policy in ("recompute", "keep"):
        own = found[policy]
        assert_in_order(own["ratio_interval"], own["ratio"])
        assert own["dispatch_share"] > 0
        # Beside 20 bytes a param: the master, once to update and twice to compute.
        assert 1 < own["bytes_ratio"] <= 32 / 20


def peers(found):
    ways = {"jaxinf": (0, 12), "jaxinf, int8": (0, 6), "optax in memory": (0, 0)}
    for name, moved in ways.items():
        one = found[name]
        assert one["turns"] == 2
        assert_in_order(one["step_s_spread"], one["step_s"])
        assert one["peak_bytes"] > 4 * 4 * one["params"]
        counted = one["read_bytes"], one["written_bytes"]
        assert counted == pytest.approx(moved, abs=0.5)  # with the manifest's bytes


def bits(found):
    result = found["parts"]["bits"]["result"]
    assert result["same"]
    assert [len(one) for one in result["losses"].values()] == [6, 6, 6]


def device_updates(found):
    assert [row["every"] for row in found["rows"]] == [0, 2]
    assert all(row["found_s"] > 0 for row in found["rows"])


def emulated_cards(found):
    rows = found["emulation"]
    wanted = [(count, name) for count in (1, 6) for name in METHODS]
    assert [(row["csds"], row["method"]) for row in rows] == wanted
    for row in rows:
        assert row["link_bytes_per_param"] == METHODS[row["method"]]
        assert min(row["emulated_s"], row["model_s"]) > 0


def fit_in_two_fifths(found):
    """Cuts are where few values cross, so that most can leave."""
    points = found["points"]
    assert {*points} == {"bert 4", "gpt 4", "t5 4"}
    for ways in points.values():
        assert ways["keep"]["peak_ratio"] <= 1.15
        assert ways["offload 0.40"]["peak_ratio"] <= 0.4


RUNS = {
    "update": ("bench_update.py", UPDATE, moves(0, 12)),
    "cards": ("bench_update.py", [*UPDATE, "--csd", "emulated"], moves(12, 12)),
    "codes": ("bench_update.py", [*UPDATE, "--state", "int8"], moves(0, 6)),
    "train": ("bench_train.py", [*NANO, "--reps", 1, "--steps", 1], train),
    "memory": ("bench_memory.py", ["--params", 4_000_000, "--durability", 1], memory),
    "stream": ("bench_stream.py", [*NANO, "--reps", 2, "--memory", "64MiB"], stream),
    "peers": (
        "bench_peers.py",
        [*NANO, "--memory", "64MiB", "--turns", 2, "--what", "update"],
        peers,
    ),
    "bits": ("bench_gpu.py", "--only bits --limit 400".split(), bits),
    "device updates": (
        "repro/device_updates.py",
        "--leaves 4 --elements 65536 --host 1e8 --every 0 2 --reps 1".split(),
        device_updates,
    ),
    "emulated cards": (
        "repro/scaling.py",
        "--params 65536 --csds 1 6 --reps 1 --slower 10 --ratio 0.25".split(),
        emulated_cards,
    ),
    "activations of three stacks": (
        "repro/ssdtrain.py",
        "--rounds 1 --limit 0".split(),
        fit_in_two_fifths,
    ),
}


SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.mark.timeout(900)  # some start several programs, each of which compiles a step
@pytest.mark.parametrize("name", RUNS)
def test_figures(tmp_path, run_python, name):
    script, words, check = RUNS[name]
    is_json = [] if script == "bench_gpu.py" else ["--json"]
    words = ("--store", tmp_path, *words, *is_json)
    check(json.loads(run_python(SCRIPTS / script, *words, limit_s=900).stdout))
    assert not [*tmp_path.iterdir()]


def test_figures_without_a_store(run_python):
    done = run_python(SCRIPTS / "bench_kernel.py", "--elements", 1000, "--json")
    assert json.loads(done.stdout)["melements_per_s"] > 0
    found = json.loads(run_python(SCRIPTS / "repro/k_sweep.py", "--json").stdout)
    groups, _ = found.values()
    assert sum(one["runs"] for one in groups) == 217
    done = run_python(SCRIPTS / "repro/scaling.py", "--model-only")
    assert "52 of 54 published speedups within 10 %" in done.stdout


def test_a_small_table(tmp_path, capsys, monkeypatch):
    found = standard_library_files()
    few = [one for one in found if one.parent.name in ("asyncio", "email")]
    monkeypatch.setattr(tasks, "standard_library_files", lambda: few)
    monkeypatch.setattr(quality, "RATIOS", (0.02,))
    monkeypatch.setattr(quality, "MODEL", quality.MODEL | {"n_embd": 32})
    place = tmp_path / "place"

    def run(part):
        words = ["--seeds", 1, "--steps", 4, "--most", 200, "--layers", 1]
        words += ["--pretraining-steps", 3, "--part", part]
        quality.main(["run", str(place), *map(str, words)])

    monkeypatch.setattr(tasks, "TASKS", ("inside",))
    run("pretraining")
    run("tasks")
    results = place / "results.jsonl"
    before = results.read_text()
    run("tasks")
    assert results.read_text() == before, "runs that are there are not repeated"
    lines = quality.read(results)
    assert len(lines) == 2
    held = len(tasks.read_task(place / "tasks", "inside", "validation"))
    assert sum(n for _, n in lines[0]["right"].values()) == held
    capsys.readouterr()
    quality.main(["table", str(place)])
    table = capsys.readouterr().out
    assert "| inside | 1, pretrained, 4 | top_k:0.02,error_feedback=true | " in table
    assert "2 runs" in table
