"""Handlers that copy on a stream, on a device whose copies are late.

The steps are in ``late_device_steps.cpp``. That they can go wrong is shown by removing
each wait.
"""

import re
import subprocess

import late_device
import pytest
from families import family

WAYS = (
    "steps",
    "complete",
    "streams",
    "closing",
    "limit",
    "failures",
    "memory",
    "forgotten",
)
WAITS = {
    "gradients have arrived": (
        "driver.event_synchronize(transfer->landing->event)",
        "steps",
    ),
    "results are complete": (
        "driver.wait_for_value(call.stream, address(results->memory), transfer->turn,\n"
        "                            jaxinf_cuda::at_least)",
        "complete",
    ),
    "results have left": (
        "driver.wait_for_event(call.stream, transfer->results->event, 0)",
        "streams",
    ),
    "results have left before their memory is freed": (
        "driver.event_synchronize(block->event)",
        "closing",
    ),
}
FAILING = (
    *("cuCtxPushCurrent", "cuEventCreate", "cuEventRecord", "cuEventSynchronize"),
    *("cuMemHostAlloc", "cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync", "cuStreamGetCtx"),
    *("cuStreamWaitEvent", "cuStreamWaitValue32"),
)


def ran(program, way):
    command = [program, late_device.driver(), way]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    program = tmp_path_factory.mktemp("late") / "steps"
    return late_device.compiled(program, "late_device_steps.cpp")


@pytest.mark.parametrize("way", WAYS)
def test_steps_on_a_late_device(steps, way):
    result = ran(steps, way)
    assert result.returncode == 0, result.stdout + result.stderr
    if way == "failures":
        assert not {*FAILING} - {*result.stdout.split()}


@pytest.mark.long
@pytest.mark.parametrize("wait", family(WAITS, short=["results have left"]))
def test_without_a_wait_data_is_wrong(tmp_path, wait):
    text, way = WAITS[wait]
    source = (late_device.CPP / "stream_calls.cpp").read_text()
    assert source.count(text) == 1
    (tmp_path / "changed.cpp").write_text(source.replace(text, "0"))
    program = late_device.compiled(
        tmp_path / "steps",
        "late_device_steps.cpp",
        defines=f'-DSTREAM_CALLS="{tmp_path}/changed.cpp"',
    )
    result = ran(program, way)
    assert result.returncode == 1
    wrong = r"wrong: (the (update|status) of step|a gradient that|an odd array that)"
    assert re.match(wrong, result.stdout)
