"""The disk model itself: possible and impossible states after a crash."""

import os

import pytest
from disk_model import tree
from disk_recorder import Recorder

import jaxinf.transfer
from jaxinf.transfer import fsync_directory, fsync_file

PAGE = 4096


def states(recorder, cut=None):
    """Every crash state of a log, or of one of its cuts, as {path: content}."""
    found = []
    for at in recorder.log.cuts():
        if cut is None or at.number == cut:
            pending = at.pending
            for bits in range(1 << len(pending)):
                chosen = {p for i, p in enumerate(pending) if bits >> i & 1}
                found.append(
                    {
                        path: data if kind == "file" else kind
                        for path, (_, kind, data) in tree(
                            recorder.log.kinds, at.state(chosen)
                        ).items()
                    }
                )
    return found


def last(recorder):
    return states(recorder, len(recorder.log.operations))


@pytest.fixture
def recorded(place):
    (place / "old").write_bytes(b"a" * 2 * PAGE)
    with Recorder(place) as recorder:
        yield recorder
        recorder.check()


def test_writes_are_torn_at_pages(recorded, place):
    with open(place / "new", "wb") as file:
        file.write(b"b" * 2 * PAGE)
    fd = os.open(place / "old", os.O_WRONLY)
    os.pwritev(fd, [b"b" * 2 * PAGE], 0)
    os.close(fd)
    a, b = b"a" * PAGE, b"b" * PAGE
    assert {state["old"] for state in last(recorded)} == {a + a, a + b, b + a, b + b}
    new = {state.get("new") for state in last(recorded)}
    assert {None, b"", bytes(2 * PAGE), b + bytes(PAGE), b + b} <= new


def test_a_synchronised_file_may_have_no_name(recorded, place):
    (place / "new").write_bytes(b"b")
    fsync_file(place / "new")
    assert {state.get("new") for state in last(recorded)} == {None, b"b"}
    fsync_directory(place)
    assert {state.get("new") for state in last(recorded)} == {b"b"}


def test_a_rename_is_whole(recorded, place):
    (place / "new").write_bytes(b"b")
    os.replace(place / "new", place / "old")
    for state in states(recorded):
        assert "old" in state
        assert "new" not in state or len(state["old"]) == 2 * PAGE


@pytest.mark.parametrize("number", [0, 1])
def test_a_file_system_is_synchronised_alone(place, number):
    drives = [place / "csd0", place / "csd1"]
    for drive in drives:
        drive.mkdir()
    with Recorder(place, drives) as recorder:
        assert drives[0].stat().st_dev != drives[1].stat().st_dev
        for drive in drives:
            (drive / "f").write_bytes(b"b")
        jaxinf.transfer.sync_filesystem(drives[number])
        recorder.check()
    for state in last(recorder):
        assert state[f"csd{number}/f"] == b"b"
    assert any(f"csd{1 - number}/f" not in state for state in last(recorder))


def test_what_is_not_seen_is_noticed(place):
    with Recorder(place) as recorder:
        os.system(f"touch {place}/unseen")
        with pytest.raises(AssertionError):
            recorder.check()
