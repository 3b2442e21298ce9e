"""The order of a commit's system calls."""

import os
import re
import sys
from contextlib import contextmanager

import pytest

_events: list[tuple[str, str]] = []
_is_on = False


def _record(event, arguments):
    if not _is_on:
        return
    if event == "ctypes.dlsym" and arguments[1] == "syncfs":
        _events.append(("sync", ""))
    elif event == "open":
        path, _, flags = arguments
        if flags & (os.O_WRONLY | os.O_RDWR):
            _events.append(("write", str(path)))
    elif event in ("os.remove", "os.symlink", "os.link"):
        _events.append((event[3:], str(arguments[-2 if event == "os.remove" else 1])))
    elif event == "os.rename":
        _events.append(("rename", str(arguments[1])))


sys.addaudithook(_record)


@contextmanager
def events():
    """Collects writes, removals, links and synchronisations meanwhile."""
    global _is_on
    _events.clear()
    _is_on = True
    try:
        yield _events
    finally:
        _is_on = False


def stages(found, place, spare):
    """Converts the events to letters; fails on events that no step has."""
    committed = "b" if spare == "a" else "a"
    kinds = [
        ("u", rf"remove .*/slots/{spare}/commit\.json"),
        ("w", rf"write .*/{spare}/(params|params_remainder|trace)\.[^/]*/c.*"),
        ("s", r"sync "),
        ("t", rf"write .*/slots/{spare}/\.commit\.json\..*\.tmp"),
        ("r", rf"rename .*/slots/{spare}/commit\.json"),
        ("l", r"(write .*/publish\.lock|remove .*/current\.tmp)"),
        ("l", r"symlink .*/current\.tmp"),
        ("c", r"rename .*/store/current"),
    ]
    letters = ""
    for kind, path in found:
        if not path.startswith(str(place)) and path:
            continue
        line = f"{kind} {path}"
        assert f"/{committed}/" not in line
        letters += next(
            (letter for letter, pattern in kinds if re.fullmatch(pattern, line)), "?"
        )
        assert letters[-1] != "?", line
    return letters


@pytest.mark.parametrize("num_csds", [0, 2])
def test_a_step(drive, place, num_csds):
    driver = drive(num_csds=num_csds).init().steps(1)
    driver.store.wait()
    for step in range(2, 5):
        spare = "ba"[step % 2 == 0]
        with events() as found:
            driver.step()
            driver.store.wait()
        letters = stages(found, place, spare)
        assert re.fullmatch(r"uw+s+trl+c", letters), letters
