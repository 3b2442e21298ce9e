"""What follows the death, or the silence, of one process: no other stays for long."""

import re
import signal
import time

import pytest
from families import LONG
from processes import losses, ran, running

pytestmark = pytest.mark.optimized("long")

only_long = pytest.mark.skipif(not LONG, reason="takes heartbeats; JAXINF_FAULTS=long")
PACE = ("--steps", 40, "--pace", 0.3, "--layout", "replicated")
QUICK = ("--limit", 8)
_START_S = 40  # of a process, on a busy machine


def seconds_to_end(processes, number):
    began_s = time.monotonic()
    status = processes.all[number].wait(90)
    print(f"process {number}: {time.monotonic() - began_s:.1f} s, status {status}")
    return status


def test_a_process_that_hangs_in_a_commit_is_named_and_the_others_end(tmp_path):
    own = {2: ["--hang", "sync:3"]}
    arguments = (tmp_path / "store", *PACE, *QUICK)
    with running(tmp_path, *arguments, own=own, count=3) as processes:
        for number in (0, 1):  # neither is aborted when the other one ends
            assert seconds_to_end(processes, number) == 1, processes
            assert "ProcessError" in processes.output(number), processes
            assert "found none of process 2" in processes.output(number), processes
        assert seconds_to_end(processes, 2) == -6  # by JAX: the service is gone


@pytest.mark.parametrize(
    ("victim", "point"),
    [
        (1, "meet:4"),
        (1, "checkpoint:1"),
        pytest.param(0, "meet:4", marks=only_long),
        pytest.param(0, "checkpoint:1", marks=only_long),
    ],
)
def test_a_process_that_is_stopped_is_named_and_nothing_is_half_committed(
    alone, tmp_path, victim, point
):
    """It stops where the others wait for it: in a barrier, or in what all agree on."""
    expected = losses(alone("--steps", 8, "--layout", "replicated"))
    arguments = (tmp_path / "store", "--layout", "replicated")
    limits = (*QUICK, "--heartbeat", 90)
    own, other = {victim: ["--stop", point]}, 1 - victim
    first = (*arguments, *limits, "--steps", 6, "--checkpoint-at", 3)
    with running(tmp_path, *first, own=own) as processes:
        status = processes.all[other].wait(_START_S + 2 * QUICK[1])
        assert status == 1, processes  # not by JAX's heartbeats, after longer
        named = rf"ProcessError: .*(of process|process) {victim}\b"
        assert re.search(named, processes.output(other)), processes
        assert processes.all[victim].poll() is None, processes
        processes.all[victim].send_signal(signal.SIGCONT)
        assert seconds_to_end(processes, victim) not in (0, None), processes
    place = tmp_path / "second"
    place.mkdir()
    after = ran(place, *arguments, "--more", 2)
    found = [losses(output) for output in after.outputs()]
    assert found[0] == found[1]
    assert 2 <= min(found[0]) <= 4, after
    assert all(bits == expected[step] for step, bits in found[0].items()), after


@only_long
@pytest.mark.parametrize(
    ("victim", "number"),
    [(0, signal.SIGKILL), (1, signal.SIGKILL), (0, signal.SIGINT), (1, signal.SIGINT)],
)
def test_the_others_end_when_one_does(tmp_path, victim, number):
    with running(tmp_path, tmp_path / "store", *PACE) as processes:
        processes.wait_for("loss 2", 1 - victim)
        processes.all[victim].send_signal(number)
        assert seconds_to_end(processes, 1 - victim) not in (0, None), processes
        assert seconds_to_end(processes, victim) not in (0, None), processes
        if number == signal.SIGINT:
            assert "KeyboardInterrupt" in processes.output(victim)


@only_long
def test_a_process_that_was_stopped_writes_nothing_that_counts(alone, tmp_path):
    expected = losses(alone("--steps", 40, "--layout", "replicated"))
    store = tmp_path / "store"
    with running(tmp_path, store, *PACE) as processes:
        processes.wait_for("loss 3", 1)
        processes.all[1].send_signal(signal.SIGSTOP)
        assert seconds_to_end(processes, 0) not in (0, None)
        place = tmp_path / "second"
        place.mkdir()
        arguments = (store, "--more", 2, "--layout", "replicated")
        with running(place, *arguments) as refused:
            assert 0 not in refused.wait()
            for output in refused.outputs():
                assert f"locked by process {processes.all[1].pid}" in output, refused
        processes.all[1].send_signal(signal.SIGCONT)
        assert seconds_to_end(processes, 1) not in (0, None)
    after = ran(place, *arguments)
    for output in after.outputs():
        for step, bits in losses(output).items():
            assert bits == expected[step], after
