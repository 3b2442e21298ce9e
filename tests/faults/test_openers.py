"""Processes that open a store at the same instant: one gets it, the others are told."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jaxinf.errors import StoreLockedError

NUM_PROCESSES = 6

PROGRAM = """
import json, os, sys
import jaxinf
from store_driver import Driver

path, num_processes = sys.argv[1], int(sys.argv[2])
driver = Driver(path + "-none")
start, go = os.pipe()
end, stop = os.pipe()

def child():
    os.close(go), os.close(stop)
    os.read(start, 1)  # ends for all at once
    try:
        driver.store = jaxinf.open_store(path, memory_bytes=1 << 20)
        driver.init().steps(3).store.wait()
        answer = {"pid": os.getpid(), "at": driver.at}
    except Exception as error:
        answer = {"type": type(error).__name__, "text": str(error)}
    os.write(1, json.dumps(answer).encode() + b"\\n")
    os.read(end, 1)
    driver.engine.close()
    os._exit(0)

for number in range(num_processes):
    if not os.fork():
        child()
os.close(go)
sys.stdin.read()
os.close(stop)
for number in range(num_processes):
    os.wait()
"""


@pytest.mark.parametrize("is_new", [True, False], ids=["to be made", "made"])
def test_all_at_once(place, drive, is_new):
    path, before = place / "store", 0
    if not is_new:
        drive(path).init().steps(2).close()
        before = 2
    command = [sys.executable, "-c", PROGRAM, str(path), str(NUM_PROCESSES)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        lines = [process.stdout.readline() for _ in range(NUM_PROCESSES)]
        process.stdin.close()  # the winner keeps the store until all have asked
    answers = [json.loads(line) for line in lines]
    winners = [answer for answer in answers if "pid" in answer]
    assert [answer["at"] for answer in winners] == [before + 3]
    losers = [answer for answer in answers if "type" in answer]
    assert len(losers) == NUM_PROCESSES - 1
    for loser in losers:
        assert loser["type"] == "StoreLockedError"
        assert str(path) in loser["text"]
        assert (
            f"process {winners[0]['pid']} on " in loser["text"]
            or "a process that is just starting; try again" in loser["text"]
        )
    driver = drive(path).init()
    driver.check(before + 3)
    driver.steps(1).check(before + 4)


def test_a_store_that_appears_between_two_looks(place, drive, monkeypatch):
    """It is another process's store, not a foreign directory."""
    (place / "store").mkdir()
    iterdir = Path.iterdir

    def look(path):
        monkeypatch.undo()
        drive(path).init()
        return iterdir(path)

    monkeypatch.setattr(Path, "iterdir", look)
    with pytest.raises(StoreLockedError):
        drive(place / "store")
