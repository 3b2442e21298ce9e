"""Snapshots: hard links that hold a step while the writer goes on."""

import contextlib
import errno
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from families import family
from raw_stores import chunk_file, read_array

from jaxinf.errors import StoreIOError
from jaxinf.store import SLOTS, CommitRecord, pinned_step, readable_step
from jaxinf.store.steps import prune_snapshots

READER = """
import sys, time
from pathlib import Path
from jaxinf.store import StoreDirectory, pinned_step
with pinned_step(StoreDirectory.open(Path(sys.argv[1]))) as step:
    path = step.path
    print(path, flush=True)
    time.sleep(60)
"""


def check_holds(directory, path, arrays):
    for leaf in directory.manifest.leaves:
        for state in leaf.states:
            found = read_array(path, leaf, state.name)
            np.testing.assert_array_equal(found, arrays[leaf.array_name(state.name)])


@pytest.mark.parametrize("num_csds", family([0, 1, 3], short=[3]))
def test_holds_its_step(make_directory, write_step, place, num_csds):
    directory = make_directory(num_csds=num_csds)
    first = write_step(directory, "a", 0)
    with pinned_step(directory) as step:
        path = step.path
        assert CommitRecord.read(path / "commit.json").step == 0
        for step in range(1, 5):
            write_step(directory, "b" if step % 2 else "a", step)
            check_holds(directory, path, first)
        with pinned_step(directory) as step:
            newer = step.path
            assert CommitRecord.read(newer / "commit.json").step == 4
        assert not newer.exists()
        check_holds(directory, path, first)
    assert not [*place.rglob(path.name)]


def test_needs_all_chunks_and_leaves_nothing(make_directory, write_step):
    directory = make_directory(num_csds=2)
    write_step(directory, "a", 0)
    chunk_file(directory, "a", 0, "mu").unlink()
    descriptors = os.listdir("/proc/self/fd")
    with (
        pytest.raises(StoreIOError, match="hard link failed"),
        pinned_step(directory),
    ):
        pass
    assert os.listdir("/proc/self/fd") == descriptors
    assert not list((directory.path / "snapshots").iterdir())
    for folder in directory.csd_directories:
        assert not list((folder / "snapshots").glob("*"))


def test_a_step_that_cannot_be_pinned_is_read_beside_a_commit(
    make_directory, write_step, monkeypatch
):
    directory = make_directory()
    for number, slot in enumerate(SLOTS):
        write_step(directory, slot, number)
    (directory.path / "slots/a/commit.json").unlink()  # as the next step begins
    found = iter("abb")  # what `current` names, one after another

    @contextlib.contextmanager
    def refuse(_):
        raise StoreIOError("read-only") from OSError(errno.EROFS, "read-only")
        yield

    monkeypatch.setattr("jaxinf.store.steps.pinned_step", refuse)
    monkeypatch.setattr(directory, "committed_slot", lambda: next(found))
    with readable_step(directory) as step:
        assert step.commit.step == 1
        assert "cannot be pinned" in step.warning


@pytest.mark.long
def test_those_of_the_dead_are_pruned(make_directory, write_step):
    directory = make_directory(num_csds=2)
    first = write_step(directory, "a", 0)
    command = [sys.executable, "-c", READER, directory.path]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as reader,
        pinned_step(directory) as step,
    ):
        mine = step.path
        theirs = mine.with_name(os.path.basename(reader.stdout.readline().strip()))
        write_step(directory, "b", 1)
        write_step(directory, "a", 2)
        check_holds(directory, theirs, first)
        prune_snapshots(directory)
        assert {p.name for p in mine.parent.iterdir()} == {mine.name, theirs.name}
        reader.send_signal(signal.SIGKILL)
        reader.wait()
        check_holds(directory, theirs, first)
        prune_snapshots(directory)
        assert [p.name for p in mine.parent.iterdir()] == [mine.name]
        for folder in directory.csd_directories:
            left = (folder / "snapshots").iterdir()
            assert {p.name for p in left} <= {mine.name}
        check_holds(directory, mine, first)
