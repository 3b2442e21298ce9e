"""Commands on a copy of a store without its CSDs: the original keeps every byte."""

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import raw_stores
from copies import copied
from families import family
from store_driver import Driver

import jaxinf
from jaxinf.errors import StoreFormatError
from jaxinf.store import StoreDirectory, pinned_step


def bytes_below(*roots):
    """Returns every file's bytes, except locks', and symlinks' targets."""
    found = {}
    for root in roots:
        for folder, folders, files in os.walk(root):
            for name in (*folders, *files):
                path = os.path.join(folder, name)
                if os.path.islink(path):
                    found[path] = os.readlink(path)
                elif os.path.isfile(path) and not name.endswith("lock"):
                    found[path] = Path(path).read_bytes()
    return found


LEAVES = {"half": ((33, 256), "bfloat16"), "w": ((3, 4096), "float32")}


@pytest.fixture
def original(tmp_path):
    """A store on two CSDs at step 3, with a checkpoint."""
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
    """Runs a command of the table on a store."""
    (tmp_path / "other").mkdir()
    words = {"NEW": tmp_path / "new", "OUT": tmp_path / "out"}
    words |= {"ROOT": tmp_path / "other"}

    def call(name, store, *more):
        own = words | {"STORE": store}
        return run(*(own.get(word, word) for word in COMMANDS[name]), *more)

    return call


def test_a_command_on_a_copy_leaves_the_original_alone(
    original, tmp_path, run, run_named
):
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


# --- moves, and mounts ---------------------------------------------------------------


def line_of(text):
    """The shell's line that an error ends with."""
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
    with (
        pytest.raises(StoreFormatError, match=r"rm -f .*; echo"),
        pinned_step(StoreDirectory.open(original.path)),
    ):
        pass
    assert run("checkpoint", "remove", original.path, "kept").status == 1


@pytest.mark.parametrize("place", ["/proc/self/cwd", "link", "inside"])
def test_roots_that_are_never_believed(tmp_path, place):
    path = tmp_path / "store"
    (path / "inside").mkdir(parents=True)
    (tmp_path / "to-proc").symlink_to("/proc/self")
    roots = {"inside": path / "inside", "link": tmp_path / "to-proc/cwd"}
    states = (jaxinf.store.StateRecord("params", "float32"),)
    leaves, root = {("w",): ((4096,), (1,))}, str(roots.get(place, place))
    manifest = raw_stores.make_manifest(states, leaves, [root])
    with pytest.raises(StoreFormatError, match="on a drive of its own, found it at"):
        jaxinf.store.create_store(StoreDirectory(path, manifest))
    assert not (path / "jaxinf.json").exists()


# --- drives that are not mounted -----------------------------------------------------


def test_a_root_that_is_a_link_to_itself(original, run):
    root = original.csds[1]
    root.rename(root.with_name("away"))
    root.symlink_to(root)
    result = run("checkpoint", "save", original.path, "more")
    assert (result.status, "CSD 1 of the store should be" in result.err) == (1, True)


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
