import errno
import json
import math
import os
import pty
import re
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import zarr

from jaxinf.cli.inspection import summary_of
from jaxinf.errors import StoreIOError
from jaxinf.layout import LeafGrid, choose_grid
from jaxinf.store import CommitRecord, LeafRecord, StateRecord, StepReader, steps
from jaxinf.transfer import crc32c

STORE_KEYS = [
    "store",
    "store_id",
    "created_by",
    "pinned",
    "warnings",
    "step",
    "committed_at",
    "skipped_steps",
    "num_params",
    "leaves",
    "state_bytes",
    "disk_bytes",
    "checkpoints",
    "drives",
    "writer",
]


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


@pytest.mark.parametrize(
    ("place", "leaf"),
    [("trained", "h/0/bias"), ("spread", "h/0/kernel"), ("spread", "scale")],
)
def test_statistics(place, leaf, request, run_json):
    store = request.getfixturevalue(place)
    found = run_json("inspect", store.path, "--leaf", leaf)
    assert list(found)[:8] == STORE_KEYS[:8]
    assert found["leaf"]["name"] == leaf
    assert list(found["statistics"]) == ["params", "mu", "nu"]
    for state, statistics in found["statistics"].items():
        array = store.arrays[leaf, state].astype(np.float64)
        assert statistics["num_elements"] == array.size
        assert statistics["num_zeros"] == np.count_nonzero(array == 0)
        assert statistics["num_non_finite"] == 0
        assert statistics["min"] == array.min()
        assert statistics["max"] == array.max()
        assert statistics["mean"] == pytest.approx(array.mean(), rel=1e-12)
        assert statistics["std"] == pytest.approx(array.std(), rel=1e-9, abs=1e-15)


@pytest.mark.parametrize(
    "array",
    [
        np.array([0, -0.0, np.nan, np.inf, -np.inf, 1, -3], np.float32),
        np.random.default_rng(1).normal(3, 2, 300_001).astype(ml_dtypes.bfloat16),
        np.full(70, 3e38, np.float32),
        np.full(5, np.nan, np.float32),
        np.zeros((0, 3), np.float32),
    ],
    ids=["special", "pieces", "large", "nan", "empty"],
)
def test_numbers_of_a_summary(array, tmp_path):
    chunk_shape = choose_grid(array.shape).chunk_shape
    grid = LeafGrid(array.shape, chunk_shape)
    state = StateRecord("params", array.dtype.name)
    record = LeafRecord(
        path=("w",),
        shape=array.shape,
        dtype="float32",
        kernel="k0",
        states=(state,),
        chunk_shape=chunk_shape,
        shard_counts=(1,) * array.ndim,
        csds=(0,) * math.prod(grid.grid_shape),
    )
    sums = []
    for chunk in record.grid.chunks():
        file = tmp_path / "params.w" / chunk.key
        file.parent.mkdir(parents=True, exist_ok=True)
        stored = np.zeros(chunk.stored_elements, array.dtype)
        stored[: chunk.num_elements] = array[chunk.slices].ravel()
        stored.tofile(file)
        sums.append(crc32c(stored[: chunk.num_elements]))
    checksums = {"params.w": np.array(sums, np.uint32)}
    commit = CommitRecord(step=1, scalar_state=(), checksums=checksums)
    with StepReader(tmp_path, commit, memory_bytes=1 << 16) as reader:  # pieces
        found = summary_of(reader, record, state)
    wide = array.astype(np.float64)
    finite = wide[np.isfinite(wide)]
    assert found["num_elements"] == array.size
    assert found["num_zeros"] == np.count_nonzero(finite == 0)
    assert found["num_non_finite"] == array.size - finite.size
    if not finite.size:
        assert [found[key] for key in ("mean", "std", "min", "max")] == [None] * 4
        return
    assert found["mean"] == pytest.approx(finite.mean(), rel=1e-12)
    assert found["std"] == pytest.approx(finite.std(), rel=1e-9, abs=1e-12)
    assert (found["min"], found["max"]) == (finite.min(), finite.max())


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


def test_text_of_a_leaf(trained, run):
    result = run("inspect", trained.path, "--leaf", "h/0/kernel")
    assert result.status == 0
    assert "(300, 128): 38,400 elements of float32" in result.out
    assert re.search(r"nu +float32( +[-0-9.e]+){4} +[0-9.]+% +0\n", result.out)


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "width"), [([], 80), (["--leaf", "h/0/kernel"], 120)]
)
def test_terminal(trained, width, words):
    text = _on_terminal(["inspect", str(trained.path), *words], width)
    for line in text.splitlines():
        assert len(line) <= width or str(trained.path) in line, line
    assert "h/0/kernel" in text


def _on_terminal(words, width):
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxinf", *words],
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": str(width)},
    )
    os.close(theirs)
    output = b""
    try:
        while data := os.read(ours, 65536):
            output += data
    except OSError:
        pass  # Linux returns EIO when the other end is closed
    finally:
        os.close(ours)
    assert process.wait() == 0
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.decode()).replace("\r", "")


@pytest.mark.long
@pytest.mark.parametrize("num_csds", [pytest.param(0, marks=pytest.mark.long), 2])
def test_one_step_beside_a_running_writer(tmp_path, num_csds, start_writer, run_json):
    csds = [tmp_path / f"csd{i}" for i in range(num_csds)]
    for csd in csds:
        csd.mkdir()
    path = tmp_path / "store"
    writer = start_writer(path, *csds)
    steps = []
    while len(steps) < 4 or (steps[-1] == steps[0] and len(steps) < 50):
        found = run_json("inspect", path, "--leaf", "w")
        statistics = found["statistics"]["params"]
        assert statistics["min"] == statistics["max"] == -found["step"]
        steps.append(found["step"])
    assert steps == sorted(steps)
    assert steps[-1] > steps[0]
    found = run_json("inspect", path)
    assert found["writer"]["pid"] == writer.pid
    assert found["pinned"]
    assert writer.poll() is None


@pytest.mark.long
def test_writer_is_forgotten_when_it_is_gone(tmp_path, start_writer, run_json):
    writer = start_writer(tmp_path / "store")
    writer.kill()
    writer.wait()
    assert run_json("inspect", tmp_path / "store")["writer"] is None


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.EPERM])
def test_a_store_that_cannot_be_written_is_read(trained, code, run, monkeypatch):
    def refuse(directory):
        raise StoreIOError("no") from OSError(code, os.strerror(code))

    monkeypatch.setattr(steps, "pinned_step", refuse)
    result = run("inspect", trained.path, "--leaf", "scale", "--json")
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


def _expect_failure(result, *parts, status=1):
    assert result.status == status
    assert result.out == ""
    assert result.err.startswith("jaxinf: ")
    assert result.err.count("\n") == 1
    for part in parts:
        assert part in result.err


def test_no_such_path(tmp_path, run):
    _expect_failure(run("inspect", tmp_path / "gone"), "gone", "found nothing")


def test_a_file(tmp_path, run):
    (tmp_path / "file").touch()
    _expect_failure(run("inspect", tmp_path / "file"), "found a file")


def test_not_a_store(tmp_path, run):
    _expect_failure(run("inspect", tmp_path), "found no jaxinf.json")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": "jaxinf"}', "\x00"])
def test_corrupt_manifest(text, tmp_path, run):
    (tmp_path / "jaxinf.json").write_text(text)
    _expect_failure(run("inspect", tmp_path), "jaxinf.json")


@pytest.mark.long
def test_no_step_yet(make_store, run):
    store = make_store(num_steps=1)
    (store.path / "current").unlink()
    _expect_failure(run("inspect", store.path), "being created")


@pytest.mark.long
def test_corrupt_commit(make_store, run):
    store = make_store(num_steps=1)
    (store.path / "current" / "commit.json").write_text("{")
    _expect_failure(run("inspect", store.path), "commit.json")


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
    _expect_failure_after_warning(run("inspect", store.path, "--leaf", "h/0/bias"))


def _expect_failure_after_warning(result):
    assert (result.status, result.out) == (1, "")
    assert "\njaxinf: " in result.err


@pytest.mark.long
def test_truncated_chunk(make_store, run):
    store = make_store()
    os.truncate(store.path / "current" / "mu.h.0.bias" / "c" / "0", 100)
    _expect_failure(run("inspect", store.path, "--leaf", "h/0/bias"), "truncated")


def test_unknown_leaf(trained, run):
    _expect_failure(run("inspect", trained.path, "--leaf", "h/1"), "h/0/kernel")
