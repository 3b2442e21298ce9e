"""Adding and removing drives keeps every bit, with and without a crash."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from families import family
from store_driver import Driver

import jaxinf
import jaxinf.store.rebalancing as rebalancing
from jaxinf.errors import (
    StoreCorruptError,
    StoreLockedError,
    StoreMismatchError,
    StoreSpaceError,
)
from jaxinf.store import (
    StoreDirectory,
    Verifier,
    csd_bytes,
    rebalance,
    seal,
    stored_bytes,
)

LEAVES = {
    "bias": ((129,), "float32"),
    "embed": ((40, 1025), "float32"),
    "half": ((33, 257), "bfloat16"),
    "large": ((30_000,), "float32"),
    "scale": ((), "float32"),
}


class Store:
    """A store with a checkpoint on several roots, some on another file system."""

    def __init__(self, place, elsewhere, num_csds):
        self.place = place
        self.roots = [place / f"csd{n}" for n in range(4)]
        self.roots += [elsewhere / f"csd{n}" for n in range(2)]
        for root in self.roots:
            root.mkdir()
        self.path = place / "store"
        csds = self.roots[:num_csds]
        driver = self.driver(csds=csds).init().steps(2)
        driver.store.checkpoint("two")
        driver.steps(1).close()
        self.files = self.contents()

    def driver(self, **options):
        return Driver(self.path, leaves=LEAVES, chunk_elements=4096, **options)

    def contents(self):
        """Reads every array of the committed step and of the checkpoint, with stock
        readers."""
        directory = StoreDirectory.open(self.path)
        found = {}
        for place in (self.path / "current", self.path / "checkpoints/two"):
            for record in directory.manifest.leaves:
                for state in record.states:
                    array = jaxinf.store.open_array(place, record, state.name)
                    found[place.name, record.name, state.name] = array.read().result()
        return found

    def check(self, roots, step=3, shares=None):
        directory = StoreDirectory.open(self.path)
        assert directory.manifest.csds == tuple(map(str, roots))
        for place in (self.path / "current", self.path / "checkpoints/two"):
            assert Verifier(directory).verify(place) == []
        if step == 3:
            for key, values in self.contents().items():
                np.testing.assert_array_equal(values, self.files[key], err_msg=str(key))
        loads = [0] * len(roots)
        sizes = []
        for leaf, chunks in zip(
            directory.manifest.leaves, directory.chunks, strict=True
        ):
            for csd, chunk in zip(leaf.csds, chunks, strict=True):
                sizes.append(sum(stored_bytes(chunk, s) for s in leaf.states))
                loads[csd] += sizes[-1]
        shares = shares or [1.0] * len(roots)
        whole = sum(loads) / sum(shares)
        over = [n - whole * share for n, share in zip(loads, shares, strict=True)]
        assert max(over) - min(over) <= max(sizes)
        for root in set(self.roots) - set(roots):
            assert list(root.iterdir()) == []
        assert not (self.path / "rebalance.json").exists()

    def train(self, step):
        """Trains further, then goes back to the checkpoint."""
        driver = self.driver().init()
        assert driver.at == step
        driver.steps(2).check(step + 2)
        driver.close()
        driver = self.driver(restore="two").init()
        driver.steps(1).check(3)
        driver.close()


@pytest.fixture
def make(tmp_path):
    """Makes stores in memory, with roots on the drive too: two file systems."""
    shm = Path("/dev/shm")
    if not os.access(shm, os.W_OK) or shm.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("expected /dev/shm to be another file system")
    place = shm / f"jaxinf-rebalance-{os.getpid()}"
    place.mkdir()
    yield lambda num_csds: Store(place, tmp_path, num_csds)
    shutil.rmtree(place)


CASES = [
    (0, [0, 1]),  # from the store itself
    (1, [0, 1, 2, 3]),
    (3, [0, 2]),  # one is removed
    (2, [4, 5]),  # to another file system, altogether
    (2, [0, 4, 1, 5]),
    (2, [1, 0]),  # other numbers, same places
]


@pytest.mark.long
@pytest.mark.parametrize(
    ("before", "after"), family(CASES, short=[CASES[n] for n in (0, 2, 3, 5)])
)
def test_every_bit_stays(make, before, after):
    store = make(before)
    roots = [store.roots[n] for n in after]
    calls = []
    done = rebalance(store.path, roots, lambda *counts: calls.append(counts))
    store.check(roots)
    assert (done.num_chunks > 0) == ((before, after) != CASES[-1])
    if done.num_chunks:
        assert calls[-1][0] == calls[-1][1] > done.num_bytes
    assert rebalance(store.path, roots).num_chunks == 0
    store.train(3)


@pytest.mark.long
@pytest.mark.parametrize("after", [[0, 1], [4, 0, 5]])
def test_every_bit_stays_by_shares(make, after):
    store = make(2)
    roots, shares = [store.roots[n] for n in after], [3.0, 1.0, 1.0][: len(after)]
    done = rebalance(store.path, roots, shares=shares)
    store.check(roots, shares=shares)
    assert done.num_chunks > 0
    assert rebalance(store.path, roots, shares=shares).num_chunks == 0
    store.train(3)
    rebalance(store.path, roots)  # evenly
    store.check(roots, step=4)


def test_shares_go_as_far_as_there_is_room(make, monkeypatch):
    store = make(2)
    before = csd_bytes(StoreDirectory.open(store.path).manifest)
    full = os.statvfs_result((4096, 4096, 100, 0, 0, 10, 10, 10, 0, 255))
    monkeypatch.setattr(rebalancing.os, "statvfs", lambda root: full)
    assert rebalance(store.path, store.roots[:2], shares=[3, 1]).num_chunks == 0
    monkeypatch.undo()
    assert csd_bytes(StoreDirectory.open(store.path).manifest) == before


@pytest.mark.long
def test_there_and_back(make):
    store = make(2)
    for after in ([0, 1, 4], [5], [0, 1]):
        roots = [store.roots[n] for n in after]
        rebalance(store.path, roots)
        store.check(roots)
    store.train(3)


def test_files_on_the_same_file_system_are_not_copied(make, monkeypatch):
    store = make(1)
    monkeypatch.setattr(rebalancing, "_copy", None)
    rebalance(store.path, store.roots[:3])
    store.check(store.roots[:3])


# --- interruptions -------------------------------------------------------------------

POINTS = [
    ("write_journal", 0),
    ("_bring", 0),
    ("_bring", 9),
    ("_copy", 3),
    ("_switch", 0),
    ("finish_rebalance", 1),  # it is called at the beginning, too
    ("point", 0),
    ("point", 9),
    ("remove_csds", 0),
]


class Stop(BaseException):
    """Represents the end of the process."""


def interrupt(monkeypatch, name, after):
    """Simulates the end of the process at the beginning of a function's call."""
    real = getattr(rebalancing, name)
    calls = []

    def stopping(*arguments, **options):
        calls.append(name)
        if len(calls) > after:
            raise Stop
        return real(*arguments, **options)

    monkeypatch.setattr(rebalancing, name, stopping)


MIDDLE = [("_bring", 9), ("point", 9)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "after"), family(POINTS, short=[x for x in POINTS if x not in MIDDLE])
)
@pytest.mark.parametrize(
    "goes_on",
    [
        "again",
        pytest.param("training", marks=pytest.mark.long),
        pytest.param("elsewhere", marks=pytest.mark.long),
    ],
)
def test_interrupted(make, monkeypatch, name, after, goes_on):
    before = 0 if goes_on == "again" else 2
    store = make(before)
    roots = [store.roots[n] for n in (1, 4)]
    with monkeypatch.context() as patch:
        interrupt(patch, name, after)
        with pytest.raises(Stop):
            rebalance(store.path, roots)
    step = 3
    if goes_on == "training":
        driver = store.driver().init()
        driver.steps(1).check(4)
        driver.close()
        step = 4
    elif goes_on == "elsewhere":
        roots = [store.roots[n] for n in (0, 5)]
    rebalance(store.path, roots)
    store.check(roots, step)
    if goes_on == "again":
        store.train(step)


# --- refusals ------------------------------------------------------------------------


def test_an_open_store(make):
    store = make(2)
    driver = store.driver()
    with pytest.raises(StoreLockedError):
        rebalance(store.path, store.roots[:3])
    driver.close()
    store.check(store.roots[:2])


def test_damage_is_not_moved_on(make):
    store = make(2)
    directory = StoreDirectory.open(store.path)
    file = directory.chunk_file(directory.committed_slot(), 3, 0, "trace")
    with open(file, "r+b") as opened:
        opened.write(b"\xff")
    with pytest.raises(StoreCorruptError, match="nothing was moved") as error:
        rebalance(store.path, store.roots[4:])
    assert str(file) in str(error.value)
    assert StoreDirectory.open(store.path).manifest == directory.manifest


def test_too_little_room(make, monkeypatch):
    store = make(2)
    statvfs = os.statvfs

    def full(path):
        found = statvfs(path)
        fields = list(found)
        fields[4] = 1  # f_bavail
        return os.statvfs_result(fields)

    monkeypatch.setattr(os, "statvfs", full)
    with pytest.raises(StoreSpaceError, match="the chunks to come need"):
        rebalance(store.path, store.roots[4:])
    assert not (store.path / "rebalance.json").exists()
    store.check(store.roots[:2])


def test_roots_that_are_none(make):
    store = make(2)
    for roots, message in [
        ([], "at least one CSD root"),
        ([store.roots[0]] * 2, "is given twice"),
        ([store.place / "gone"], "found nothing; create or mount it"),
    ]:
        with pytest.raises(ValueError, match=message):
            rebalance(store.path, roots)


def test_a_checkpoint_of_other_arrays(make):
    store = make(2)
    file = store.path / "checkpoints/two/jaxinf.json"
    file.write_bytes(seal(json.loads(file.read_text().replace('"half"', '"other"'))))
    with pytest.raises(StoreMismatchError, match="the checkpoint two holds other"):
        rebalance(store.path, store.roots[:3])
