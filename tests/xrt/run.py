"""Runs test files on the real XRT runtime, each in a sandbox; builds what they need.

    JAXINF_TEST_XRT=DIRECTORY python tests/xrt/run.py FILE… [-- PYTEST-OPTION…]

A process that a file leaves fails it. What is built is in DIRECTORY.
"""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from swemu.build import NUM_DEVICES, RuntimeUnavailable, build_runtime, build_xclbin
from swemu.sandbox import Sandbox
from swemu.table import units

from jaxinf.kernels import named_card_kernel
from jaxinf.kernels.card_library import card_library

LIMIT_S = 1200
PYTEST = Path(sys.executable).with_name("pytest")
KINDS = {
    # Of the engine's tests.
    "sgd_momentum": (
        "f32_update_f32", "bf16_bf16_f32", "f32_update_f32_topk",
    ),
    # Of the contract's cases.
    "adamw": (
        "f32_update_f32", "bf16_bf16_f32", "f16_f16_int8",
        "f32_update_bf16", "f32_update_int8",
    ),
    "lion": ("f32_update_int8",),
    "adagrad": ("f32_update_f32",),
    "rmsprop": ("f32_update_int8",),
    # Of training runs.
    "adamw_clipped_schedule": ("f32_update_f32",),
    "adamw_schedule": ("f32_update_f32",),
}  # fmt: skip


def build_cards(directory):
    """Builds the cards' own kernels; returns how jaxinf and its tests find them."""
    cards = [
        [named_card_kernel(f"jaxinf_{body}_{kind}") for kind in kinds]
        for body, kinds in KINDS.items()
    ]
    with ThreadPoolExecutor() as pool:
        libraries = list(pool.map(lambda ones: card_library(*ones), cards))
    compute_units = units([card for ones in cards for card in ones])
    return {
        "JAXINF_XCLBIN": str(build_xclbin(directory, compute_units, libraries)),
        "JAXINF_XRT_DEVICES": str(NUM_DEVICES),
        "JAXINF_TEST_CSD": "smartssd",
        "JAXINF_TEST_XRT": str(directory),
    }


def run_file(file, options, runtime, variables):
    """Runs a file's tests and prints what they say; whether all is well."""
    sandbox = Sandbox(runtime)
    try:
        command = [str(PYTEST), *options, file]
        finished = sandbox.run(command, limit_s=LIMIT_S, **variables)
    finally:
        left = sandbox.close()
    late = f"\nkilled after {LIMIT_S} s" if finished.timed_out else ""
    print(finished.output + late, *(f"left: {line}" for line in left), sep="\n")
    # Of a part of the tests a file may have none.
    is_well = finished.status in (
        pytest.ExitCode.OK,
        pytest.ExitCode.NO_TESTS_COLLECTED,
    )
    return is_well and not left


def main(words):
    """Runs files side by side; returns the exit status."""
    directory = Path(os.environ["JAXINF_TEST_XRT"]).resolve()
    directory.mkdir(parents=True, exist_ok=True)
    number = words.index("--") if "--" in words else len(words)
    files, options = words[:number], words[number + 1 :]
    try:
        runtime = build_runtime(directory)
    except RuntimeUnavailable as error:
        sys.exit(f"tests/xrt cannot run here: {error}")
    variables = build_cards(directory)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        ran = pool.map(lambda file: run_file(file, options, runtime, variables), files)
        return 0 if all([*ran]) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
