"""Builds the parts of XRT's software emulation that do not work in Debian's packages.

In a directory it makes a private XRT prefix with a repaired libxrt_swemu, the device
model where XRT looks for it, the module pyxrt, and a description of four devices.
Invariant: everything is written below that directory, under a name that depends on all
inputs; a directory with that name is complete.
"""

import hashlib
import json
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from .table import write_glue
from .xclbin import PLATFORM, write_xclbin

HERE = Path(__file__).parent
VERSION = "202210.2.13.466+dfsg-8"
PACKAGES = ("libxrt1", "libxrt-dev")
INCLUDE = "/usr/include/xrt"
NUM_DEVICES = 4
ALLOC_VOID = "_ZN12xclcpuemhal29CpuemShim10alloc_voidEm"


class RuntimeUnavailable(Exception):
    """XRT is not available here; the message gives the reason and the remedy."""


class Runtime(NamedTuple):
    """The places of the parts."""

    directory: Path
    prefix: Path  # XILINX_XRT
    vitis: Path  # XILINX_VITIS, below which XRT finds the device model
    model: Path
    python: Path  # with pyxrt

    @classmethod
    def at(cls, directory):
        vitis = directory / "vitis"
        model = "data/emulation/unified/cpu_em/generic_pcie/model/genericpciemodel"
        parts = directory / "xrt", vitis, vitis / model, directory / "python"
        return cls(directory, *parts)


def build_runtime(directory):
    """Builds all parts in a directory below `directory`, unless they are there."""
    libraries = check_packages()
    sources = [path for path in HERE.rglob("*") if path.suffix in (".cpp", ".hpp")]
    inputs = [Path(__file__), *sorted(sources)]

    def build(target):
        runtime = Runtime.at(target)
        with ThreadPoolExecutor() as pool:
            parts = [
                pool.submit(_build_binding, runtime),
                pool.submit(_build_prefix, runtime, libraries),
                pool.submit(_build_model, runtime),
            ]
        for part in parts:
            part.result()
        text = json.dumps(_configuration())
        (target / "emconfig.json").write_text(text)

    key = [VERSION, sys.version, *(path.read_bytes() for path in inputs)]
    return Runtime.at(_make_once(directory, "runtime", key, build))


def build_xclbin(directory, compute_units, options):
    """Builds kernels, by these sources and flags of g++, unless they are there.

    A change of a header beside a source causes a new build.
    """
    glue = write_glue(compute_units)
    header = HERE / "model" / "card_units.hpp"
    files = [Path(path) for path in options if Path(path).is_file()]
    headers = {one for path in files for one in path.parent.glob("*.hpp")}
    sources = [path.read_bytes() for path in (*files, *sorted(headers))]
    key = [*map(str, options), *sources, glue, header.read_bytes()]
    key += [Path(__file__).with_name("xclbin.py").read_bytes()]

    def build(target):
        (target / "glue.cpp").write_text(glue)
        library = target / "kernels.so"
        compile_cpp(
            [
                *("-O2", "-shared", "-fPIC", "-pthread", "-ffp-contract=off"),
                *("-I", header.parent, target / "glue.cpp", *options, "-o", library),
            ]
        )
        content = write_xclbin(library.read_bytes(), compute_units)
        (target / "kernels.xclbin").write_bytes(content)

    return _make_once(directory, "kernels", key, build) / "kernels.xclbin"


def _make_once(directory, name, key, make):
    """Returns a directory that `make` fills, once for every `key`, or not at all."""
    digest = hashlib.sha256()
    for part in key:
        part = part.encode() if isinstance(part, str) else part
        digest.update(len(part).to_bytes(8) + part)
    target = directory / f"{name}-{digest.hexdigest()[:16]}"
    if not target.exists():
        unfinished = target.with_suffix(".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        make(unfinished)
        unfinished.rename(target)
    return target


def check_packages():
    """Returns the directory of Debian's libraries; raises `RuntimeUnavailable`."""
    packages = [f"{name} {VERSION} amd64" for name in PACKAGES]
    form = "--showformat=${Package} ${Version} ${Architecture}\n"
    try:
        found = _output(["dpkg-query", "--show", form, *PACKAGES, "uuid-dev", "g++"])
    except (OSError, RuntimeError) as error:
        found = str(error)
    if missing := [package for package in packages if package not in found]:
        raise RuntimeUnavailable(
            f"missing: {', '.join(missing)}; the emulation needs Debian 12, whose "
            "libxrt_swemu the repair is made for, with apt-get install dpkg g++ "
            f"binutils {' '.join(PACKAGES)} uuid-dev"
        )
    return Path("/usr/lib") / _output(["g++", "-print-multiarch"])


def compile_cpp(arguments):
    """Runs g++; an error carries the compiler's own text."""
    _output(["g++", "-std=c++17", *arguments])


def _build_model(runtime):
    runtime.model.parent.mkdir(parents=True)
    sources = sorted((HERE / "model").glob("*.cpp"))
    compile_cpp(
        ["-O2", "-Wall", "-Wextra", "-pthread", *sources, "-ldl", "-o", runtime.model]
    )


def _build_binding(runtime):
    runtime.python.mkdir()
    module = runtime.python / f"pyxrt{sysconfig.get_config_var('EXT_SUFFIX')}"
    includes = _output([sys.executable, "-m", "pybind11", "--includes"]).split()
    compile_cpp(
        [
            *("-O0", "-shared", "-fPIC", "-fvisibility=hidden"),
            *(*includes, "-isystem", INCLUDE, HERE / "binding" / "pyxrt.cpp"),
            *("-lxrt_coreutil", "-luuid", "-o", module),
        ]
    )


def _build_prefix(runtime, libraries):
    """Makes the prefix: XRT looks only for PREFIX/lib/libxrt_*.so.2."""
    lib = runtime.prefix / "lib"
    lib.mkdir(parents=True)
    for library in libraries.glob("libxrt_*.so.2"):
        if library.name != "libxrt_swemu.so.2":
            (lib / library.name).symlink_to(library)
    with tempfile.TemporaryDirectory(dir=runtime.directory) as scratch:
        _relink_swemu(Path(scratch), libraries, lib / "libxrt_swemu.so.2")


def _relink_swemu(scratch, libraries, output):
    """Links Debian's objects again, with one function replaced (shim_repair.cpp)."""
    _output(["ar", "x", libraries / "libxrt_swemu.a"], cwd=scratch)
    objects = sorted(scratch.glob("*.o"))
    shim = scratch / "shim.cxx.o"
    if ALLOC_VOID not in _output(["nm", shim]):
        raise RuntimeUnavailable(f"libxrt_swemu.a: shim.cxx.o has no {ALLOC_VOID}")
    _output(["objcopy", f"--weaken-symbol={ALLOC_VOID}", shim])
    repair = scratch / "repair.o"
    compile_cpp(["-O2", "-fPIC", "-c", HERE / "shim_repair.cpp", "-o", repair])
    # Runtime libraries are given by name, so development packages are not needed.
    needed = ("libuuid.so.1", "libboost_filesystem.so.1.74.0", "libprotobuf.so.32")
    compile_cpp(
        [
            *("-shared", "-Wl,-Bsymbolic", "-Wl,-soname,libxrt_swemu.so.2"),
            *("-o", output, repair, *objects, "-lxrt_coreutil"),
            *(f"-l:{name}" for name in needed),
            "-lpthread",
        ]
    )


def _configuration():
    """Returns ``EMCONFIG_PATH``/emconfig.json, the description of the devices."""
    board = {
        "NumBoards": str(NUM_DEVICES),
        "Devices": [{"Name": PLATFORM, "DdrBanks": [{"Size": "2GB"}]}],
    }
    return {
        "Version": {"FileVersion": "2.0", "ToolVersion": "2022.1"},
        "Platform": {
            "UnifiedPlatform": "true",
            "ExpandedPR": "true",
            "Boards": [board],
        },
    }


def _output(command, cwd=None):
    result = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, check=False
    )
    if result.returncode:
        line = " ".join(map(str, command))
        raise RuntimeError(f"{line}\nexit {result.returncode}\n{result.stderr[-4000:]}")
    return result.stdout.strip()
