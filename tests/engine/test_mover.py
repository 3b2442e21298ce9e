"""The mover over real files, with tasks made by hand."""

import contextlib
import signal
import threading
import time

import pytest

from jaxinf.csd import HostCsd
from jaxinf.engine import SubgroupLayout
from jaxinf.engine.chunks import ChunkTable, make_mover
from jaxinf.errors import StoreClosedError
from jaxinf.layout import subgroups
from jaxinf.transfer import BufferPool, ByteMeters, Failure, Limits, Task

PAGE = 4096
TIMEOUT_S = 60


class GatedCsd:
    """A CSD whose reads wait at a gate, if it has one."""

    def __init__(self, csd):
        self._csd = csd
        self.gate = None
        self.at_gate = threading.Event()

    def __getattr__(self, name):
        return getattr(self._csd, name)

    def read(self, transfers):
        if self.gate is not None:
            self.at_gate.set()
            assert self.gate.wait(TIMEOUT_S)
        self._csd.read(transfers)


class Rig:
    """A mover over the files of a store, and tasks of its subgroups."""

    def __init__(self, driver, *, num_workers):
        directory = driver.opened.directory
        self.pool = BufferPool(1000 * PAGE)
        self.csd = GatedCsd(HostCsd(self.pool, ByteMeters()))
        self.failure = Failure()
        chunks = ChunkTable(directory, "b", {})
        chunks.loaded = lambda *_: None  # tasks here write without telling checksums
        self.mover = make_mover(
            directory,
            chunks,
            [self.csd],
            Limits(num_workers, num_workers),
            self.failure,
        )
        record = directory.manifest.leaves[0]
        cut = subgroups(0, record.grid, record.csds, PAGE)
        chunks = directory.chunks[0]
        self.layouts = [SubgroupLayout.of(x, record, chunks[x.chunk]) for x in cut]

    def tasks(self, numbers, compute=lambda *_: None):
        return [
            Task(
                self.layouts[number],
                loads=((0, "a"), (1, "a")),
                stores=(0, 1),
                compute=compute,
            )
            for number in numbers
        ]

    def run_in_thread(self, *arguments):
        return in_thread(lambda: self.mover.run(self.tasks(*arguments)))

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

    def make(num_workers=1):
        rigs.append(Rig(driver, num_workers=num_workers))
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


def prefetched(item, numbers):
    """Returns when all states of these subgroups are loaded."""
    item.mover.prefetch(item.tasks(numbers))
    queues = item.mover._queues
    with item.mover._done:
        assert item.mover._done.wait_for(
            lambda: (
                not any(drive.due for drive in queues.drives)
                and not queues.num_prefetching
            ),
            TIMEOUT_S,
        )


class Slow:
    """A computation that says when it has begun, and ends when it may."""

    def __init__(self):
        self.inside, self.may_end = threading.Event(), threading.Event()
        self.has_ended = False

    def __call__(self, csd, buffer, tells):
        self.inside.set()
        assert self.may_end.wait(TIMEOUT_S)
        self.has_ended = True


def test_a_task_that_waits_for_a_processor_is_not_forgotten(rig):
    item, slow = rig(), Slow()
    prefetched(item, [0, 1])
    first = item.run_in_thread([0], slow)
    assert slow.inside.wait(TIMEOUT_S)
    second = item.run_in_thread([1])
    while not item.mover._queues.ready:
        time.sleep(0.001)
    time.sleep(0.05)  # a worker has found that it may not compute
    slow.may_end.set()
    assert first() is second() is None


def test_no_compute_runs_after_run_has_raised(rig):
    """The tasks' arrays belong to XLA, which frees them."""
    item, slow, returned = rig(num_workers=2), Slow(), threading.Event()

    def failing(csd, buffer, tells):
        assert slow.inside.wait(TIMEOUT_S)
        raise KeyError("failing")

    def run():
        try:
            item.mover.run(item.tasks([0], slow) + item.tasks([1], failing))
        finally:
            assert slow.has_ended
            returned.set()

    join = in_thread(run)
    while item.failure.error is None:
        time.sleep(0.001)
    assert not returned.wait(0.05)
    slow.may_end.set()
    assert isinstance(join(), KeyError)


def test_closing_wakes_who_waits(rig):
    item = rig()
    item.csd.gate = threading.Event()
    runs = item.run_in_thread(range(10))
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
        item.mover.run(item.tasks([0]))


def test_closing_waits_for_the_submitter(rig):
    item, slow = rig(num_workers=3), Slow()
    prefetched(item, [0])
    runs = item.run_in_thread([0], slow)
    assert slow.inside.wait(TIMEOUT_S)
    closing = in_thread(item.mover.close)
    wait_until_closing(item.mover)
    time.sleep(0.05)
    assert item.pool.used_bytes > 0
    slow.may_end.set()
    assert runs() is closing() is None


@pytest.fixture
def interruptible():
    """Ctrl-C as in a terminal; programs in the background ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("ahead", [False, True], ids=["waits", "computes"])
def test_no_compute_runs_after_an_interrupt(rig, ahead):
    """Ctrl-C ends the wait of the main thread, or what it computes."""
    item, ended = rig(num_workers=2), threading.Event()
    both = threading.Barrier(2)
    if ahead:
        prefetched(item, [0, 1])

    def compute(csd, buffer, tells):
        if ahead:
            both.wait(TIMEOUT_S)
        if not ahead:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        elif threading.current_thread() is threading.main_thread():
            signal.raise_signal(signal.SIGINT)
        time.sleep(0.2)
        ended.set()

    with pytest.raises(KeyboardInterrupt):
        item.mover.run(item.tasks([0, 1] if ahead else [0], compute))
    assert ended.is_set()
    assert isinstance(item.failure.error, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        item.mover.drain()
