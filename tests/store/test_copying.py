"""Copies of stores: other formats, drives and processes; in place, and killed."""

import contextlib
import functools
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import killed_copies
import numpy as np
import optax
import pytest
import raw_stores
import small_stores
from copies import chunks_of, copied
from families import covering, family
from inject import at_each_call
from killed_copies import contents, damages, grids_of, leftovers, make
from raw_stores import chunk_file, flip_bit, make_roots
from small_stores import train

import jaxinf
from jaxinf.cli.commands import main
from jaxinf.errors import (
    ProcessError,
    StoreCorruptError,
    StoreError,
    StoreFormatError,
    StoreIOError,
    StoreLockedError,
    StoreMismatchError,
    StoreSpaceError,
)
from jaxinf.store import (
    CommitRecord,
    Shards,
    StateRecord,
    StoreDirectory,
    StoreLock,
    find_members,
    pinned_step,
    save_checkpoint,
    staging,
)


def test_a_checkpoint_that_is_not_of_all_is_named(place, capsys):
    path = make(place)
    copied(path, processes=2)
    save_checkpoint(StoreDirectory.open(path / "process-00001"), "half")
    assert main(["store", "copy", str(path), str(path), "--processes", "1"]) == 0
    assert "left out, as not all members had them" in capsys.readouterr().out
    assert [file.name for file in (path / "checkpoints").iterdir()] == ["kept"]


def raw(path):
    """The bytes of every chunk of the committed step, codes and scales as they are."""
    parts = find_members(path) or [path]
    return {key: held for part in parts for key, held in chunks_of(part).items()}


COSINES = functools.partial(jax.tree.map, jnp.cos)


def test_an_average_and_codes_stay(place):
    roots, path = [*map(Path, make_roots(place, "run", 3))], place / "run"
    options = {"csds": roots[:2], "chunk_elements": 4096, "state": "int8"}
    with small_stores.open_store(path, **options) as store:
        params = {"w": jnp.ones((10, 4096)), "b": jnp.zeros(70)}
        average = jaxinf.ema(0.99, form="bf16")
        train(store, optax.adam(1e-3), params, [COSINES] * 2, average=average)
    states = StoreDirectory.open(path).manifest.leaves[1].states
    assert {state.codec for state in states} >= {"int8", "scale"}
    assert [state.name for state in states if "average" in state.name]
    (path / "metrics.jsonl").write_text("{}")  # a user's
    expected, calls = raw(path), []

    def report(*call):
        calls.append(call)

    for count, given in ((1, roots), (3, roots[:2]), (2, ())):
        copied(path, None, report, processes=count, roots=given)
        assert calls[-1][0] == calls[-1][1] > 0
        assert raw(path) == expected
        assert len(find_members(path) or [path]) == count
        assert not damages(path)
        assert not leftovers(path)
    assert (path / "metrics.jsonl").read_text() == "{}"
    # A chunk's codes have a scale together.
    with pytest.raises(StoreMismatchError, match=r"leaf w: .* --state fp32"):
        copied(
            path,
            processes=2,
            shards_of=lambda leaf: Shards((1,) if leaf.name == "b" else (1, 8)),
        )


@contextlib.contextmanager
def flipped_bit(file):
    flip_bit(file)
    yield
    flip_bit(file)


def test_too_little_room_or_damage_leaves_what_is_there(place, monkeypatch):
    path = make(place)
    expected, grids = contents(path), grids_of(path)
    full = os.statvfs_result((4096, 4096, 100, 0, 0, 10, 10, 10, 0, 255))
    with monkeypatch.context() as patched:
        patched.setattr("os.statvfs", lambda _: full)
        with pytest.raises(StoreSpaceError, match=r"to come need [0-9,]+ bytes"):
            copied(path, processes=3)
    assert not leftovers(path)
    directory = StoreDirectory.open(path)
    number = [leaf.name for leaf in directory.manifest.leaves].index("cut")
    file = chunk_file(directory, "b", number, "params", 2)
    with flipped_bit(file), pytest.raises(StoreCorruptError, match="leaf cut, params"):
        copied(path, processes=3)
    assert not leftovers(path)
    assert (contents(path), grids_of(path)) == (expected, grids)


def test_in_place_both_slots_of_a_larger_format_have_room(place, monkeypatch):
    states = [StateRecord(name, "float32") for name in ("params", "mu")]
    leaves = {("w",): ((64, 4096), (1, 1))}
    plain = raw_stores.make_store(place / "plain", states, leaves, (), 1 << 16)
    path = place / "coded"
    raw_stores.commit(plain, "a", np.zeros, step=0)
    copied(plain.path, path, state="int8")
    state_pages = 64 * 4  # of mu in float32; both slots need 1.47 times that more
    for free, refusal in (
        (state_pages * 5 // 4, pytest.raises(StoreSpaceError, match="to come need")),
        (state_pages * 6 // 4, contextlib.nullcontext()),
    ):
        status = os.statvfs_result((4096, 4096, 10**6, free, free, 9, 9, 9, 0, 255))
        with monkeypatch.context() as patched, refusal:
            patched.setattr("os.statvfs", lambda _, status=status: status)
            copied(path, state="fp32")
    assert not leftovers(path)
    assert not damages(path)


@pytest.mark.parametrize("target", ["run", "new"])
def test_a_link_where_a_copy_begins_is_not_followed(place, target):
    path = make(place)
    (place / "own").mkdir()
    (place / "own/file").touch()
    (place / f".{target}.copying").symlink_to(place / "own")
    with pytest.raises(StoreFormatError, match="found a symlink"):
        copied(path, place / target, processes=2)
    assert (place / "own/file").exists()


def test_refusals(place, monkeypatch):
    path = make(place)
    with monkeypatch.context() as patched:
        libc = SimpleNamespace(syncfs=staging.ctypes.CDLL(None).syncfs)
        patched.setattr(staging.ctypes, "CDLL", lambda *_, **__: libc)
        with pytest.raises(StoreIOError, match="exchanges two directories"):
            copied(path, processes=3)
    assert not leftovers(path)
    assert not damages(path)
    (place / "taken").mkdir()
    (place / "taken" / "file").touch()
    for source, target, options, message in (
        (path, None, {"processes": 0}, "processes=0: expected from 1"),
        (path, None, {"processes": 2, "roots": ["/none/1"]}, "CSD root /none/1: expec"),
        (path, None, {"roots": [place, place]}, "the same root is given twice"),
        (place / "none", None, {"processes": 2}, r"found nothing; check the path"),
        (path, place / "taken", {}, "expected nothing there, or an empty"),
        (path, place / "new", {"state": "fp32", "processes": 3}, "make two copies"),
    ):
        with pytest.raises((ValueError, StoreError), match=message):
            copied(source, target, **options)
    assert [p.name for p in (place / "taken").iterdir()] == ["file"]
    assert not (place / "new").exists()
    lock = StoreLock(path)
    with pytest.raises(StoreLockedError):
        copied(path, processes=2)
    lock.release()
    assert not leftovers(path)
    copied(path, processes=2)
    with pytest.raises(StoreMismatchError, match=r"store copy .* --processes 1"):
        jaxinf.open_store(path)
    shutil.move(path / "process-00001", place / "away")
    with pytest.raises(ProcessError, match="found none of process 1"):
        copied(path, processes=1)
    shutil.move(place / "away", path / "process-00001")
    copied(path, processes=1)
    with (
        pinned_step(StoreDirectory.open(path)),
        pytest.raises(StoreLockedError, match="nobody who reads its step"),
    ):
        copied(path, processes=2)


@pytest.mark.long
@pytest.mark.parametrize("num_csds", [0, 2])
def test_killed_at_random_calls(place, num_csds, run_python):
    done = run_python(Path(killed_copies.__file__), make(place, num_csds), 40)
    print(done.stdout)
    assert "'old'" in done.stdout


# --- formats, drives and processes ---------------------------------------------------

FORMATS, COUNTS, PLACES = ["fp32", "bf16", "int8"], [1, 2, 4], ["directory", "URL"]
SHAPES = {"w": (10, 4096), "h": (5, 4096), "b": (70,)}
AXES = (FORMATS, [0, 2], COUNTS, PLACES)
CASES = covering(2, *AXES, *AXES)
"""Every two values meet, as what is copied and as its copy; S3: tests/object_store."""


def trained(path, roots, state):
    options = {"csds": roots, "chunk_elements": 4096, "state": state}
    draw = np.random.default_rng(0).standard_normal
    params = {n: jnp.asarray(draw(s), jnp.float32) for n, s in SHAPES.items()}
    for name in ("kept", None):
        with small_stores.open_store(path, **options) as store:
            *_, held = train(store, optax.adam(1e-2), params, [COSINES])
            store.wait(held)
            if name is not None:
                store.checkpoint(name)


def roots_of(place, name, num, count):
    """Makes CSD roots, in which {process} is a process's number."""
    for number in range(num):
        for process in range(count):
            (place / f"{name}{number}" / str(process)).mkdir(parents=True)
    return [f"{place}/{name}{number}/{{process}}" for number in range(num)]


def numbers(path, checkpoint=None):
    arrays = contents(path, checkpoint)
    return {name: np.frombuffer(raw, np.float32) for name, raw in arrays.items()}


def exported(path, place):
    url = f"file://{place}"
    assert main(["store", "copy", str(path), url]) == 0
    return url


@pytest.mark.parametrize(
    ("old_form", "new_form"),
    family([(row[:4], row[4:]) for row in CASES], short=[(CASES[1][:4], CASES[1][4:])]),
)
def test_every_two_forms(place, old_form, new_form):
    (was, old_csds, old_count, old_place) = old_form
    (state, new_csds, count, new_place) = new_form
    old, new, plain = place / "old", place / "new", place / "plain"
    alone = roots_of(place, "alone", old_csds, 1)
    trained(old, [root.replace("{process}", "0") for root in alone], was)
    if old_count > 1:
        copied(
            old, processes=old_count, roots=roots_of(place, "o", old_csds, old_count)
        )
    names = [None, "kept"] if old_place == "directory" else [None]
    before, bits = numbers(old), {name: contents(old, name) for name in names}
    source = old if old_place == "directory" else exported(old, place / "exported")
    form = {"state": state, "roots": roots_of(place, "n", new_csds, count)}
    copied(source, new, processes=count, checkpoints=True, **form)
    assert not leftovers(new)
    assert not damages(new)
    assert not damages(old)
    for name, expected in bits.items():
        assert contents(old, name) == expected
        if state in ("fp32", was):
            assert contents(new, name) == expected
    for name, values in numbers(new).items():
        least = 0.02 * np.abs(before[name]).max()
        assert np.abs(values - before[name]).max() <= least
    # Bits depend on neither drives nor processes, nor on a URL between.
    copied(old, plain, state=state, processes=1)
    assert raw(plain) == raw(new)
    if new_place == "URL":
        copied(exported(new, place / "new-exported"), place / "again")
        assert raw(place / "again") == raw(new)


def test_a_copy_is_durable_before_it_is_one(place, monkeypatch):
    """Chunks before the record, checkpoints before the flip, at last its name."""
    path, events = make(place), []
    for owner, name in (
        (StoreDirectory, "sync"),
        (CommitRecord, "write"),
        (StoreDirectory, "flip"),
        (staging, "fsync_directory"),
    ):
        at_each_call(monkeypatch, owner, name, lambda *_, n=name: events.append(n))
    copied(path, place / "new", checkpoints=True)
    names = 2 * ["fsync_directory"]
    assert events == ["sync", "write", "write", "sync", "flip", *names]


@pytest.mark.parametrize("num_csds", family([0, 2], short=[0]))
def test_another_file_system(place, tmp_path, num_csds):
    if place.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("expected the memory's directory to be another file system")
    path = make(place, num_csds)
    expected = {name: contents(path, name) for name in (None, "kept")}
    directory = StoreDirectory.open(path)
    number = [leaf.name for leaf in directory.manifest.leaves].index("cut")
    file = chunk_file(directory, "b", number, "params", 2)
    with flipped_bit(file), pytest.raises(StoreCorruptError, match="leaf cut, params"):
        copied(path, tmp_path / "new")
    assert not list(tmp_path.iterdir())
    roots = roots_of(tmp_path, "c", 2, 1)
    assert copied(path, processes=1, roots=roots) > 0
    for name, arrays in expected.items():
        assert contents(path, name) == arrays
    assert not damages(path)
    for root in place.glob("csd*/*"):
        assert not list(root.iterdir())
    copied(path, tmp_path / "new", checkpoints=True)
    assert contents(tmp_path / "new", "kept") == expected["kept"]
