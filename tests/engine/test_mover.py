"""The mover over real files, with tasks made by hand."""

import contextlib
import signal
import threading
import time

import numpy as np
import pytest

from jaxinf.engine import SubgroupLayout
from jaxinf.engine.chunks import ChunkTable
from jaxinf.engine.executor import make_mover
from jaxinf.errors import StoreClosedError
from jaxinf.layout import subgroups
from jaxinf.transfer import Failure, Task

PAGE = 4096
TIMEOUT_S = 60


class WatchedCsd:
    """A CSD that records its calls, and can fail or wait."""

    def __init__(self, csd):
        self._csd = csd
        self.reads = []
        self.calls = []
        self.fail_on = {}
        self.gate = None
        self.at_gate = threading.Event()

    def __getattr__(self, name):
        return getattr(self._csd, name)

    def _before(self, action):
        if action in self.fail_on:
            raise self.fail_on[action]
        if self.gate is not None:
            self.at_gate.set()
            assert self.gate.wait(TIMEOUT_S)

    def acquire(self, num_bytes):
        if "acquire" in self.fail_on:
            raise self.fail_on["acquire"]
        return self._csd.acquire(num_bytes)

    def read(self, transfers):
        self.calls.append(("read", len(transfers)))
        for transfer in transfers:
            self._before("read")
            self.reads.append((transfer.file, transfer.extent.file_offset_bytes))
            self._csd.read([transfer])

    def write(self, transfers):
        self.calls.append(("write", len(transfers)))
        for transfer in transfers:
            self._before("write")
            self._csd.write([transfer])


class Rig:
    """A mover over the files of a store, and tasks that add one to each element."""

    def __init__(self, driver, *, memory_pages, num_workers):
        from jaxinf.csd import HostCsd
        from jaxinf.transfer import BufferPool, ByteMeters

        self.directory = driver.opened.directory
        self.pool = BufferPool(memory_pages * PAGE)
        host = HostCsd(self.pool, ByteMeters())
        self.csd = WatchedCsd(host)
        self.failure = Failure()
        chunks = ChunkTable(self.directory, "b", {})
        chunks.loaded = lambda *_: None  # tasks here write without telling checksums
        self.mover = make_mover(
            self.directory,
            chunks,
            [self.csd],
            num_workers=num_workers,
            num_kernels=num_workers,
            failure=self.failure,
        )
        record = self.directory.manifest.leaves[0]
        cut = subgroups(0, record.grid, record.csds, PAGE)
        self.layouts = [SubgroupLayout.of(item, record) for item in cut]
        self.seen = []

    def task(self, layout, source="a", **changes):
        def compute(csd, buffer, tells):
            first, *_ = (csd.view(buffer, extent) for extent in layout.extents)
            self.seen.append((layout.subgroup.chunk, float(first[0])))
            first += 1

        settings = {
            "loads": ((0, source), (1, source)),
            "stores": (0, 1),
            "compute": compute,
        }
        return Task(layout, **(settings | changes))

    def tasks(self, **changes):
        return [self.task(layout, **changes) for layout in self.layouts]

    def close(self):
        if self.csd.gate is not None:
            self.csd.gate.set()
        self.mover.close()
        assert self.pool.used_bytes == 0


@pytest.fixture
def rig(drive):
    """Makes rigs over a store of a leaf in ten chunks; all memory must come back."""
    driver = drive(leaves={"w": ((10, PAGE), "float32")}, chunk_elements=PAGE).init()
    rigs = []

    def make(memory_pages=1000, num_workers=3):
        rigs.append(Rig(driver, memory_pages=memory_pages, num_workers=num_workers))
        return rigs[-1]

    yield make
    for item in rigs:
        item.close()


def in_thread(action):
    """Runs an action in a thread; `.join()` returns its result or raises its error."""
    box = []

    def run():
        try:
            box.append(action())
        except BaseException as error:
            box.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def join():
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()
        return box[0]

    return join


def wait_until_closing(mover):
    with contextlib.suppress(StoreClosedError):
        while True:
            mover.run([])


def master(rig, slot):
    files = [
        rig.directory.chunk_file(slot, 0, position, "params") for position in range(10)
    ]
    return np.concatenate([np.fromfile(file, np.float32) for file in files])


def prefetched(item, tasks):
    """Returns when all states of these tasks are loaded."""
    item.mover.prefetch(tasks)
    mover = item.mover
    with mover._done:
        assert mover._done.wait_for(
            lambda: (
                not any(drive.due for drive in mover._queues.drives)
                and not mover._queues.num_prefetching
            ),
            TIMEOUT_S,
        )


def test_short_states_are_moved_together(rig):
    item = rig()
    prefetched(item, item.tasks())
    item.mover.run(item.tasks())
    item.mover.drain()
    assert item.csd.calls == [("read", 20), ("write", 20)]
    np.testing.assert_array_equal(master(item, "b"), master(item, "a") + 1)


def test_long_states_are_moved_one_by_one(rig, monkeypatch):
    monkeypatch.setattr("jaxinf.transfer.tasks._TOGETHER_BYTES", 4 * PAGE)
    item = rig()
    prefetched(item, item.tasks())
    item.mover.run(item.tasks())
    item.mover.drain()
    assert sorted(item.csd.calls) == [("read", 2)] * 10 + [("write", 1)] * 20


def test_the_submitter_computes_what_is_loaded(rig):
    item, threads = rig(), []
    prefetched(item, item.tasks())

    def compute(csd, buffer, tells):
        threads.append(threading.current_thread())

    item.mover.run([item.task(item.layouts[3], compute=compute)])
    assert threads == [threading.current_thread()]


def test_a_task_that_waits_for_a_processor_is_not_forgotten(rig):
    item, inside, go_on = rig(num_workers=1), threading.Event(), threading.Event()
    prefetched(item, [item.task(item.layouts[n]) for n in (0, 1)])

    def slow(csd, buffer, tells):
        inside.set()
        assert go_on.wait(TIMEOUT_S)

    first = in_thread(
        lambda: item.mover.run([item.task(item.layouts[0], compute=slow)])
    )
    assert inside.wait(TIMEOUT_S)
    second = in_thread(lambda: item.mover.run([item.task(item.layouts[1])]))
    while not item.mover._queues.ready:
        time.sleep(0.001)
    time.sleep(0.05)  # a worker has found that it may not compute
    go_on.set()
    assert first() is second() is None


def test_a_prefetch_before_the_end_of_a_step_is_not_used_after_it(rig):
    item = rig()
    item.mover.run(item.tasks())
    item.mover.drain()
    item.mover.prefetch(item.tasks(source="a"))
    while len(item.csd.reads) < 2 * 20:
        time.sleep(0.001)
    item.mover.end_step()
    item.mover.run(item.tasks(source="b", stores=()))
    assert all(value % 256 == 1 for _, value in item.seen[10:])


def test_a_failure_from_outside_stops_what_has_not_begun(rig):
    item = rig(num_workers=1)
    item.csd.gate = threading.Event()
    join = in_thread(lambda: item.mover.run(item.tasks()))
    assert item.csd.at_gate.wait(TIMEOUT_S)
    item.failure.fail(error := KeyError("elsewhere"))
    item.csd.gate.set()
    assert join() is error
    assert not item.seen
    assert len(item.csd.calls) == 1


def test_no_compute_runs_after_run_has_raised(rig):
    """The tasks' arrays belong to XLA, which frees them."""
    item = rig(num_workers=2)
    inside, go_on, returned = (threading.Event() for _ in range(3))

    def slow(csd, buffer, tells):
        inside.set()
        assert go_on.wait(TIMEOUT_S)
        assert not returned.is_set()
        item.seen.append("slow")

    def failing(csd, buffer, tells):
        assert inside.wait(TIMEOUT_S)
        raise KeyError("failing")

    tasks = [
        item.task(item.layouts[0], compute=slow),
        item.task(item.layouts[1], compute=failing),
    ]

    def run():
        try:
            item.mover.run(tasks)
        finally:
            returned.set()

    join = in_thread(run)
    while item.failure.error is None:
        time.sleep(0.001)
    assert not returned.wait(0.05)
    go_on.set()
    assert isinstance(join(), KeyError)
    assert item.seen == ["slow"]


def test_closing_wakes_who_waits(rig):
    item = rig(num_workers=1)
    item.csd.gate = threading.Event()
    runs = in_thread(lambda: item.mover.run(item.tasks()))
    assert item.csd.at_gate.wait(TIMEOUT_S)
    drains = in_thread(item.mover.drain)
    closing = in_thread(item.mover.close)
    wait_until_closing(item.mover)
    item.csd.gate.set()
    assert closing() is None
    assert isinstance(runs(), StoreClosedError)
    assert isinstance(drains(), StoreClosedError)
    item.mover.close()
    with pytest.raises(StoreClosedError, match="the store is closed; open it again"):
        item.mover.run(item.tasks())


def test_closing_waits_for_the_submitter(rig):
    item, inside, go_on = rig(), threading.Event(), threading.Event()
    prefetched(item, [item.task(item.layouts[0])])

    def slow(csd, buffer, tells):
        inside.set()
        assert go_on.wait(TIMEOUT_S)
        assert item.pool.used_bytes > 0

    runs = in_thread(lambda: item.mover.run([item.task(item.layouts[0], compute=slow)]))
    assert inside.wait(TIMEOUT_S)
    closing = in_thread(item.mover.close)
    wait_until_closing(item.mover)
    time.sleep(0.05)
    assert item.pool.used_bytes > 0
    go_on.set()
    assert runs() is closing() is None


@pytest.fixture
def interruptible():
    """Ctrl-C as in a terminal; programs in the background ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_no_compute_runs_after_an_interrupt(rig, interruptible):
    """Ctrl-C ends the wait of the main thread, whose buffers are XLA's."""
    item = rig(num_workers=1)
    inside, sent, ended = (threading.Event() for _ in range(3))

    def slow(csd, buffer, tells):
        inside.set()
        assert sent.wait(TIMEOUT_S)
        time.sleep(0.2)
        ended.set()

    def interrupt():
        assert inside.wait(TIMEOUT_S)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        sent.set()

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        item.mover.run([item.task(item.layouts[0], compute=slow)])
    assert ended.is_set()
    thread.join()
    assert isinstance(item.failure.error, KeyboardInterrupt)


def test_an_interrupt_where_the_submitter_computes(rig, interruptible):
    """It waits for the worker that computes beside it, too."""
    item = rig(num_workers=2)
    both, ended = threading.Barrier(2), threading.Event()
    prefetched(item, [item.task(item.layouts[n]) for n in (0, 1)])

    def compute(csd, buffer, tells):
        both.wait(TIMEOUT_S)
        if threading.current_thread() is threading.main_thread():
            signal.raise_signal(signal.SIGINT)
        time.sleep(0.2)
        ended.set()

    with pytest.raises(KeyboardInterrupt):
        item.mover.run([item.task(item.layouts[n], compute=compute) for n in (0, 1)])
    assert ended.is_set()
    assert isinstance(item.failure.error, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        item.mover.drain()
