"""A drive that answers EIO or is full: real calls fail."""

import errno
import re

import pytest
from cases import Cases
from shim import built_shim

STEP = 3


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """The child for all cases, since the start takes seconds."""
    shim = built_shim(tmp_path_factory.mktemp("shim"))
    cases = Cases("faults/shim_child.py", LD_PRELOAD=str(shim))
    yield cases
    cases.close()


CASES = {
    "read": ("preadv", "params.embed", r"params\.embed/c/0/0: read at byte \d+ failed"),
    "write": (
        "pwritev",
        "trace.embed",
        r"trace\.embed/c/0/0: write at byte \d+ failed",
    ),
    "sync": ("syncfs", "", r": sync failed"),
    "record": ("fsync", ".commit.json", r"commit\.json: write failed"),
    "record's name": ("fsync", "slots/", r"slots/[ab]/?.*failed"),
    "commit": ("fsync", "/store", r"failed"),
}


LITTLE, MUCH = 400_000, 2 << 20
"""Memory in which no leaf stays as a whole, and memory in which all do."""


@pytest.mark.parametrize(
    ("where", "durability", "memory"),
    [
        *((where, every, LITTLE) for where in CASES for every in ("step", 3)),
        *((where, 3, MUCH) for where in ("read", "write")),
    ],
)
def test_a_drive_that_fails(program, place, drive, where, durability, memory):
    """With commits every three steps the last one counts, with all bits of it."""
    call, on, message = CASES[where]
    options = {"memory_bytes": memory, "durability": durability}
    is_rare, stays = durability == 3, memory == MUCH
    case = {"call": call, "on": on, "errno": errno.EIO, "steps": 4 if is_rare else 2}
    case |= {"path": place / "store", "num_csds": 3, "options": options}
    answer = program.run("stored", case)
    step = answer["step"]
    if where == "read" and stays:
        assert (answer["hits"], step) == (0, STEP + 4)  # nothing is read that stays
        assert "text" not in answer
    else:
        assert answer["hits"] >= 1
        assert answer["type"] == "StoreIOError"
        assert re.search(message, answer["text"])
        advice = 'check the drive (dmesg, smartctl), then run "jaxinf verify"'
        assert advice in answer["text"]
        # A step's state may be prefetched before the drive begins to fail.
        assert STEP <= step <= STEP + (where == "read" and not is_rare)
        if is_rare and (stays or where not in ("read", "write")):  # at the commit alone
            assert len(answer["notes"]) == 1
        for note in answer["notes"] if is_rare else ():
            assert "lost, as the store's durability allows" in note
    driver = drive(place / "store", memory_bytes=memory).init()
    assert driver.at == step
    driver.check(step)
    driver.steps(3).check(step + 3)


@pytest.mark.parametrize(
    ("call", "code", "kind"),
    [
        ("pwritev", errno.ENOSPC, "StoreSpaceError"),
        ("preadv", errno.EIO, "StoreIOError"),
    ],
)
def test_values_that_cannot_be_moved_end_the_step(program, tmp_path, call, code, kind):
    """The step is given up, and then made again."""
    expected = program.run("streamed", {"folder": tmp_path})["losses"]
    case = {"folder": tmp_path, "call": call, "errno": code, "after": 5}
    answer = program.run("streamed", case)
    assert answer["hits"] > 0
    assert answer["error"].startswith(kind)
    assert "a file of activations" in answer["error"]
    assert answer["losses"] == expected[:6]
    assert not list(tmp_path.iterdir())
