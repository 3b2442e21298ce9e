import errno
import os
import platform
import tempfile
from pathlib import Path

import pytest

import jaxinf.cli.bandwidth as bandwidth
import jaxinf.cli.doctor as doctor
import jaxinf.cli.machine as machine
import jaxinf.cli.place as place
import jaxinf.optimizer.callback
from jaxinf.csd.cards.sysfs import CardInfo
from jaxinf.errors import DeviceConfigurationError
from jaxinf.plan import read_machine

PATH_KEYS = [
    "path",
    "usable",
    "source",
    "mount_point",
    "filesystem",
    "free_bytes",
    "total_bytes",
    "adam_params",
    "direct_io",
    "hard_links",
    "symlinks",
    "locks",
    "bandwidth",
    "adam_params_per_s",
    "problems",
]


def _doctor(run_json, path, size="1MiB", status=0):
    return run_json("doctor", path, "--size", size, status=status)


def test_a_usable_directory(tmp_path, run_json):
    found = _doctor(run_json, tmp_path)
    assert found["usable"] is True
    [here] = found["paths"]
    assert list(here) == PATH_KEYS
    assert here["path"] == str(tmp_path)
    assert here["usable"]
    assert here["symlinks"]
    assert here["hard_links"]
    assert here["adam_params"] == here["free_bytes"] // 24
    speeds = here["bandwidth"]
    assert speeds["file_bytes"] == 1 << 20
    assert min(speeds.values()) > 0
    assert here["adam_params_per_s"] == speeds["mixed_bytes_per_s"] / 20
    assert list(tmp_path.iterdir()) == []


def test_the_machine(tmp_path, run_json):
    found = _doctor(run_json, tmp_path, "0")["machine"]
    assert found["cpu"]["num_cores"] == len(os.sched_getaffinity(0))
    assert found["memory_bytes"] > found["available_bytes"] > 0
    assert found["packages"]["jax"]
    assert any(device.startswith("cpu") for device in found["jax_devices"])


def test_text(tmp_path, run):
    result = run("doctor", tmp_path, "--size", "256KiB")
    assert result.status == 0
    for part in (str(tmp_path), "MB/s", "params/s with Adam", "jax ", "ready"):
        assert part in result.out


@pytest.mark.long
def test_a_machine_is_written(tmp_path, run):
    file = tmp_path / "machine.json"
    result = run("doctor", str(tmp_path), "--size", "8MiB", "--machine", str(file))
    assert (result.status, f"wrote {file}" in result.err) == (0, True)
    machine = read_machine(file)
    rates = dict(machine.rates())
    assert {rate.basis for rate in rates.values()} == {"measured"}
    assert {"drives[0].mixed", "updates['adamw int8']", "copy"} <= set(rates)
    assert {"launches", "calls", "moves", "commits"} <= set(rates)
    assert machine.device is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--size", "0"), "expected a directory whose bandwidth was measured"),
        (
            ("--size", "8MiB", "--machine", "/proc/none/machine.json"),
            "in a directory that exists",
        ),
    ],
)
def test_a_machine_that_cannot_be_written(tmp_path, run, words, message):
    file = tmp_path / "machine.json"
    result = run("doctor", str(tmp_path), "--machine", str(file), *words)
    assert (result.status, message in result.err) == (2, True)
    assert not file.exists()


def test_no_measuring(tmp_path, run_json):
    [here] = _doctor(run_json, tmp_path, "0")["paths"]
    assert here["bandwidth"] is here["adam_params_per_s"] is None
    assert here["usable"]


def test_several_paths_and_one_is_bad(tmp_path, run, run_json):
    (tmp_path / "file").touch()
    words = ["doctor", tmp_path, tmp_path / "gone", tmp_path / "file", "--size", "0"]
    found = run_json(*words, status=1)
    assert found["usable"] is False
    assert [here["usable"] for here in found["paths"]] == [True, False, False]
    assert "mkdir -p" in found["paths"][1]["problems"][0]["remedy"]
    assert "found a file" in found["paths"][2]["problems"][0]["what"]
    result = run(*words)
    assert result.status == 1
    assert "cannot hold a store" in result.out


def test_a_memory_file_system_is_told(memory_dir, run_json):
    [here] = _doctor(run_json, memory_dir)["paths"]
    assert here["filesystem"] == "tmpfs"
    assert here["usable"]
    assert any("is memory" in problem["what"] for problem in here["problems"])


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
def test_a_directory_that_cannot_be_written(
    tmp_path, code, part, run_json, monkeypatch
):
    def refuse(*args, **kwargs):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(tempfile, "TemporaryDirectory", refuse)
    [here] = _doctor(run_json, tmp_path, status=1)["paths"]
    [problem] = [problem for problem in here["problems"] if problem["fatal"]]
    assert part in problem["what"]
    assert problem["remedy"]


@pytest.mark.parametrize(
    ("name", "fatal"),
    [("hard_links", False), ("symlinks", True), ("locks", True)],
)
def test_what_a_file_system_lacks(tmp_path, name, fatal, run_json, monkeypatch):
    def refuse(scratch):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setitem(place._ABILITIES, name, (refuse, *place._ABILITIES[name][1:]))
    [here] = _doctor(run_json, tmp_path, "0", status=int(fatal))["paths"]
    assert here[name] is False
    [problem] = [p for p in here["problems"] if "not supported" in p["what"]]
    assert problem["fatal"] is fatal
    assert "ext4" in problem["remedy"]


def test_without_direct_io(tmp_path, run, monkeypatch):
    refused = (lambda path: False, *place._ABILITIES["direct_io"][1:])
    monkeypatch.setitem(place._ABILITIES, "direct_io", refused)
    result = run("doctor", tmp_path, "--size", "256KiB")
    assert "no direct I/O" in result.out
    assert "buffered, so partly memory's" in result.out


def test_little_space_makes_a_shorter_file(tmp_path, monkeypatch):
    monkeypatch.setattr(place, "_SHARE_OF_FREE", 1 << 60)
    found = place.look_at_place(tmp_path, 1 << 30, lambda done, total: None)
    assert found.bandwidth is None
    assert any("too short to measure" in problem.what for problem in found.problems)
    assert found.is_usable


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


def test_the_file_has_no_name_while_it_is_measured(tmp_path):
    seen = []

    def progress(done, total):
        seen.append((done, total, list(tmp_path.iterdir())))

    found = bandwidth.measure_bandwidth(tmp_path, 1 << 20, progress)
    assert found.file_bytes == 1 << 20
    assert seen[-1][:2] == (3 << 20, 3 << 20)
    assert all(names == [] for *_, names in seen)


def test_a_file_too_short(tmp_path):
    with pytest.raises(ValueError, match="too short to measure with; give at least"):
        bandwidth.measure_bandwidth(tmp_path, 4096, lambda done, total: None)


MOUNTS = """\
proc /proc proc rw,relatime 0 0
/dev/vda / ext4 rw,discard 0 0
/dev/nvme0n1p1 /mnt xfs rw 0 0
host:/x /mnt/a\\040b nfs4 ro,relatime 0 0
/dev/sdb /mnt btrfs ro 0 0
"""


@pytest.mark.parametrize(
    ("path", "mount"),
    [
        ("/", ("/dev/vda", "/", "ext4")),
        ("/mntx/y", ("/dev/vda", "/", "ext4")),
        ("/mnt/y", ("/dev/sdb", "/mnt", "btrfs")),
        ("/mnt/a b/c", ("host:/x", "/mnt/a b", "nfs4")),
    ],
)
def test_mounts(tmp_path, path, mount):
    mounts = tmp_path / "mounts"
    mounts.write_text(MOUNTS)
    assert place.find_mount(Path(path), mounts=mounts) == mount
    assert place.find_mount(tmp_path, mounts=tmp_path / "gone") is None


V2 = ["cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3"]
V3 = ["avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"]
V4 = ["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="levels of x86-64")
@pytest.mark.parametrize(
    ("flags", "level"),
    [([], 1), (V2, 2), (V2 + V3, 3), (V2 + V3 + V4, 4), (V2 + V4, 2)],
)
def test_isa_level(flags, level):
    assert machine.isa_level(flags) == f"x86-64-v{level}"


def test_a_plugin_without_a_driver(monkeypatch, tmp_path):
    installed = tmp_path / "jax_cuda12_plugin-0.10.2.dist-info"
    installed.mkdir()
    metadata = "Metadata-Version: 2.1\nName: jax-cuda12-plugin\nVersion: 0.10.2\n"
    (installed / "METADATA").write_text(metadata)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(machine, "_CUDA_DRIVER", "libno-such-driver.so.1")
    found = [p for p in machine.look_at_machine().problems if "plugin" in p.what]
    assert [one.is_fatal for one in found] == [False]
    assert "jax-cuda12-plugin is installed, and NVIDIA's driver is not" in found[0].what
    assert "nvidia-smi" in found[0].remedy


def test_what_the_machine_lacks(monkeypatch):
    def refuse():
        raise DeviceConfigurationError("8 CPU devices hang. Start with PJRT_NPROC=16")

    monkeypatch.setattr(jaxinf.optimizer.callback, "check_device_configuration", refuse)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(machine.toolchain, "_installed_zig", lambda: None)
    monkeypatch.setattr(machine, "isa_level", lambda flags: "x86-64-v2")
    found = machine.look_at_machine()
    whats = [problem.what for problem in found.problems]
    assert len(whats) == 3
    assert "no fused multiply-add" in whats[0]
    assert "looked for c++, g++, clang++ in PATH" in whats[1]
    assert whats[2] == "8 CPU devices hang"
    assert found.problems[2].remedy == "Start with PJRT_NPROC=16"
    assert not any(problem.is_fatal for problem in found.problems)
    assert "XLA_PYTHON_CLIENT_PREALLOCATE" not in os.environ


def test_another_processor_is_told_what_it_gets(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setenv("CXX", "no-such-compiler")
    found = machine.look_at_machine()
    assert found.isa == "aarch64"
    assert found.compiler is None
    cpu, _, compiler = found.problems
    assert "aarch64: updates have the bits of jitted optax on an x86-64" in cpu.what
    assert "CXX=no-such-compiler" in compiler.what


def test_a_processor_without_kernels(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    monkeypatch.setattr(machine.toolchain, "find_compiler", lambda: None)
    cpu, foreign, compiler = machine.look_at_machine().problems
    assert "riscv64: jaxinf's C++ is for x86-64 and aarch64. No store" in cpu.what
    assert foreign.what == "this installation of jaxinf is for x86_64, not riscv64"
    assert "pip install --force-reinstall" in foreign.remedy
    assert "no optimizer can run" in compiler.what


def test_the_compiler_is_the_librarys(monkeypatch):
    monkeypatch.setattr(machine.toolchain, "find_compiler", lambda: "/opt/c++")
    assert machine.look_at_machine().compiler == "/opt/c++"


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


def test_no_cards_are_no_problem(tmp_path, run, run_json):
    assert _doctor(run_json, tmp_path, "0")["cards"] == []
    assert "card " not in run("doctor", tmp_path, "--size", "0").out


def test_cards_and_what_is_off(tmp_path, run, run_json, monkeypatch):
    infos = [
        CardInfo("0000:40:00.1", "xilinx_u2_gen3x4_xdma_gc_base_2", "on", ()),
        CardInfo("0000:50:00.1", "", "off", ()),
    ]
    monkeypatch.setattr(doctor, "list_cards", lambda: infos)
    monkeypatch.setattr(doctor, "card_of", lambda path, found: found[1])
    monkeypatch.delenv("XILINX_XRT", raising=False)
    one, two = _doctor(run_json, tmp_path, "0")["cards"]
    assert list(one) == ["address", "firmware", "p2p", "paths", "problems"]
    assert (one["p2p"], two["p2p"]) == ("on", "off")
    assert (one["paths"], two["paths"]) == ([], [str(tmp_path)])
    assert "setup.sh" in one["problems"][0]["remedy"]
    assert (
        "xbutil configure --device 0000:50:00.1 --p2p" in two["problems"][0]["remedy"]
    )
    text = run("doctor", tmp_path, "--size", "0").out
    for part in ("card 0000:40:00.1", "xilinx_u2_gen3x4", "P2P is off", "unknown"):
        assert part in text
