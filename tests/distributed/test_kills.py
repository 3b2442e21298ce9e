"""Processes that are killed at each point leave a run that goes on with its bits.

The campaign, with a table of kills by point:

    JAXINF_FAULTS=long .venv/bin/pytest -n 2 -rP tests/distributed/test_kills.py
"""

import contextlib
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from distributed_program import POINTS
from families import LONG
from processes import PROGRAM, losses, ran, running

from jaxinf.cli.commands import main

pytestmark = pytest.mark.optimized("long")

FRESH = ("create", "initialise", "checkpoint")
ONCE = (*FRESH, "recover", "restore")
FEW = {
    "update": [
        ("meet:3:before", 0),
        ("flip:1:before", 0),
        ("recover:1:after", 1),
        ("restore:1:after", 0),
        ("checkpoint:1:before", 1),
    ],
    "stream": [("create:1:after", 1), ("update:9:after", 1)],
}
LAST = 30 if LONG else 14
MORE = ("--more", 2, "--checkpoint-at", 1)
RUNS = [("update", 2, "mixed"), ("stream", 2, "mixed")]
RUNS += [("update", 3, "replicated")] if LONG else []


def campaign(count):
    """Each point, before and behind it, in each process, in an order by chance.

    The next run meets what a kill has left, and is often killed while it recovers.
    """
    draw = np.random.default_rng(count)
    kills = [
        (f"{point}:{1 if point in ONCE else draw.integers(1, 3)}:{when}", victim)
        for point in POINTS
        for when in ("before", "after")
        for victim in range(count)
    ]
    return [kills[n] for n in draw.permutation(len(kills))]


@pytest.mark.timeout(5400)
@pytest.mark.parametrize(("mode", "count", "layout"), RUNS)
def test_a_kill_anywhere_leaves_one_step_in_all_members(
    alone, tmp_path, mode, count, layout
):
    words = ("--layout", layout, *["--stream"] * (mode == "stream"))
    expected = losses(alone("--steps", LAST, *words, num_devices=count))
    shape = {"count": count, "program": (PROGRAM, *words)}
    killed, store, at = Counter(), None, LAST
    for kill, victim in campaign(count) if LONG else FEW[mode]:
        point, _, when = kill.split(":")
        kept = [] if store is None else store.glob("process-*/checkpoints/kept")
        lacks = point == "restore" and len([*kept]) < count
        if point in FRESH or lacks or at > LAST - 6:
            if store is not None:
                goes_on(tmp_path, store, expected, shape)
            store, at = tmp_path / f"store-{len(list(tmp_path.iterdir()))}", 0
            if lacks:
                goes_on(tmp_path, store, expected, shape)
        options = ["--options", '{"restore": "kept"}'] if point == "restore" else []
        arguments = (store, *MORE, *options)
        own = {victim: ["--kill", kill]}
        with running(tmp_path, *arguments, own=own, **shape) as processes:
            while all(one.poll() is None for one in processes.all):
                time.sleep(0.02)
            died = processes.all[victim].wait() == -9
            if died:
                killed[point, when] += 1
                time.sleep(0.3)
            else:
                assert processes.wait() == [0] * count, f"{kill}\n{processes}"
            processes.kill()
            at = max(at, check(processes, expected, kill) + 2)
        print(f"{kill} of process {victim}: {'killed' if died else 'not reached'}")
    goes_on(tmp_path, store, expected, shape)
    print(f"| {mode}, {count} processes, killed at | before | after |\n|---|---|---|")
    for point in POINTS:
        print(f"| {point} | {killed[point, 'before']} | {killed[point, 'after']} |")
    left = orphans(tmp_path)
    print(f"{killed.total()} kills, {len(left)} orphans, 0 differing bits")
    assert not left
    assert killed.total() >= (20 * count if LONG else len(FEW[mode]) - 1)


def goes_on(place, store, expected, shape):
    after = ran(place, store, *MORE, **shape)
    check(after, expected, "after the kills")
    assert main(["verify", str(store)]) == 0


def orphans(place):
    """Returns the processes that are left of programs with files in a place."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            line = (process / "cmdline").read_bytes()
            found += [line] if bytes(place) in line else []
    return found


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
