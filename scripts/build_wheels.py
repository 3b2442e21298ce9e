"""Builds the published files: an sdist, and from it a wheel for each machine.

The wheels have the kernels of `standard_kernels` for every level of a processor,
and run on any Linux with glibc 2.28 or newer. Nothing is downloaded. This machine's
wheel is compiled by its own compiler, whose kernels are faster in memory, and others by
Zig. ``build_wheels.py DIRECTORY [MACHINE …]``; ``make wheels`` calls it.
"""

import os
import platform
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[1]
MACHINES = ("x86_64", "aarch64")
GLIBC = (2, 28)
MOST_BYTES = 20 << 20


def main() -> None:
    directory, *machines = sys.argv[1:]
    out = Path(directory).absolute()
    for old in (*out.glob("jaxinf-*.whl"), *out.glob("jaxinf-*.tar.gz")):
        old.unlink()
    run([sys.executable, "-m", "build", "--sdist", "--no-isolation", "-o", str(out)])
    (sdist,) = out.glob("jaxinf-*.tar.gz")
    for machine in machines or MACHINES:
        began = time.monotonic()
        wheel = build(sdist, machine, out)
        check(wheel, machine)
        size = wheel.stat().st_size / 2**20
        print(f"{wheel.name}: {size:.1f} MiB in {time.monotonic() - began:.0f} s")


def build(sdist: Path, machine: str, out: Path) -> Path:
    """Builds a wheel from the sdist, as a user's pip would."""
    zig = str(metadata.distribution("ziglang").locate_file("ziglang/zig"))
    settings = {
        "JAXINF_MANYLINUX": "{}_{}".format(*GLIBC),
        "_PYTHON_HOST_PLATFORM": f"linux-{machine}",
    }
    if machine != platform.machine():
        settings["CXX"] = zig
    with tempfile.TemporaryDirectory(prefix="jaxinf-wheel-") as place:
        with tarfile.open(sdist) as file:
            file.extractall(place, filter="data")
        (source,) = Path(place).iterdir()
        pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
        command = [*pip, "--no-build-isolation", "-w", str(out), str(source)]
        run(command, os.environ | settings)
    (wheel,) = out.glob(f"jaxinf-*_{machine}.whl")
    return wheel


def check(wheel: Path, machine: str) -> None:
    """Fails unless auditwheel finds no newer glibc, and the wheel is small."""
    command = [sys.executable, "-m", "auditwheel", "show", str(wheel)]
    told = run(command).stdout
    tag = rf'following platform tag: "manylinux_(\d+)_(\d+)_{machine}"'
    found = re.search(tag, " ".join(told.split()))
    if found is None or tuple(map(int, found.groups())) > GLIBC:
        raise SystemExit(f"{wheel.name}: expected glibc 2.28 or older, found:\n{told}")
    if wheel.stat().st_size > MOST_BYTES:
        raise SystemExit(f"{wheel.name}: expected at most 20 MiB")


def run(
    command: list[str], environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a command that must succeed."""
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if result.returncode:
        raise SystemExit(f"{' '.join(command)}\n{result.stdout}{result.stderr}")
    return result


if __name__ == "__main__":
    main()
