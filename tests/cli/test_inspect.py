import errno
import json
import os
import subprocess

import numpy as np
import pytest
import zarr

from jaxinf.errors import StoreIOError
from jaxinf.store import steps

STORE_KEYS = (
    "store store_id created_by pinned warnings step committed_at skipped_steps "
    "num_params leaves state_bytes disk_bytes checkpoints drives writer"
).split()


def test_document_of_a_store(trained, run_json):
    found = run_json("inspect", trained.path)
    assert list(found) == STORE_KEYS
    num_params = 300 * 128 + 129 + 1
    assert found["store"] == str(trained.path)
    assert (found["step"], found["skipped_steps"]) == (3, 0)
    assert found["num_params"] == num_params
    assert found["pinned"] is True
    assert found["writer"] is None
    assert found["warnings"] == []
    assert set(found["created_by"]) >= {"jaxinf", "jax", "optax"}
    names = ("params", "mu", "nu")
    assert found["state_bytes"] == dict.fromkeys(names, 4 * num_params)


def test_document_of_leaves(trained, run_json):
    leaves = {
        leaf["name"]: leaf for leaf in run_json("inspect", trained.path)["leaves"]
    }
    assert list(leaves) == ["h/0/bias", "h/0/kernel", "scale"]
    kernel = leaves["h/0/kernel"]
    assert kernel["shape"] == [300, 128]
    assert kernel["num_elements"] == 300 * 128
    assert kernel["num_bytes"] == 12 * 300 * 128
    assert leaves["h/0/bias"]["dtype"] == "float16"
    assert leaves["scale"]["shape"] == []
    for leaf in leaves.values():
        assert [state["name"] for state in leaf["states"]] == ["params", "mu", "nu"]
        for state in leaf["states"]:
            held = zarr.open_array(state["array"], mode="r")[...]
            expected = trained.arrays[leaf["name"], state["name"]]
            np.testing.assert_array_equal(held, expected)


def test_bytes_on_disk_are_those_of_both_slots(trained, run_json):
    found = run_json("inspect", trained.path)
    used = subprocess.run(
        ["du", "-s", "-B1", trained.path / "slots"], capture_output=True, check=True
    )
    with_directories = int(used.stdout.split()[0])
    slot_bytes = sum(found["state_bytes"].values())
    assert 2 * slot_bytes < found["disk_bytes"] <= with_directories


@pytest.mark.long
def test_drives(spread, run_json):
    drives = run_json("inspect", spread.path)["drives"]
    assert [drive["root"] for drive in drives] == [str(root) for root in spread.csds]
    for drive, root in zip(drives, spread.csds, strict=True):
        files = [p for p in root.glob("jaxinf-*/a/**/c*/**/*") if p.is_file()]
        files += [p for p in root.glob("jaxinf-*/a/*/c") if p.is_file()]
        assert drive["num_chunks"] == len(files) > 0
        assert 0 < drive["free_bytes"] < drive["total_bytes"]


def test_text_has_it_all_and_nothing_stays(trained, run):
    result = run("inspect", trained.path)
    assert result.status == 0
    assert result.err == ""
    for part in (
        str(trained.path),
        "38,530 in 3 leaves",
        "h/0/kernel",
        "(300, 128)",
        "float16",
        "params mu nu float32",
        f"{trained.path}/current/params.h.0.bias",
        "none on this machine",
    ):
        assert part in result.out
    assert max(map(len, result.out.splitlines())) < 200
    assert not list((trained.path / "snapshots").iterdir())


@pytest.mark.long
@pytest.mark.parametrize("num_csds", [0, 2])
def test_one_step_beside_a_running_writer(tmp_path, num_csds, start_writer, run_json):
    csds = [tmp_path / f"csd{i}" for i in range(num_csds)]
    for csd in csds:
        csd.mkdir()
    path = tmp_path / "store"
    writer = start_writer(path, *csds)
    steps = []
    while len(steps) < 4 or (steps[-1] == steps[0] and len(steps) < 50):
        steps.append(run_json("inspect", path)["step"])
    assert steps == sorted(steps)
    assert steps[-1] > steps[0]
    found = run_json("inspect", path)
    assert found["writer"]["pid"] == writer.pid
    assert found["pinned"]
    assert writer.poll() is None
    writer.kill()
    writer.wait()
    assert run_json("inspect", path)["writer"] is None


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.EPERM])
def test_a_store_that_cannot_be_written_is_read(trained, code, run, monkeypatch):
    def refuse(directory):
        raise StoreIOError("no") from OSError(code, os.strerror(code))

    monkeypatch.setattr(steps, "pinned_step", refuse)
    result = run("inspect", trained.path, "--json")
    assert result.status == 0
    assert result.err.startswith("warning: ")
    assert "chunks may be of different steps" in result.err
    document = json.loads(result.out)
    assert document["pinned"] is False
    assert len(document["warnings"]) == 1


def test_a_failing_drive_is_no_reason_to_go_on(trained, run, monkeypatch):
    def fail(directory):
        raise StoreIOError("the drive failed") from OSError(errno.EIO, "I/O error")

    monkeypatch.setattr(steps, "pinned_step", fail)
    result = run("inspect", trained.path)
    assert (result.status, result.out) == (1, "")
    assert result.err == "jaxinf: the drive failed\n"


def _expect_failure(result, *parts):
    assert (result.status, result.out) == (1, "")
    assert result.err.startswith("jaxinf: ")
    assert result.err.count("\n") == 1
    for part in parts:
        assert part in result.err


def test_not_a_store(tmp_path, run):
    (tmp_path / "file").touch()
    _expect_failure(run("inspect", tmp_path / "gone"), "gone", "found nothing")
    _expect_failure(run("inspect", tmp_path / "file"), "found a file")
    _expect_failure(run("inspect", tmp_path), "found no jaxinf.json")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": "jaxinf"}', "\x00"])
def test_corrupt_manifest(text, tmp_path, run):
    (tmp_path / "jaxinf.json").write_text(text)
    _expect_failure(run("inspect", tmp_path), "jaxinf.json")


@pytest.mark.long
def test_no_step_that_can_be_read(make_store, run):
    store = make_store(num_steps=1)
    (store.path / "current" / "commit.json").write_text("{")
    _expect_failure(run("inspect", store.path), "commit.json")
    (store.path / "current").unlink()
    _expect_failure(run("inspect", store.path), "being created")


@pytest.mark.long
def test_missing_csd(tmp_path, make_store, run):
    (tmp_path / "one").mkdir()
    store = make_store(csds=(tmp_path / "one",))
    (tmp_path / "one").rename(tmp_path / "unmounted")
    _expect_failure(run("inspect", store.path), "CSD 0", "mount the drive")


def test_a_missing_chunk_is_warned_of(make_store, run):
    store = make_store(num_steps=1)
    (store.path / "current" / "mu.h.0.bias" / "c" / "0").unlink()
    result = run("inspect", store.path)
    assert result.status == 0
    assert "cannot be pinned (No such file" in result.err
