"""Commands on a copy without its CSDs, and beside a copy in place: no byte is lost."""

import errno
import os
import subprocess
from types import SimpleNamespace

import pytest
import raw_stores
from copies import copied
from families import family
from inject import at_each_call
from raw_stores import bytes_below
from store_driver import Driver

import jaxinf
from jaxinf.errors import StoreFormatError, StoreIOError
from jaxinf.store import (
    StoreDirectory,
    pinned_step,
    remove_checkpoint,
    save_checkpoint,
    steps,
    verify_step,
)
from jaxinf.store.lock import LockFile

LEAVES = {"half": ((33, 256), "bfloat16"), "w": ((3, 4096), "float32")}


@pytest.fixture
def original(tmp_path):
    driver = Driver(tmp_path / "store", LEAVES, num_csds=2, chunk_elements=4096)
    driver.init().steps(3).store.checkpoint("kept")
    driver.close()
    roots = [tmp_path / "csd0", tmp_path / "csd1"]
    return SimpleNamespace(path=tmp_path / "store", csds=roots)


COMMANDS = {
    "inspect": ["inspect", "STORE"],
    "verify": ["verify", "STORE"],
    "save": ["checkpoint", "save", "STORE", "mine"],
    "export": ["checkpoint", "export", "STORE", "OUT"],
    "copy": ["store", "copy", "STORE", "NEW", "--state", "bf16"],
    "restore": ["checkpoint", "restore", "STORE", "kept", "--discard-current"],
    "remove": ["checkpoint", "remove", "STORE", "kept"],
    "copy in place": ["store", "copy", "STORE", "STORE", "--csd-root", "ROOT"],
}
"""Commands, each to be run on what those before it leave."""


@pytest.fixture
def run_named(run, tmp_path):
    (tmp_path / "other").mkdir()
    words = {"NEW": tmp_path / "new", "OUT": tmp_path / "out"}
    words |= {"ROOT": tmp_path / "other"}

    def call(name, store, *more):
        own = words | {"STORE": store}
        return run(*(own.get(word, word) for word in COMMANDS[name]), *more)

    return call


def test_a_command_on_a_copy_spares_the_original(original, tmp_path, run, run_named):
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-al", original.path, copy], check=True)
    before = bytes_below(original.path, *original.csds)
    to_the_same = ["store", "copy", copy, copy]
    for root in original.csds:
        to_the_same += ["--csd-root", root]
    for result in (*(run_named(name, copy) for name in COMMANDS), run(*to_the_same)):
        assert bytes_below(original.path, *original.csds) == before
        assert result.status == 1
        assert f"found a copy of {original.path}" in result.err
    assert not list((tmp_path / "other").iterdir())
    assert run("verify", original.path).status == 0


def line_of(text):
    return text.partition("write the note: ")[2].splitlines()[0]


def test_the_line_that_errors_give_makes_every_command_work(original, run, run_named):
    note_of(original.csds[0]).unlink()
    with pytest.raises(StoreFormatError) as error:
        jaxinf.open_store(original.path)
    line = line_of(str(error.value))
    for name in COMMANDS:
        result = run_named(name, original.path)
        assert result.status == 1, name
        assert line in result.err, name
    subprocess.run(["sh", "-c", line], check=True)
    for name in COMMANDS:
        result = run_named(name, original.path)
        assert result.status == 0, result.err
    assert run("checkpoint", "list", original.path).status == 0


# --- owners of roots -----------------------------------------------------------------


def note_of(root):
    return next(root.glob("jaxinf-*/store.json"))


def linked(note):
    note.rename(note.with_name("other"))
    note.symlink_to("other")


def pipe(note):
    note.unlink()
    os.mkfifo(note)


DAMAGED = {
    "missing": lambda note: note.unlink(),
    "damaged": lambda note: note.write_text("{"),
    "of another type": lambda note: note.write_text('{"store": ["x"]}'),
    "a link": linked,
    "a pipe": pipe,
}


@pytest.mark.parametrize("damage", family(DAMAGED, short=["of another type", "a link"]))
def test_a_root_that_nothing_says_is_this_stores(original, run_named, damage):
    DAMAGED[damage](note_of(original.csds[1]))
    before = bytes_below(original.path, original.csds[0])
    with pytest.raises(StoreFormatError) as error:
        jaxinf.open_store(original.path)
    assert run_named("save", original.path).status == 1
    assert bytes_below(original.path, original.csds[0]) == before
    subprocess.run(["sh", "-c", line_of(str(error.value))], check=True)
    assert run_named("save", original.path).status == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="takes root to give a file away")
def test_a_root_of_another_users(original, run):
    os.chown(note_of(original.csds[0]), 12345, 12345)
    with pytest.raises(StoreFormatError, match="belongs to the user of id 12345"):
        jaxinf.open_store(original.path)
    with pytest.raises(StoreFormatError, match=r"rm -f .*; echo"):
        snapshot(StoreDirectory.open(original.path))
    assert run("checkpoint", "remove", original.path, "kept").status == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="takes root to give a file away")
def test_a_store_of_another_users_can_be_looked_at(original, run, monkeypatch):
    def refuse(path):
        error = PermissionError(errno.EACCES, "Permission denied")
        raise StoreIOError(f"{path}: {error}") from error

    os.chown(note_of(original.csds[0]), 12345, 12345)
    monkeypatch.setattr(steps, "lock_exclusively", refuse)
    for command in (["inspect"], ["checkpoint", "list"]):
        assert run(*command, original.path).status == 0


@pytest.mark.parametrize("place", ["/proc/self/cwd", "link", "inside"])
def test_roots_that_are_never_believed(tmp_path, place):
    path = tmp_path / "store"
    (path / "inside").mkdir(parents=True)
    (tmp_path / "to-proc").symlink_to("/proc/self")
    roots = {"inside": path / "inside", "link": tmp_path / "to-proc/cwd"}
    states = (jaxinf.store.StateRecord("params", "float32"),)
    leaves, root = {("w",): ((4096,), (1,))}, str(roots.get(place, place))
    with pytest.raises(StoreFormatError, match="on a drive of its own, found it at"):
        raw_stores.make_store(path, states, leaves, [root])
    assert not (path / "jaxinf.json").exists()


# --- drives that are not mounted -----------------------------------------------------


def test_nothing_is_made_on_a_bare_mount_point(original, tmp_path, run, run_named):
    drive = original.csds[1]
    drive.rename(tmp_path / "unmounted")
    drive.mkdir()
    for name in ("copy", "save", "inspect"):
        result = run_named(name, original.path)
        assert result.status == 1
        assert "mount the drive" in result.err
    with pytest.raises(StoreFormatError, match="mount the drive"):
        copied(original.path, tmp_path / "new", state="bf16")
    assert not list(drive.iterdir())
    drive.rmdir()
    (tmp_path / "unmounted").rename(drive)
    assert run("verify", original.path).status == 0


# --- while a store is copied in place -------------------------------------------------


@pytest.fixture
def moving(tmp_path, monkeypatch):
    """A store at step 3 whose chunks move before the next lock is taken."""
    roots = raw_stores.make_roots(tmp_path, "store", 3)
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
