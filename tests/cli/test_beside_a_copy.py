"""Commands that wait for a lock while a store is copied in place act on the new one."""

from types import SimpleNamespace

import pytest
from copies import copied
from families import family
from store_driver import Driver

import jaxinf
from jaxinf.store import (
    StoreDirectory,
    pinned_step,
    remove_checkpoint,
    save_checkpoint,
    verify_step,
)
from jaxinf.store.lock import LockFile

LEAVES = {"half": ((33, 256), "bfloat16"), "w": ((3, 4096), "float32")}


@pytest.fixture(
    params=family([[0, 2], [2, 1], [1, 3]], short=[[0, 2]]),
    ids=lambda p: f"{p[0]} to {p[1]} CSDs",
)
def moving(request, tmp_path, monkeypatch):
    """A store at step 3 whose chunks move before the next lock is taken."""
    before, after = request.param
    roots = [tmp_path / f"csd{n}" for n in range(4)]
    for root in roots:
        root.mkdir()
    options = {"leaves": LEAVES, "chunk_elements": 4096, "csds": roots[:before]}
    driver = Driver(tmp_path / "store", **options).init().steps(2)
    driver.store.checkpoint("kept")
    driver.steps(1).close()
    hold, calls = LockFile.hold, []

    def after_a_copy(lock, **options):
        if not calls:
            calls.append(lock.path.name)
            lock.close()
            copied(driver.store.path, roots=roots[-after:])
            lock.__init__(lock.path)
        return hold(lock, **options)

    def start():
        monkeypatch.setattr(LockFile, "hold", after_a_copy)

    return SimpleNamespace(
        path=driver.store.path, start=start, calls=calls, place=tmp_path
    )


def check_whole(path, names):
    directory = StoreDirectory.open(path)
    assert verify_step(directory, path / "current") == []
    for name in names:
        assert verify_step(directory, path / "checkpoints" / name) == []
    found = sorted(p.name for p in (path / "checkpoints").iterdir())
    assert found == sorted(names)
    for csd in range(len(directory.manifest.csds)):
        kept = directory.csd_directory(csd) / "checkpoints"
        assert {p.name for p in kept.glob("*")} <= set(names)


def check_goes_on(path, name, step):
    driver = Driver(path, leaves=LEAVES, restore=name).init()
    driver.check(step)
    driver.steps(2).check(step + 2)
    driver.close()


@pytest.mark.long
def test_a_checkpoint_is_saved(moving, run):
    moving.start()
    assert run("checkpoint", "save", moving.path, "more").status == 0
    assert moving.calls == ["checkpoints.lock"]
    check_whole(moving.path, ["kept", "more"])
    check_goes_on(moving.path, "more", 3)
    check_goes_on(moving.path, "kept", 2)


def test_a_checkpoint_is_saved_by_a_program(moving):
    directory = StoreDirectory.open(moving.path)
    moving.start()
    save_checkpoint(directory, "more")
    check_whole(moving.path, ["kept", "more"])


def test_a_checkpoint_is_removed(moving):
    directory = StoreDirectory.open(moving.path)
    moving.start()
    remove_checkpoint(directory, "kept")
    check_whole(moving.path, [])


def test_a_checkpoint_is_restored(moving, run):
    moving.start()
    words = ["kept", "--discard-current"]
    assert run("checkpoint", "restore", moving.path, *words).status == 0
    assert moving.calls == ["lock"]
    check_whole(moving.path, ["kept"])
    with jaxinf.open_store(moving.path) as store:
        assert store.step == 2


def test_a_snapshot(moving):
    directory = StoreDirectory.open(moving.path)
    moving.start()
    with pinned_step(directory) as step:
        path = step.path
        assert moving.calls == ["publish.lock"]
        assert verify_step(StoreDirectory.open(moving.path), path) == []
    check_whole(moving.path, ["kept"])
    assert not list((moving.path / "snapshots").iterdir())


def test_a_copy(moving):
    moving.start()
    assert copied(moving.path, moving.place / "new", state="bf16").step == 3
    assert moving.calls == ["publish.lock"]
    with jaxinf.open_store(moving.place / "new") as store:
        assert store.step == 3


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_look(moving, run, command):
    moving.start()
    result = run(command, moving.path)
    assert result.status == 0, result.err
    assert moving.calls == ["publish.lock"]
