"""The order of a commit, by the calls that make it; `faults` has its crashes."""

from functools import partial

import pytest
from inject import at_each_call

ORDER = ["unpublish", "write", "sync", "write_record", "flip"]


@pytest.mark.parametrize("num_csds", [0, 2])
def test_a_step(drive, monkeypatch, num_csds):
    """The record of the spare slot goes first; the committed slot is not written."""
    driver = drive(num_csds=num_csds).init().steps(1)
    driver.store.wait()
    opened, calls, slots = driver.opened, [], set()

    def note(name, *arguments):
        calls.append(name)
        if name == "write":
            slots.update(*({*"ab"} & {*one.file.parts} for one in arguments[0]))

    for name in ORDER:
        for owner in opened.csds if name == "write" else [opened.directory]:
            at_each_call(monkeypatch, owner, name, partial(note, name))
    for step in range(2, 5):
        driver.step()
        driver.store.wait()
        assert calls == sorted(calls, key=ORDER.index)
        assert {*calls} == {*ORDER}
        assert slots == {"ba"[step % 2 == 0]}
        calls.clear()
        slots.clear()
