"""Lost members of a run are made again from an export, and no bit of others changes."""

import shutil
import subprocess
import sys

import killed_rebuild
import pytest
from families import family
from killed_division import contents, damages
from killed_rebuild import PLAIN, lose, make_run
from raw_stores import memory_directory

from jaxinf.cli.commands import main
from jaxinf.errors import StoreIOError
from jaxinf.store import StoreDirectory, find_members, list_whole, remove_checkpoint


def files_of(members):
    """What a write to a committed chunk, or its replacement, would change."""
    found = {}
    for one in members:
        directory = StoreDirectory.open(one)
        for leaf, record, _ in directory.leaves():
            for state in record.states:
                for chunk in record.held:
                    slot = directory.committed_slot()
                    file = directory.chunk_file(slot, leaf, chunk, state.name)
                    status = file.stat()
                    found[file] = status.st_ino, status.st_mtime_ns
    return found


def command(*words):
    return main([str(word) for word in words])


@pytest.mark.parametrize(
    ("form", "num_csds"),
    family(
        [("url", 0), ("url", 2), ("directory", 0), ("directory", 2)],
        short=[("url", 2)],
    ),
)
def test_others_at_the_step_stay_as_they_are(place, form, num_csds, capsys):
    path, roots = make_run(place, num_csds)
    expected = {name: contents(path, name) for name in (None, "now")}
    export = f"file://{place}/export" if form == "url" else place / "export"
    assert command("checkpoint", "export", path, export) == 0
    lose(path)
    before = files_of(find_members(path))
    assert command("verify", path) == 2
    assert "process 1: cannot be seen" in capsys.readouterr().out
    words = ("checkpoint", "restore", path, export, *roots)
    assert command(*words) == 1
    assert "say so: --process 1" in capsys.readouterr().err
    assert command(*words, "--process", 1) == 0
    said = capsys.readouterr().out
    assert "process-00001 made again, all members at step 1, where the others" in said
    assert "no longer checkpoints of all members: kept" in said
    assert files_of([path / "process-00000", path / "process-00002"]) == before
    assert contents(path) == expected[None]
    assert contents(path, "now") == expected["now"]
    assert [info.name for info in list_whole(path)] == ["now"]
    assert not damages(path)
    assert all(file.exists() for file in (path / "checkpoints/now").rglob("*"))


@pytest.mark.parametrize(
    ("others", "num_csds"),
    family(
        [("checkpoint", 0), ("checkpoint", 2), ("export", 0), ("export", 2)],
        short=[("export", 0)],
    ),
)
def test_others_that_are_further_go_to_the_step(place, others, num_csds, capsys):
    path, roots = make_run(place, num_csds)
    expected, url = contents(path, "kept"), f"file://{place}/export"
    assert command("checkpoint", "export", path, url, "--checkpoint", "kept") == 0
    lose(path)
    if others == "export":
        for one in find_members(path):
            remove_checkpoint(StoreDirectory.open(one), "kept")
    elif (
        not num_csds
    ):  # a name that is a word of its own where others are told how to go
        for one in find_members(path):
            (one / "checkpoints/kept").rename(one / "checkpoints/current")
    before = files_of(find_members(path))
    words = ("checkpoint", "restore", path, url, *roots, "--process", 1)
    assert command(*words) == 1
    assert "found them at step 1, another one; give that up" in capsys.readouterr().err
    assert files_of(find_members(path)) == before
    assert not (path / "process-00001").exists()
    assert command(*words, "--discard-current") == 0
    assert f"went by the{'ir checkpoint' if others == 'checkpoint' else ' export'}" in (
        capsys.readouterr().out
    )
    assert contents(path) == expected
    assert not damages(path)
    if others == "checkpoint":
        assert contents(path, "kept" if num_csds else "current") == expected


@pytest.mark.long
def test_a_run_that_lost_nothing_goes_to_an_export(place):
    path, _ = make_run(place)
    export, expected = place / "export", contents(path)
    assert command("checkpoint", "export", path, export) == 0
    words = ("checkpoint", "restore", path)
    assert command(*words, "kept", "--discard-current") == 0
    for one in find_members(path):
        remove_checkpoint(StoreDirectory.open(one), "now")
    assert command(*words, export, "--discard-current") == 0
    assert contents(path) == expected
    assert not damages(path)


def test_a_kept_step_takes_the_place_of_a_slot_with_lost_files(place):
    path, _ = make_run(place)
    expected = contents(path, "kept")
    slot = (path / "process-00001/current").resolve()
    for file in list(slot.glob("*/c/**/*"))[:3]:
        if file.is_file():
            file.unlink()
    words = ("checkpoint", "restore", path, "kept", "--discard-current")
    assert command(*words) == 0
    assert contents(path) == expected
    assert not damages(path)


@pytest.mark.long
def test_refusals(place, capsys):
    path, _ = make_run(place)
    url = f"file://{place}/export"
    assert command("checkpoint", "export", path, url) == 0

    def refused(text, *words, status=1):
        before = files_of(find_members(path))
        assert command("checkpoint", "restore", *words) == status
        assert text in capsys.readouterr().err
        assert files_of(find_members(path)) == before

    refused("if the member is lost, move aside", path, url, "--process", 1)
    refused("--process, --csd-root: expected", path, "kept", "--process", 1, status=2)
    lose(path)
    lost = ("--process", 1)
    refused("--process N)", path, "kept")
    refused("expected an export of jaxinf", path, f"{place}/none", *lost)
    refused("expected export.json", path, f"file://{place}/none", *lost)
    refused("expected the numbers of lost members", path, url, *lost, "--process", 7)
    refused("--memory", path, url, *lost, "--memory", "1KiB")
    (path / "process-00001").mkdir()
    (path / "process-00001/note").touch()
    refused("move aside what is left of it", path, url, *lost)
    shutil.rmtree(path / "process-00001")
    with memory_directory() as elsewhere:
        other, _ = make_run(elsewhere, mu=PLAIN)
        lose(other)
        refused("expected the leaves, state and optimizer", other, url, *lost)
    assert command("checkpoint", "restore", path, url, *lost) == 0
    for one in find_members(path):
        shutil.rmtree(one)
    refused("checkpoint import NEW", path, url, *lost)
    (path / "process-00001").mkdir()
    (path / "process-00001/jaxinf.json").touch()
    assert command("checkpoint", "restore", path, url, *lost) == 1
    assert "store rebalance NEW --processes N" in capsys.readouterr().err


def test_chunks_of_a_lost_drive_are_listed(place, capsys):
    path, _ = make_run(place, num_csds=2)
    directory = StoreDirectory.open(path / "process-00001")
    shutil.rmtree(directory.csd_directory(1))
    assert command("verify", path) == 2
    said = capsys.readouterr().out
    assert "process 1: cannot be seen" in said
    assert "leaf rows: it has chunks" in said
    assert f"at {place}/csd1/1" in said


@pytest.mark.long
def test_a_member_that_was_filled_and_not_published(place, monkeypatch):
    path, _ = make_run(place)
    expected, url = contents(path), f"file://{place}/export"
    assert command("checkpoint", "export", path, url) == 0
    lose(path)
    words = ("checkpoint", "restore", path, url, "--process", 1)

    def broken(*_):
        raise StoreIOError("no power")

    with monkeypatch.context() as patched:
        patched.setattr(StoreDirectory, "flip", broken)
        assert command(*words) == 1
    assert (path / "process-00001/slots/a/commit.json").exists()
    assert not (path / "process-00001/current").exists()
    assert command(*words) == 0
    assert contents(path) == expected
    assert not damages(path)


@pytest.mark.long
def test_killed_at_random_calls(place):
    words = [sys.executable, killed_rebuild.__file__, place, "24"]
    done = subprocess.run(
        list(map(str, words)), check=True, capture_output=True, text=True
    )
    print(done.stdout)
    assert "'lost'" in done.stdout
    assert "'made'" in done.stdout
