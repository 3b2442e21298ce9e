"""A run in several processes gives the bits of one with the same mesh."""

import re

import numpy as np
import pytest
from families import LONG
from processes import losses, running
from shim import built_shim

pytestmark = pytest.mark.optimized("long")

FORMATS = {
    "fp32": [],
    "int8": ["--dtype", "bfloat16", "--options", '{"state": "int8"}'],
    "compressed": ["--compress", "0.05"],
    "traced": ["--init", "traced"],
    "every third": ["--options", '{"durability": 3}'],
    "little memory": ["--options", '{"durability": 3, "memory_bytes": 3000000}'],
}
TWO = [
    ("fsdp", "little memory"),
    ("mixed", "int8"),
    # Compiled as a run is: without optimizations its bits differ by the processes.
    pytest.param("replicated", "compressed", marks=pytest.mark.optimized),
]
MORE = [
    (layout, form) for layout in ("fsdp", "mixed", "replicated") for form in FORMATS
]


@pytest.mark.parametrize(("layout", "form"), MORE if LONG else TWO)
def test_two_processes_give_the_bits_of_one(alone, tmp_path, layout, form):
    arguments = ("--layout", layout, *FORMATS[form])
    expected = alone(*arguments)
    with running(tmp_path, tmp_path / "store", *arguments) as processes:
        assert processes.wait() == [0, 0], processes
        for output in processes.outputs():
            assert losses(output) == losses(expected)
            assert _state(output) == _state(expected)
        written = [_written(output) for output in processes.outputs()]
    assert max(written) < 0.52 * _written(expected)


SHAPES = [("mesh2d", 2, 2), ("mixed", 2, 2), ("replicated", 4, 1), ("fsdp", 4, 2)]


@pytest.mark.parametrize(
    ("layout", "count", "num_devices"), SHAPES if LONG else SHAPES[:1]
)
def test_more_devices_give_nearly_the_losses_of_one_process(
    alone, tmp_path, layout, count, num_devices
):
    expected = alone("--layout", layout, num_devices=count * num_devices)
    arguments = (tmp_path / "store", "--layout", layout)
    shape = {"count": count, "num_devices": num_devices}
    with running(tmp_path, *arguments, **shape) as processes:
        assert processes.wait() == [0] * count, processes
        found = [losses(output) for output in processes.outputs()]
    assert all(one == found[0] for one in found)
    np.testing.assert_allclose(_numbers(found[0]), _numbers(losses(expected)), 1e-6)


def test_another_run_goes_on_also_with_clocks_days_apart(alone, tmp_path):
    expected = losses(alone("--steps", 6, "--layout", "replicated"))
    arguments = (tmp_path / "store", "--layout", "replicated")
    wrong = {
        "variables": {"LD_PRELOAD": str(built_shim(tmp_path))},
        "own": {0: ["--clock", "86400"], 1: ["--clock", "-86400"]},
    }
    for steps, first, clocks in ((3, 0, {}), (6, 3, wrong)):
        with running(tmp_path, *arguments, "--steps", steps, **clocks) as processes:
            assert processes.wait() == [0, 0], processes
            for output in processes.outputs():
                assert f"at {first}\n" in output
                found = losses(output)
                assert found == {n: expected[n] for n in range(first, steps)}
            if clocks:
                late, early = (
                    int(re.search(r"^clock (\d+)", output, re.M).group(1))
                    for output in processes.outputs()
                )
                assert late - early > 170_000


def test_what_a_step_carries_is_that_of_one_run_after_kills(alone, tmp_path):
    words = ("--layout", "mixed", "--carry")
    expected = alone("--steps", 6, *words)
    arguments = (tmp_path / "store", *words, "--steps", 6)
    for victim, kill in ((1, "flip:2:before"), (0, "record:2:after")):
        own = {victim: ["--kill", kill]}
        with running(tmp_path, *arguments, own=own) as processes:
            assert processes.all[victim].wait(120) == -9, processes
            processes.kill()
    with running(tmp_path, *arguments) as processes:
        assert processes.wait() == [0, 0], processes
        for output in processes.outputs():
            assert _carried(output) == _carried(expected)
            assert _state(output) == _state(expected)


def _carried(output):
    words = r"^carried (\S+) (\S+) in memory (\S+)"
    stored, row, memory = re.search(words, output, re.M).groups()
    assert stored == memory
    return stored, row


def _state(output):
    return re.search(r"^state (\w+)", output, re.M).group(1)


def _written(output):
    return int(re.search(r"^written (\d+)", output, re.M).group(1))


def _numbers(found):
    bits = [int(text, 16) for _, text in sorted(found.items())]
    return np.array(bits, np.uint32).view(np.float32)
