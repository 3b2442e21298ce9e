"""Tiny runs of the scripts that print figures of papers; no time is checked."""

import pytest
from run_scripts import figures, run_script

pytestmark = pytest.mark.long


def test_scaling_of_the_model():
    done = run_script("repro/scaling.py", "--model-only")
    assert done.returncode == 0, done.stderr
    *table, last = done.stdout.splitlines()
    assert last.startswith("52 of 54 published speedups within 10 %")
    assert any(line.split()[:3] == ["11a", "GPT2", "4.0B"] for line in table)


def test_k_sweep():
    groups, intervals = figures(run_script("repro/k_sweep.py", "--json")).values()
    assert sum(one["runs"] for one in groups) == 217
    assert len(intervals) == 10


def test_device_updates(tmp_path):
    options = ["--leaves", 4, "--elements", 65536, "--host", 1e8, "--every", 0, 2]
    done = run_script(
        "repro/device_updates.py", "--store", tmp_path, "--reps", 1, "--json", *options
    )
    found = figures(done)
    assert [row["every"] for row in found["rows"]] == [0, 2]
    assert all(row["found_s"] > 0 for row in found["rows"])
    assert found["fastest"] in (0, 2)


def test_scaling_of_emulated_cards(tmp_path):
    options = ["--params", 65536, "--csds", 1, 6, "--reps", 1, "--slower", 10]
    common = ["--store", tmp_path, "--json", "--ratio", 0.25]
    done = run_script("repro/scaling.py", *common, *options)
    rows = figures(done)["emulation"]
    names = ["BASE", "SU", "SU+O", "SU+O+C", "overlap"]
    assert [(r["csds"], r["method"]) for r in rows] == [
        (count, name) for count in (1, 6) for name in names
    ]
    # Gradients and results; a quarter of the gradients.
    link = dict(zip(names, [8, 8, 8, 5, 8], strict=True))
    for row in rows:
        assert row["link_bytes_per_param"] == link[row["method"]]
        assert min(row["emulated_s"], row["model_s"]) > 0
        is_published = row["csds"] == 6 and row["method"] != "overlap"
        assert ("paper_speedup" in row) == is_published
    assert [r["speedup"] for r in rows if r["method"] == "BASE"] == [1, 1]
    assert list(tmp_path.iterdir()) == []


def test_activations_fit_in_a_share_of_the_memory(tmp_path):
    sizes = ("--hidden", 128, "--length", 512, "--batch", 1, 2, "--layers", 4)
    options = ("--stack", "gpt", "--rounds", 2, "--share", 0.7, "--limit", 0, "--json")
    done = run_script("repro/ssdtrain.py", "--store", tmp_path, *sizes, *options)
    points = figures(done)["points"]
    assert list(points) == ["gpt 1", "gpt 2"]
    for one in points.values():
        assert one["offload 0.70"]["peak_ratio"] <= 0.7
        assert one["offload 0.70"]["written_bytes"] > 0
        assert one["offload"]["peak_bytes"] < one["keep"]["peak_bytes"]
        assert one["recompute"]["peak_bytes"] < one["keep"]["peak_bytes"]
        assert one["keep"]["time_ratio"] == 1
    assert not [*tmp_path.iterdir()]
