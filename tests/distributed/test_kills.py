"""Processes that are killed at each point leave a run that goes on with its bits."""

import time
from collections import Counter

import numpy as np
import pytest
from distributed_program import POINTS
from places import LONG
from processes import losses, running

FRESH = ("create", "initialise", "checkpoint")
ONCE = (*FRESH, "recover", "restore")
FEW = [
    ("create:1:after", 1),
    ("meet:1:before", 0),
    ("record:2:after", 1),
    ("flip:1:before", 0),
    ("recover:1:after", 1),
    ("restore:1:after", 0),
]
LAST = 30


def campaign():
    """Each point, before and behind it, in each process, at several of its calls."""
    draw = np.random.default_rng(0)
    for point in POINTS:
        for when in ("before", "after"):
            for victim in (0, 1):
                for _ in range(3):
                    number = 1 if point in ONCE else draw.integers(1, 3)
                    yield f"{point}:{number}:{when}", victim


@pytest.mark.timeout(5400)
@pytest.mark.parametrize("count", [2, 3] if LONG else [2])
def test_a_kill_anywhere_leaves_one_step_in_all_members(alone, tmp_path, count):
    expected = losses(alone("--steps", LAST, num_devices=count))
    killed, name, at = Counter(), 0, LAST
    kills = [*campaign()][count % 2 :: 1 if count == 2 else 2] if LONG else FEW
    for kill, victim in kills:
        point = kill.partition(":")[0]
        if point in FRESH or at > LAST - 6:
            name += 1
        store = tmp_path / f"store-{name}"
        options = []
        if point == "restore" and (store / "process-00000/checkpoints/kept").exists():
            options = ["--options", '{"restore": "kept"}']
        arguments = (store, "--more", 2, "--checkpoint-at", 1, *options)
        own = {victim: ["--kill", kill]}
        with running(tmp_path, *arguments, count=count, own=own) as processes:
            while all(one.poll() is None for one in processes.all):
                time.sleep(0.02)
            died = processes.all[victim].wait() == -9
            if died:
                killed[point] += 1
                time.sleep(0.3)
            else:
                processes.wait()
            processes.kill()
            check(processes, expected, kill)
        with running(tmp_path, *arguments[:5], count=count) as after:
            assert after.wait() == [0] * count, f"{kill} of {victim}\n{after}"
            at = check(after, expected, kill) + 2
        print(f"{kill} of process {victim}: {'killed' if died else 'not reached'}")
    print(f"{count} processes, kills by point: {dict(killed)}, {killed.total()} in all")
    assert killed.total() >= (60 if LONG else 5)


def check(processes, expected, kill):
    """Compares all losses that were printed; returns the step that all began at."""
    lines = [line for text in processes.outputs() for line in text.splitlines()]
    begun = {int(line.split()[1]) for line in lines if line.startswith("at ")}
    assert len(begun) < 2, f"{kill}: members are at different steps\n{processes}"
    for output in processes.outputs():
        for step, bits in losses(output).items():
            same = bits == expected[step]
            if len(processes.all) > 2:  # more participants than two sum in any order
                numbers = [int(text, 16) for text in (bits, expected[step])]
                values = np.array(numbers, np.uint32).view(np.float32)
                same = abs(values[0] - values[1]) <= 1e-5 * values[1]
            assert same, f"{kill}, step {step}\n{processes}"
    return max(begun, default=0)
