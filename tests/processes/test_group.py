"""A group of processes: what each hears of the others, and how long it waits for them.

The processes are threads here, over a service in memory; tests/distributed has real
ones.
"""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from inject import raising

from jaxinf import compat, processes
from jaxinf.errors import ProcessError


class Service:
    """The coordination service as one process sees it, over keys that all share."""

    def __init__(self, keys, changed, process, num_processes):
        self.keys, self.changed = keys, changed
        self.process, self.num_processes = process, num_processes

    def put(self, key, value, limit_s, *, replaces=False):
        with self.changed:
            assert replaces or key not in self.keys, key
            self.keys[key] = value
            self.changed.notify_all()

    def get(self, key, timeout_s):
        with self.changed:
            self.changed.wait_for(lambda: key in self.keys, timeout_s)
            return self.keys.get(key)

    def read_folder(self, folder, limit_s):
        with self.changed:
            return {k: v for k, v in self.keys.items() if k.startswith(f"{folder}/")}

    def remove(self, folder, limit_s):
        with self.changed:
            for key in self.read_folder(folder, limit_s):
                del self.keys[key]


@pytest.fixture
def groups(monkeypatch):
    monkeypatch.setattr(processes.group, "LIMIT_S", 0.3)
    monkeypatch.setattr(processes.group, "SLICE_S", 0.05)
    keys, changed = {}, threading.Condition()
    services = [Service(keys, changed, n, 3) for n in range(3)]
    return [processes.Group("run", one, "id") for one in services]


def in_each(groups, action):
    """Returns what an action returned or raised in each process."""
    with ThreadPoolExecutor(len(groups)) as threads:
        made = [threads.submit(action, group) for group in groups]
        return [one.exception() or one.result() for one in made]


def test_a_service_that_is_stopped_is_not_waited_for_without_end():
    released = threading.Event()

    class Client:
        def key_value_dir_get(self, folder):
            released.wait()

    group = processes.Group("run", compat.Coordination(Client(), 1, 2), limit_s=0.1)
    with pytest.raises(ProcessError, match=r"process 0, found .*no answer in 0\.1 s"):
        group.posted("failed")
    released.set()
    assert processes.group.silent_groups.pop() is group


def test_a_process_speaks_when_threads_cannot_start(monkeypatch):
    """As at a program's exit, from Python 3.12 on."""
    said = {}

    class Client:
        def key_value_set(self, key, value, again):
            said[key] = value

    group = processes.Group("run", compat.Coordination(Client(), 1, 2), "id")
    refused = RuntimeError("can't create new thread at interpreter shutdown")
    monkeypatch.setattr(threading.Thread, "start", raising(refused))
    with group.reporting():
        group.fail(ValueError("why"))
    group.leave()
    assert [*said] == ["jaxinf/id/failed/1", "jaxinf/id/closed/1"]


def test_all_have_the_values_of_all(groups):
    for n in range(3):
        found = in_each(groups, lambda g, n=n: g.gather("x", lambda: [n, g.number]))
        assert found == [[[n, 0], [n, 1], [n, 2]]] * 3
        assert in_each(groups, lambda g: g.barrier("x")) == [None] * 3
        assert in_each(groups, lambda g: g.first("x", lambda: g.number)) == [0] * 3
    assert len(groups[0].service.keys) < 15  # what all have read is removed


def test_only_the_options_that_differ_are_shown(groups):
    options = {"long": "x" * 300, "memory": 0}
    found = in_each(
        groups, lambda g: g.agree("it", lambda: options | {"n": g.number // 2}, "do")
    )
    text = "run: expected it to be the same in all 3 processes, found "
    text += '{"n": 1} in process 2, and {"n": 0} in process 0; do'
    assert list(map(str, found)) == [text] * 3


@pytest.mark.parametrize("call", ["gather", "first", "in_all"])
def test_an_error_of_one_is_raised_in_all(groups, call):
    def make(group):
        if group.number == 0:
            raise OSError("no room")

    found = in_each(groups, lambda g: getattr(g, call)("x", lambda: make(g)))
    assert isinstance(found[0], OSError)
    for one in found[1:]:
        assert isinstance(one, ProcessError)
        assert str(one).endswith("of the run failed: process 0: OSError: no room")


def test_none_goes_on_that_comes_to_a_barrier_too_late(groups):
    for one in in_each(groups[:2], lambda group: group.barrier("x")):
        assert isinstance(one, ProcessError)
    with pytest.raises(ProcessError, match="it waited for process 2 in vain"):
        groups[2].barrier("x")
    assert {*processes.group.silent_groups} >= {*groups[:2]}
    in_each(groups, lambda group: group.gather("y", int))
    assert not processes.group.silent_groups  # all are there again


def test_progress_extends_the_wait_for_that_process_alone(groups):
    def report(group, then):
        for n in range(20):
            group.post("progress", n, replaces=True)
            time.sleep(0.05)
        return then(group)

    with ThreadPoolExecutor(2) as others:
        for group in groups[1:]:
            others.submit(report, group, lambda group: group.gather("x", int))
        assert groups[0].gather("x", int) == [0, 0, 0]
        others.submit(report, groups[2], lambda group: None)
        with pytest.raises(ProcessError, match="found none of process 0"):
            groups[1].first("y", int)


def test_the_others_wait_as_long_as_the_first_works(groups):
    def long():
        time.sleep(1)
        return "done"

    assert in_each(groups, lambda group: group.first("x", long)) == ["done"] * 3


def test_one_that_failed_or_left_is_not_waited_for(groups, monkeypatch):
    monkeypatch.setattr(processes.group, "LIMIT_S", 600)
    groups[2].fail(OSError("no drive"))
    groups[1].leave()
    for call in (groups[0].barrier, lambda what: groups[0].gather(what, int)):
        with pytest.raises(ProcessError, match="process 2: OSError: no drive"):
            call("x")
    assert "OSError: no drive" in str(groups[0].failure_of_others(3))
    other, mine = (processes.Group("run", g.service, "other") for g in groups[:2])
    other.leave()
    with pytest.raises(ProcessError, match="process 0: it closed the store"):
        mine.first("x", int)
