"""Runs in several processes have the bits of one with the same mesh, and one end."""

import re

import pytest
from families import LONG
from processes import assert_nearly, line, losses, ran, running
from shim import built_shim

pytestmark = pytest.mark.optimized("long")

INT8 = ["--dtype", "bfloat16", "--options", '{"state": "int8"}']
FORMS = {
    "update": {
        "fp32": [],
        "int8": INT8,
        "compressed": ["--compress", "0.05"],
        "traced": ["--init", "traced"],
        "every third": ["--options", '{"durability": 3}'],
        "little memory": ["--options", '{"durability": 3, "memory_bytes": 3000000}'],
    },
    "stream": {
        "plain": [],
        "clipped": ["--optimizer", "clip"],
        "int8": INT8,
        "parts": ["--micro-batches", 2, "--optimizer", "clip"],
        "compressed": ["--compress", 0.05, "--init", "traced"],
        "every third": ["--options", '{"durability": 3}', "--memory", "30MiB"],
    },
}
FEW = [
    ("update", "fsdp", "little memory"),
    ("update", "mixed", "int8"),
    # Compiled as a run is: without optimizations its bits differ by the processes.
    pytest.param("update", "replicated", "compressed", marks=pytest.mark.optimized),
    ("stream", "fsdp", "clipped"),
    ("stream", "replicated", "parts"),
]
ALL = [
    (mode, layout, form)
    for mode, forms in FORMS.items()
    for layout in ("fsdp", "mixed", "replicated")
    for form in forms
]


def words_of(mode, layout, form=None):
    own = [] if form is None else FORMS[mode][form]
    return ("--layout", layout, *["--stream"] * (mode == "stream"), *own)


def moved(output, name="moved"):
    return [int(number) for number in line(output, name).split()]


@pytest.mark.parametrize(("mode", "layout", "form"), ALL if LONG else FEW)
def test_two_processes_give_the_bits_of_one(alone, tmp_path, mode, layout, form):
    words = words_of(mode, layout, form)
    expected = alone(*words)
    processes = ran(tmp_path, tmp_path / "store", *words)
    for output in processes.outputs():
        assert losses(output) == losses(expected)
        assert line(output, "state") == line(expected, "state")
        name = "moved" if mode == "stream" else "written"
        if (mode, form) != ("stream", "every third"):  # gradients that wait are whole
            pairs = zip(moved(output, name), moved(expected, name), strict=True)
            assert max(one / whole for one, whole in pairs) < 0.52
        if mode == "stream" and form != "int8":  # scales of short chunks: whole pages
            assert moved(output) == moved(output, "planned")


SHAPES = [("update", "mesh2d", 2, 2), ("update", "mixed", 2, 2)]
SHAPES += [("update", "replicated", 4, 1), ("update", "fsdp", 4, 2)]
SHAPES += [("stream", "mesh2d", 2, 2), ("stream", "replicated", 4, 1)]


@pytest.mark.parametrize(
    ("mode", "layout", "count", "num_devices"), SHAPES if LONG else SHAPES[:1]
)
def test_more_devices_give_nearly_the_losses_of_one(
    alone, tmp_path, mode, layout, count, num_devices
):
    words = words_of(mode, layout, "clipped" if mode == "stream" else None)
    expected = losses(alone(*words, num_devices=count * num_devices))
    shape = {"count": count, "num_devices": num_devices}
    processes = ran(tmp_path, tmp_path / "store", *words, **shape)
    found = [losses(output) for output in processes.outputs()]
    assert all(one == found[0] for one in found)
    assert_nearly(found[0], expected)


def test_what_a_step_carries_is_that_of_one_run_after_kills(alone, tmp_path):
    words = (*words_of("update", "mixed"), "--carry", "--steps", 6)
    expected, arguments = alone(*words), (tmp_path / "store", *words)
    for victim, kill in ((1, "flip:2:before"), (0, "record:2:after")):
        own = {victim: ["--kill", kill]}
        with running(tmp_path, *arguments, own=own) as processes:
            assert processes.all[victim].wait(120) == -9, processes
            processes.kill()
    processes = ran(tmp_path, *arguments)
    for output in processes.outputs():
        stored, *_, memory = line(output, "carried").split()
        assert stored == memory
        assert line(output, "carried") == line(expected, "carried")
        assert line(output, "state") == line(expected, "state")


# --- ends of streamed steps ---------------------------------------------------------

MIXED = words_of("stream", "mixed")


def goes_on(alone, place, before, at):
    expected = alone(*MIXED, "--steps", 6)
    second = place / "second"
    second.mkdir()
    arguments = (place / "store", *MIXED, "--steps", 6)
    after = ran(second, *arguments)
    for output in after.outputs():
        assert line(output, "at") == str(at), after
        assert line(output, "state") == line(expected, "state")
    for output in (*before.outputs(), *after.outputs()):
        for step, bits in losses(output).items():
            assert bits == losses(expected)[step], f"{before}\n{after}"


def test_ctrl_c_in_one_process_ends_the_same_step_in_all(alone, tmp_path):
    arguments = (tmp_path / "store", *MIXED, "--steps", 2000)
    with running(tmp_path, *arguments, own={1: ["--interrupt", "18"]}) as processes:
        assert processes.wait() == [1, -2], processes
    ended = [max(losses(output)) + 1 for output in processes.outputs()]
    assert ended[0] == ended[1], processes
    told = f"step {ended[0] + 1}: process 1 was interrupted .*stays at step {ended[0]}"
    assert re.search(f"ProcessError: .*{told}", processes.output(0)), processes
    assert "KeyboardInterrupt" in processes.output(1), processes
    goes_on(alone, tmp_path, processes, ended[0])


CALLS = [("stream", "preadv:params.down"), ("update", "pwritev:params.up")]
CALLS += [("stream", "pwritev:mu.down")] * LONG


@pytest.mark.parametrize(("mode", "call"), CALLS)
def test_a_drive_error_of_one_process_ends_the_same_step_in_all(
    alone, tmp_path, mode, call
):
    variables = {"LD_PRELOAD": str(built_shim(tmp_path))}
    own = {1: ["--fail", f"3:{call}"]}
    words = (*words_of(mode, "mixed"), "--steps", 2000, "--pace", 0.3)
    arguments = (tmp_path / "store", *words)
    with running(tmp_path, *arguments, own=own, variables=variables) as processes:
        assert 0 not in processes.wait(), processes
    for output in processes.outputs():
        assert "in a collective" not in output, processes
        assert max(losses(output)) in ((2,) if mode == "stream" else (3, 4)), processes
    name = call.partition(":")[2]
    why = rf"process-00001/\S+/{name}/\S+: (read|write) at byte \d+ failed: Input/outp"
    assert re.search(f"StoreIOError: .*{why}", processes.output(1)), processes
    told = f"another process of the run failed: process 1: StoreIOError: .*{why}"
    assert re.search(f"ProcessError: .*{told}", processes.output(0)), processes
    if LONG and mode == "stream":
        goes_on(alone, tmp_path, processes, 3)
