import errno
import os
import platform
import re
import tempfile
from pathlib import Path

import jax
import pytest

import jaxinf.cli.doctor as doctor
import jaxinf.cli.host as host
import jaxinf.cli.place as place
from jaxinf.csd.cards.sysfs import CardInfo
from jaxinf.errors import DeviceConfigurationError


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


def test_the_machine():
    host_found = host.look_at_host()
    found, problems = host_found.facts, host_found.problems
    assert f"cores: {len(os.sched_getaffinity(0))}, " in found["processor"]
    assert re.fullmatch(r"[\d.]+ .iB, [\d.]+ .iB available", found["memory"])
    assert f"jax {jax.__version__}" in found["packages"]
    assert "x cpu" in found["JAX devices"]
    assert not any(problem.is_fatal for problem in problems)


def test_text(tmp_path, run):
    result = run("doctor", tmp_path, "--size", "256KiB")
    assert result.status == 0
    for part in (str(tmp_path), "MB/s", "params/s with Adam", "jax ", "ready"):
        assert part in result.out


def test_several_paths_and_one_is_bad(tmp_path, run):
    (tmp_path / "file").touch()
    for name, what, remedy in (("gone", "nothing", "mkdir -p"), ("file", "a file", "")):
        [problem] = fatal(looked(tmp_path / name))
        assert f"found {what}" in problem.what
        assert remedy in problem.remedy
    words = ["doctor", tmp_path, tmp_path / "gone", tmp_path / "file", "--size", "0"]
    result = run(*words)
    assert result.status == 1
    assert "cannot hold a store" in result.out


def test_a_memory_file_system_is_told(memory_dir):
    found = looked(memory_dir)
    assert found.facts["file system"].startswith("tmpfs on ")
    assert found.is_usable
    assert any("is memory" in problem.what for problem in found.problems)


@pytest.fixture
def memory_dir():
    path = Path("/dev/shm")
    if not path.is_dir():
        pytest.skip("no /dev/shm: no tmpfs to test on")
    with tempfile.TemporaryDirectory(dir=path) as scratch:
        yield Path(scratch)


@pytest.mark.parametrize(
    ("code", "part"),
    [(errno.EACCES, "Permission denied"), (errno.ENOSPC, "No space left")],
)
def test_a_directory_that_cannot_be_written(tmp_path, code, part, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(tempfile, "TemporaryDirectory", refuse)
    [problem] = fatal(looked(tmp_path))
    assert part in problem.what
    assert problem.remedy


@pytest.mark.parametrize(
    ("name", "is_fatal"),
    [("direct_io", False), ("hard_links", True), ("locks", True)],
)
def test_what_a_file_system_lacks(tmp_path, name, is_fatal, monkeypatch):
    def refuse(scratch):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setitem(place._ABILITIES, name, (refuse, *place._ABILITIES[name][1:]))
    found = looked(tmp_path)
    [problem] = [p for p in found.problems if "not supported" in p.what]
    assert problem.is_fatal is is_fatal
    assert "ext4" in problem.remedy


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_nothing_is_left_behind(tmp_path, error, run, monkeypatch):
    class Interrupted:
        def __enter__(self):
            return self.progress

        def __exit__(self, *args):
            pass

        def progress(self, done, total):
            raise error

    monkeypatch.setattr(doctor, "show_progress", lambda name: Interrupted())
    open_files = os.listdir("/proc/self/fd")
    result = run("doctor", tmp_path, "--size", "1MiB")
    assert result.status == (130 if error is KeyboardInterrupt else 1)
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == len(open_files)


def test_a_slow_drive_ends_the_measurement(tmp_path, monkeypatch):
    monkeypatch.setattr(place, "_MOST_S", 0.0)
    found = place.measure_bandwidth(tmp_path, 1 << 30, lambda done, total: None)
    assert found.moved_bytes < 1 << 30
    assert min(found.read, found.write, found.mixed) > 0


def test_a_file_too_short(tmp_path):
    found = looked(tmp_path, 4096)
    assert "bandwidth" not in found.facts
    assert any("too short to measure" in problem.what for problem in found.problems)
    assert found.is_usable


MOUNTS = """\
proc /proc proc rw,relatime 0 0
/dev/vda / ext4 rw,discard 0 0
/dev/nvme0n1p1 /mnt xfs rw 0 0
host:/x /mnt/a\\040b nfs4 ro,relatime 0 0
/dev/sdb /mnt btrfs ro 0 0
"""


def test_mounts(tmp_path):
    mounts = tmp_path / "mounts"
    mounts.write_text(MOUNTS)
    for path, mount in {
        "/": ("/dev/vda", "/", "ext4"),
        "/mntx/y": ("/dev/vda", "/", "ext4"),
        "/mnt/y": ("/dev/sdb", "/mnt", "btrfs"),
        "/mnt/a b/c": ("host:/x", "/mnt/a b", "nfs4"),
    }.items():
        assert place.find_mount(Path(path), mounts=mounts) == mount
    assert place.find_mount(tmp_path, mounts=tmp_path / "gone") is None


def test_what_the_machine_lacks(monkeypatch):
    def refuse():
        raise DeviceConfigurationError("8 CPU devices hang. Start with PJRT_NPROC=16")

    monkeypatch.setattr(host, "check_device_configuration", refuse)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(host.toolchain, "_installed_zig", lambda: None)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(host.toolchain, "levels_of", lambda flags: ("x86-64",))
    found = host.look_at_host().problems
    whats = [problem.what for problem in found]
    assert len(whats) == 3
    assert "no fused multiply-add" in whats[0]
    assert "looked for c++, g++, clang++ in PATH" in whats[1]
    assert whats[2] == "8 CPU devices hang"
    assert found[2].remedy == "Start with PJRT_NPROC=16"
    assert not any(problem.is_fatal for problem in found)
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setenv("CXX", "no-such-compiler")
    cpu, *_, compiler = (one.what for one in host.look_at_host().problems[:-1])
    assert "aarch64: updates have the bits of jitted optax on an x86-64" in cpu
    assert "CXX=no-such-compiler" in compiler


@pytest.mark.parametrize(
    ("error", "part"),
    [
        (RuntimeError("Unable to initialize backend\nmore"), ": Unable to initialize"),
        (AssertionError(), "(JAX_PLATFORMS=cuda): AssertionError"),
    ],
)
def test_no_jax_device_is_fatal(tmp_path, error, part, run, monkeypatch):
    def refuse():
        raise error

    monkeypatch.setattr("jax.devices", refuse)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    result = run("doctor", tmp_path, "--size", "0")
    assert result.status == 1
    assert part in result.out
    assert "JAX cannot run here" in result.out


# --- cards -------------------------------------------------------------------------


def test_cards_and_what_is_off(tmp_path, run, monkeypatch):
    infos = [
        CardInfo("0000:40:00.1", "xilinx_u2_gen3x4_xdma_gc_base_2", "on", ()),
        CardInfo("0000:50:00.1", "", "off", ()),
    ]
    monkeypatch.setattr(host, "list_cards", lambda: infos)
    monkeypatch.setattr(host, "card_of", lambda path, found: found[1])
    monkeypatch.delenv("XILINX_XRT", raising=False)
    one, two = host.look_at_cards([tmp_path])
    assert (one.facts["P2P"], two.facts["P2P"]) == ("on", "off")
    assert one.facts["beside"] == "none of these directories"
    assert two.facts["beside"] == str(tmp_path)
    assert "setup.sh" in one.problems[0].remedy
    assert "xbutil configure --device 0000:50:00.1 --p2p" in two.problems[0].remedy
    text = run("doctor", tmp_path, "--size", "0").out
    for part in ("card 0000:40:00.1", "xilinx_u2_gen3x4", "P2P is off", "unknown"):
        assert part in text


def test_a_home_of_nobody_is_refused(run):
    result = run("doctor", "~nosuch/f")
    assert result.status == 2
    assert "~nosuch/f: expected the home of a user" in result.err
