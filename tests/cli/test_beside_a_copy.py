"""Commands that wait for a lock while a store is copied in place act on the new one."""

from types import SimpleNamespace

import pytest
from copies import copied
from inject import at_each_call
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


@pytest.fixture
def moving(tmp_path, monkeypatch):
    """A store at step 3 whose chunks move before the next lock is taken."""
    roots = [tmp_path / f"csd{n}" for n in range(3)]
    for root in roots:
        root.mkdir()
    options = {"leaves": LEAVES, "chunk_elements": 4096, "csds": roots[:1]}
    driver = Driver(tmp_path / "store", **options).init().steps(2)
    driver.store.checkpoint("kept")
    driver.steps(1).close()
    calls = []

    def copy_first(lock, path, **_):
        if not calls:
            calls.append(path.name)
            copied(driver.store.path, roots=roots[1:])

    def start():
        at_each_call(monkeypatch, LockFile, "__init__", copy_first)

    return SimpleNamespace(
        path=driver.store.path, start=start, calls=calls, place=tmp_path
    )


def check_whole(path, names):
    directory = StoreDirectory.open(path)
    for place in ["current", *(f"checkpoints/{name}" for name in names)]:
        assert verify_step(directory, path / place) == []
    assert sorted(p.name for p in (path / "checkpoints").iterdir()) == sorted(names)
    for folder in directory.csd_directories:
        kept = folder / "checkpoints"
        assert {p.name for p in kept.glob("*")} <= set(names)
    assert not list(path.glob("snapshots/*"))


def snapshot(directory):
    with pinned_step(directory) as step:
        now = StoreDirectory.open(directory.path)
        assert verify_step(now, step.path) == []


ACTIONS = {
    "save": (lambda one: save_checkpoint(one, "more"), ["kept", "more"]),
    "remove": (lambda one: remove_checkpoint(one, "kept"), []),
    "snapshot": (snapshot, ["kept"]),
}


@pytest.mark.parametrize("name", ACTIONS)
def test_a_program_that_opened_the_store_before(moving, name):
    action, names = ACTIONS[name]
    directory = StoreDirectory.open(moving.path)
    moving.start()
    action(directory)
    lock = "publish.lock" if name == "snapshot" else "checkpoints.lock"
    assert moving.calls == [lock]
    check_whole(moving.path, names)
    driver = Driver(moving.path, leaves=LEAVES).init()
    driver.check(3)
    driver.steps(2).check(5)
    driver.close()


RESTORE = ("checkpoint", "restore", "STORE", "kept", "--discard-current")


@pytest.mark.parametrize(
    ("words", "lock", "step"),
    [
        (RESTORE, "lock", 2),
        (("inspect", "STORE"), "publish.lock", 3),
        (("verify", "STORE"), "publish.lock", 3),
        (("store", "copy", "STORE", "NEW", "--state", "bf16"), "publish.lock", 3),
    ],
)
def test_a_command(moving, run, words, lock, step):
    moving.start()
    places = {"STORE": moving.path, "NEW": moving.place / "new"}
    result = run(*(places.get(word, word) for word in words))
    assert result.status == 0, result.err
    assert moving.calls == [lock]
    check_whole(moving.path, ["kept"])
    with jaxinf.open_store(moving.path) as one:
        assert one.step == step
