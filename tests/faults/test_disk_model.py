"""The disk model itself: possible and impossible states after a crash."""

import os

import pytest
from disk_model import tree
from disk_recorder import Recorder

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


def test_what_is_not_seen_is_noticed(place):
    with Recorder(place) as recorder:
        os.system(f"touch {place}/unseen")
        with pytest.raises(AssertionError):
            recorder.check()
