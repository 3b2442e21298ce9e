"""kill -9 at any moment leaves a whole committed step."""

import os
import random
import shutil
import signal
import subprocess
import sys

import pytest
import store_driver
from families import family
from store_driver import Driver

PROGRAM = store_driver.__file__
NUM_KILLS = 12


class Victim:
    """A process that trains a store; when it is killed, the next one continues."""

    def __init__(self, path, roots, memory, durability):
        how = [str(NUM_KILLS), str(memory), str(durability)]
        arguments = [sys.executable, PROGRAM, path, *how, *roots]
        self._process = subprocess.Popen(
            arguments, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self._pid = 0

    def _say(self):
        assert self._process.stdout is not None
        line = next(self._process.stdout)
        assert len(line.split()) == 2, line
        word, number = line.split()
        return word, int(number)

    def meet_next(self):
        """Waits for the next process; returns the last durable step before it."""
        step = 0
        while True:
            word, number = self._say()
            if word == "pid":
                self._pid = number
                return step
            step = number

    def kill(self, num_steps, delay_s):
        """Kills it some time after a number of commits, and stops its successor."""
        for _ in range(num_steps):
            word, _ = self._say()
            assert word == "durable"
        self._process.send_signal(signal.SIGSTOP)  # no successor before the check
        signal.sigtimedwait([], delay_s)
        os.kill(self._pid, signal.SIGKILL)

    def go_on(self):
        self._process.send_signal(signal.SIGCONT)

    def end(self):
        os.killpg(self._process.pid, signal.SIGKILL)
        with self._process:
            pass


@pytest.fixture
def victim(place):
    """Starts victims of a store on a number of CSD roots."""
    victims = []

    def start(num_csds, memory, durability):
        roots = [place / f"csd{csd}" for csd in range(num_csds)]
        for root in roots:
            root.mkdir()
        victims.append(Victim(place / "store", roots, memory, durability))
        return victims[-1]

    yield start
    for item in victims:
        item.end()


PART, ALL = 400_000, 1 << 20
"""Memory in which a part of the state stays, or all of it."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("num_csds", "memory", "durability"),
    family(
        [(0, PART, 1), (3, ALL, 1), (0, PART, 3), (3, ALL, 3)], short=[(0, PART, 3)]
    ),
)
def test_killed_at_random_moments(place, victim, num_csds, memory, durability):
    process = victim(num_csds, memory, durability)
    process.meet_next()
    moments = random.Random(num_csds + memory)
    last = 0
    for number in range(NUM_KILLS - 1):
        # A step takes some 10 ms: the delay reaches all stages of the next ones.
        process.kill(1 + number % 3, moments.random() * 0.03)
        driver = reopened(place / "store")
        assert driver.store.step >= last
        last = driver.store.step
        driver.check(last)
        driver.init()
        driver.steps(number % 2).check(last + number % 2)
        driver.close()
        process.go_on()
        assert process.meet_next() <= last
        last += number % 2


def reopened(path):
    """Opens the store when the kernel has released its lock."""
    for _ in range(1000):
        try:
            return Driver(path)
        except Exception as error:
            if type(error).__name__ != "StoreLockedError":
                raise
            signal.sigtimedwait([], 0.01)
    pytest.fail("the lock of a killed process is still held")


# --- each stage of a step, one by one ----------------------------------------------

STAGES = ["nothing", "unpublished", "half", "all", "synced", "record", "link"]


@pytest.mark.parametrize("num_csds", family([0, 2], short=[2]))
@pytest.mark.parametrize("stage", STAGES)
def test_stopped_at_each_stage(place, drive, stage, num_csds):
    """Copies the store in the middle of a step, and opens the copy in its place."""
    driver = drive(num_csds=num_csds).init().steps(3)
    driver.store.wait()
    files = driver.opened.directory
    if stage == "unpublished":
        files.unpublish("a")
    elif stage == "half":
        driver.update([0, 3])
        driver.opened.mover.drain()
    elif stage != "nothing":
        driver.update()
        driver.opened.mover.drain()
        if stage != "all":
            files.sync()
        if stage in ("record", "link"):
            record = (files.step_path("b") / "commit.json").read_text()
            record = record.replace('"step": 3', '"step": 4')
            (files.step_path("a") / "commit.json").write_text(record)
        if stage == "link":
            (files.path / "current.tmp").symlink_to("slots/a")
    image = place.with_name(f"{place.name}-image")
    os.system(f"cp -a {place} {image}")
    driver.engine.close()
    shutil.rmtree(place)
    image.rename(place)  # the symlinks of CSDs are absolute

    again = drive().init()
    assert again.at == 3
    again.check(3)
    again.steps(2).check(5)
