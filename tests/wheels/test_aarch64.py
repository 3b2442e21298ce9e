"""Kernels for aarch64 under emulation: they have the bits of x86-64's.

A driver in C++ loads a library and repeats calls that were recorded here, where the
root is that of the table, as on aarch64. Arrays, checksums and the verdict on the
gradient must be the same, byte for byte.
"""

import platform
import shutil
import struct
import subprocess
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from jaxinf.kernels import Checksums
from jaxinf.kernels.calls import EntryPoint, array_fields, scalar_word, stored_arrays
from jaxinf.kernels.compiled import CompiledKernel, standard_kernels
from jaxinf.kernels.emitter import emit
from jaxinf.layout import CodedSlot
from jaxinf.native import libraries, toolchain

QEMU = "qemu-aarch64-static"
SYSROOT = Path("/usr/aarch64-linux-gnu")
NUM = 1003
FORMS = ["float32", "bfloat16", "float16", "int8 state", "bfloat16 state", "split"]

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="calls are recorded on x86-64"
)


def numbers(rng):
    values = rng.standard_normal(NUM) * np.exp(rng.uniform(-12, 3, NUM))
    special = rng.choice(np.float32([0, -0.0, 1e-40, -1e-38, 2e-38, 1e15, -1]), NUM)
    return np.where(rng.random(NUM) < 0.2, special, values).astype(np.float32)


def split(values):
    rest = np.zeros(NUM, np.int16)
    slot = CodedSlot(np.zeros(NUM, ml_dtypes.bfloat16), rest, 5)
    slot.encode(values)
    return slot


def coded(values, form):
    if form == "int8 state":
        scales = np.zeros(-(-NUM // 256), np.float32)
        slot = CodedSlot(np.zeros(NUM, np.uint8), scales, 3, 256)
    elif form == "bfloat16 state":
        slot = CodedSlot(np.zeros(NUM, ml_dtypes.bfloat16), None, 3, 256)
    else:
        return values
    slot.encode(values)
    return slot


def arguments_of(kernel, form):
    rng = np.random.default_rng(FORMS.index(form))
    dtype = {"bfloat16": ml_dtypes.bfloat16, "split": ml_dtypes.bfloat16}.get(form)
    dtype = np.float16 if form == "float16" else dtype or np.float32
    with np.errstate(over="ignore"):
        gradient = np.clip(numbers(rng), -6e4, 6e4).astype(dtype)
    params = numbers(rng)
    return {
        "gradient": gradient,
        "params": split(params) if form == "split" else params,
        "out": np.zeros(NUM, dtype),
        "slots": [coded(np.abs(numbers(rng)), form) for _ in kernel.slots],
        "scalars": [np.array(0.1).astype(d)[()] for d in kernel.scalar_dtypes],
    }


def contents(state):
    if isinstance(state, CodedSlot):
        beside = state.companion
        return state.codes.tobytes(), b"" if beside is None else beside.tobytes()
    return state.tobytes(), b""


def recorded(found, symbol, given):
    """Runs a call; returns it and its results, as the driver reads them."""
    states = [given["gradient"], given["params"], given["out"], *given["slots"]]
    before = [contents(state) for state in states]
    stored = len(stored_arrays([given["params"], *given["slots"]]))
    wanted = (True,) * stored
    sums = Checksums(wants_before=wanted, wants_after=wanted)
    finite = found.run(arrays=[], checksums=sums, **given)
    constants = found.constants
    scalars = [scalar_word(number) for number in given["scalars"]]
    numbers = (len(given["slots"]), len(scalars), len(constants), 2 * stored, finite, 0)
    parts = [struct.pack("<64sq6i", symbol.encode(), NUM, *numbers)]
    parts.append(
        struct.pack(f"<{len(scalars) + len(constants)}I", *scalars, *constants)
    )
    for state, old in zip(states, before, strict=True):
        _, _, dtype, key, first = array_fields(state)
        new = contents(state)
        assert [*map(len, old)] == [*map(len, new)]
        parts.append(struct.pack("<i3I2q", dtype, key, first, 0, *map(len, old)))
        parts += [*old, *new]
    parts.append(struct.pack(f"<{2 * stored}I", *sums.before, *sums.after))
    return b"".join(parts)


def record_all(path):
    compiler = toolchain.find_compiler()
    level = toolchain.levels()[0]
    num = 0
    with path.open("wb") as file:
        for kernel in standard_kernels().values():
            source = emit(kernel)
            given = source.text, level
            if "rsqrt" in source.text:
                text = f"#define JAXINF_ROOTS_BY_TABLE\n{source.text}"
                given = text, level, compiler
            function = libraries.load_function(*given)
            symbol = toolchain.entry_point(source.text)
            entry = EntryPoint(function)
            found = CompiledKernel(kernel, entry, source.constants)
            for form in FORMS:
                file.write(recorded(found, symbol, arguments_of(kernel, form)))
                num += 1
    return num


DRIVER = Path(__file__).with_name("driver.cpp")
FLAGS = ["-std=c++17", "-O1", "-fno-exceptions", "-fno-threadsafe-statics"]


def test_the_wheel_repeats_calls_with_the_bits_of_x86_64(wheels, tmp_path):
    wheel = wheels.of("aarch64")
    assert shutil.which(QEMU), f"{QEMU} is missing; make wheels installs it"
    assert SYSROOT.exists(), "libc6-arm64-cross is missing; make wheels installs it"
    with zipfile.ZipFile(wheel) as file:
        name = "jaxinf/native/prebuilt/jaxinf-armv8-a.so"
        library = Path(file.extract(name, tmp_path))
    driver, code = tmp_path / "driver", tmp_path / "driver.o"
    target = ["-target", "aarch64-linux-gnu.2.28"]
    compile_ = [wheels.zig, "c++", *target, *FLAGS, f"-I{toolchain.INCLUDE}"]
    toolchain.run_compiler([*compile_, "-c", str(DRIVER), "-o", str(code)])
    link = [wheels.zig, "cc", *target, str(code), "-ldl", "-o", str(driver)]
    toolchain.run_compiler(link)
    calls = tmp_path / "calls"
    num = record_all(calls)
    result = subprocess.run(
        [QEMU, "-L", str(SYSROOT), str(driver), str(library), str(calls)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.stdout.splitlines()[-1:] == [f"{num} calls, 0 differ"], result
    assert result.returncode == 0
