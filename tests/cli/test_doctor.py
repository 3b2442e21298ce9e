import errno
import os
from pathlib import Path

import pytest
from inject import raising

import jaxinf.cli.place as place


def looked(path, file_bytes=0):
    return place.look_at_place(path, file_bytes, lambda done, total: None)


def fatal(found):
    return [problem for problem in found.problems if problem.is_fatal]


def test_a_usable_directory(tmp_path):
    seen = []

    def progress(done, total):
        seen.append((done, total, list(tmp_path.iterdir())))

    found = place.look_at_place(tmp_path, 1 << 20, progress)
    assert found.is_usable
    assert not [problem for problem in found.problems if "links" in problem.what]
    assert seen[-1][:2] == (3 << 20, 3 << 20)
    assert not any(path.is_file() for *_, names in seen for path in names)
    assert "3.00 MiB moved" in found.facts["bandwidth"]
    assert list(tmp_path.iterdir()) == []


def test_several_paths_and_one_is_bad(tmp_path, run):
    (tmp_path / "file").touch()
    for name, what, remedy in (("gone", "nothing", "mkdir -p"), ("file", "a file", "")):
        [problem] = fatal(looked(tmp_path / name))
        assert f"found {what}" in problem.what
        assert remedy in problem.remedy
    result = run("doctor", tmp_path, "--size", "256KiB")
    assert result.status == 0
    for part in (str(tmp_path), "MB/s", "params/s with Adam", "jax ", "ready"):
        assert part in result.out
    result = run("doctor", tmp_path, tmp_path / "gone", tmp_path / "file")
    assert result.status == 1
    assert "cannot hold a store" in result.out


@pytest.mark.parametrize(
    ("name", "is_fatal"),
    [("direct_io", False), ("hard_links", True), ("locks", True)],
)
def test_what_a_file_system_lacks(tmp_path, name, is_fatal, monkeypatch):
    refuse = raising(OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP)))
    monkeypatch.setitem(place._ABILITIES, name, (refuse, *place._ABILITIES[name][1:]))
    found = looked(tmp_path)
    [problem] = [p for p in found.problems if "not supported" in p.what]
    assert problem.is_fatal is is_fatal
    assert "ext4" in problem.remedy


def test_memory_is_no_drive():
    found = looked(Path("/dev/shm"))
    assert found.facts["file system"] == "tmpfs"
    assert any("gone after a reboot" in problem.what for problem in found.problems)
