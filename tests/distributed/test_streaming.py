"""`jaxinf.stream` in several processes: the bits of one, and ends that are shared."""

import re
from pathlib import Path

import numpy as np
import pytest
from families import LONG
from processes import losses, running
from shim import built_shim

pytestmark = pytest.mark.optimized("long")

MIXED = ("--stream", "--layout", "mixed")

FORMS = {
    "plain": [],
    "clipped": ["--optimizer", "clip"],
    "int8": ["--dtype", "bfloat16", "--options", '{"state": "int8"}'],
    "parts": ["--micro-batches", 2, "--optimizer", "clip"],
    "compressed": ["--compress", 0.05, "--init", "traced"],
    "every third": ["--options", '{"durability": 3}', "--memory", "30MiB"],
}
FEW = [("fsdp", "clipped"), ("replicated", "parts")]
LAYOUTS = ("fsdp", "mixed", "replicated")
ALL = [(layout, form) for layout in LAYOUTS for form in FORMS]


def streamed(place: Path, *arguments, **options):
    return running(place, place / "store", *arguments, **options)


def line(output: str, name: str) -> str:
    return re.search(rf"^{name} (.*)", output, re.M).group(1)


def bytes_of(output: str, name: str) -> np.ndarray:
    return np.array([int(number) for number in line(output, name).split()])


@pytest.mark.parametrize(("layout", "form"), ALL if LONG else FEW)
def test_two_processes_give_the_bits_of_one(alone, tmp_path, layout, form):
    arguments = ("--stream", "--layout", layout, *FORMS[form])
    expected = alone(*arguments)
    with streamed(tmp_path, *arguments) as processes:
        assert processes.wait() == [0, 0], processes
    for output in processes.outputs():
        assert losses(output) == losses(expected)
        assert line(output, "state") == line(expected, "state")
        if form != "int8":  # scales of short chunks take whole pages
            assert line(output, "moved") == line(output, "planned")
        if form != "every third":  # gradients that wait are whole
            share = bytes_of(output, "moved") / bytes_of(expected, "moved")
            assert max(share) < 0.52, share


@pytest.mark.skipif(not LONG, reason="more devices; JAXINF_FAULTS=long")
@pytest.mark.parametrize(
    ("layout", "count", "num_devices"), [("mesh2d", 2, 2), ("replicated", 4, 1)]
)
def test_more_devices_give_nearly_the_losses_of_one(
    alone, tmp_path, layout, count, num_devices
):
    arguments = ("--stream", "--layout", layout, *FORMS["clipped"])
    expected = alone(*arguments, num_devices=count * num_devices)
    shape = {"count": count, "num_devices": num_devices}
    with streamed(tmp_path, *arguments, **shape) as processes:
        assert processes.wait() == [0] * count, processes
    found = [losses(output) for output in processes.outputs()]
    assert all(one == found[0] for one in found)
    pairs = zip(numbers(found[0]), numbers(losses(expected)), strict=True)
    np.testing.assert_allclose(*zip(*pairs, strict=True), rtol=1e-6)


def numbers(found: dict[int, str]) -> np.ndarray:
    bits = [int(text, 16) for _, text in sorted(found.items())]
    return np.array(bits, np.uint32).view(np.float32)


def goes_on(alone, place, before, at=None):
    """Checks that a run of six steps that was ended goes on with its bits."""
    expected = alone(*MIXED, "--steps", 6)
    second = place / "second"
    second.mkdir()
    arguments = (place / "store", *MIXED, "--steps", 6)
    with running(second, *arguments) as after:
        assert after.wait() == [0, 0], f"{before}\n{after}"
    begun = {int(line(output, "at")) for output in after.outputs()}
    assert len(begun) == 1, after
    assert at in (None, *begun), after
    for output in after.outputs():
        assert line(output, "state") == line(expected, "state")
    for output in (*before.outputs(), *after.outputs()):
        for step, bits in losses(output).items():
            assert bits == losses(expected)[step], f"{before}\n{after}"


def test_ctrl_c_in_one_process_ends_the_same_step_in_all(alone, tmp_path):
    own = {1: ["--interrupt", "18"]}
    with streamed(tmp_path, *MIXED, "--steps", 2000, own=own) as processes:
        assert processes.wait() == [1, -2], processes
    ended = [max(losses(output)) + 1 for output in processes.outputs()]
    assert ended[0] == ended[1], processes
    told = f"step {ended[0] + 1}: process 1 was interrupted .*stays at step {ended[0]}"
    assert re.search(f"ProcessError: .*{told}", processes.output(0)), processes
    assert "KeyboardInterrupt" in processes.output(1), processes
    goes_on(alone, tmp_path, processes, ended[0])


CALLS = ["preadv:params.down", "pwritev:mu.down"]


@pytest.mark.parametrize("call", CALLS if LONG else CALLS[:1])
def test_a_drive_error_of_one_process_ends_the_same_step_in_all(alone, tmp_path, call):
    variables = {"LD_PRELOAD": str(built_shim(tmp_path))}
    own = {1: ["--fail", f"3:{call}"]}
    arguments = (*MIXED, "--steps", 2000)
    with streamed(tmp_path, *arguments, own=own, variables=variables) as processes:
        assert 0 not in processes.wait(), processes
    for output in processes.outputs():
        assert max(losses(output)) == 2, processes
    name = call.partition(":")[2]
    why = rf"process-00001/\S+/{name}/\S+: (read|write) at byte \d+ failed: Input/outp"
    assert re.search(f"StoreIOError: .*{why}", processes.output(1)), processes
    told = f"another process of the run failed: process 1: StoreIOError: .*{why}"
    assert re.search(f"ProcessError: .*{told}", processes.output(0)), processes
    if LONG:
        goes_on(alone, tmp_path, processes, 3)
