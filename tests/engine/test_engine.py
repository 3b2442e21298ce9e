"""Opening and making stores: refused cases with their messages, and accepted ones."""

import contextlib
import json
import os
import shutil
import subprocess

import numpy as np
import optax
import pytest
from store_driver import LEAVES, Driver

import jaxinf
from jaxinf.errors import (
    StaleStateError,
    StoreClosedError,
    StoreFormatError,
    StoreIOError,
    StoreLockedError,
    StoreMismatchError,
    StoreSpaceError,
)
from jaxinf.store import StoreDirectory, StoreLock, seal


@contextlib.contextmanager
def mounted(*command):
    """Mounts something while the context lasts; skips without permission."""
    if subprocess.run(["mount", *command], capture_output=True).returncode:
        pytest.skip("this process may not mount file systems")
    try:
        yield
    finally:
        subprocess.run(["umount", command[-1]], check=True)


@pytest.fixture
def small_disk(place):
    """A file system of 4 MiB."""
    path = place / "small"
    path.mkdir()
    with mounted("-t", "tmpfs", "-o", "size=4m", "tmpfs", path):
        yield path


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"csd": "gpu"}, "csd='gpu': expected one of 'host'"),
        (
            {"csds": ["missing"]},
            "missing: expected a directory on a mounted drive, found",
        ),
        (
            {"csds": ["file"]},
            "file: expected a directory on a mounted drive, found a f",
        ),
        ({"csds": ["dir", "dir/"]}, "the same root is given twice"),
    ],
)
def test_bad_options(place, options, message):
    (place / "file").write_text("")
    (place / "dir").mkdir()
    if "csds" in options:
        options = {"csds": [f"{place}/{root}" for root in options["csds"]]}
    with pytest.raises(ValueError, match=message):
        jaxinf.open_store(place / "store", **options)
    assert not (place / "store").exists()


def test_a_file_in_the_place(place):
    (place / "file").write_text("")
    for path in (place / "file", place / "file" / "below"):
        with pytest.raises(NotADirectoryError, match="give another path"):
            jaxinf.open_store(path)


def test_a_directory_of_something_else(place):
    (place / "thesis.tex").write_text("")
    with pytest.raises(StoreFormatError, match=r"nor emptiness \(thesis\.tex"):
        jaxinf.open_store(place)
    assert [p.name for p in place.iterdir()] == ["thesis.tex"]


def test_a_place_that_cannot_be_written_to(place):
    path = place / "read-only"
    path.mkdir()
    with mounted("--bind", path, path):
        remount = ["mount", "-o", "remount,ro,bind", path]
        subprocess.run(remount, check=True, capture_output=True)
        with pytest.raises(PermissionError, match=f"found {path} read-only for this"):
            jaxinf.open_store(path / "new" / "store")
        with pytest.raises(PermissionError, match="remount it, or give another path"):
            jaxinf.open_store(place / "store", csds=[path])


def test_opening_writes_nothing(place):
    store = jaxinf.open_store(place / "new" / "store")
    assert not store.exists
    assert store.step == 0
    with pytest.raises(StoreFormatError, match=r"empty until tx\.init has run on it"):
        _ = store._manifest
    store.close()
    assert not list(place.iterdir())


def test_no_space(place, drive):
    leaves = {"w": ((1 << 20, 1 << 20), "float32")}
    # Its params are never made: only the description counts.
    driver = drive(chunk_elements=1 << 32)
    small = driver.description
    wide = small.leaves[0]
    huge = type(wide)(**{**vars(wide), "shape": leaves["w"][0], "shard_counts": (1, 1)})
    description = type(small)((huge,), small.scalar_paths)
    with pytest.raises(
        StoreSpaceError, match=r"free some, or choose another directory"
    ):
        driver.engine.bind(description, may_create=True)
    assert not (place / "store").exists()
    driver.init().steps(1).check(1)


def test_no_space_in_the_middle(small_disk, drive):
    leaves = {"w": ((20, 4096), "float32")}
    roots = {"csds": [small_disk], "chunk_elements": 4096}
    driver = drive(leaves=leaves, **roots).init().steps(2)
    with driver.store.snapshot() as path:
        # Each step rewrites chunks that the snapshot holds: room for one copy is there.
        driver.steps(3).check(5)
        driver.check(2, path)
        with driver.store.snapshot(), driver.store.snapshot():
            driver.step()
            (small_disk / "ballast").write_bytes(bytes(1))
            free = shutil.disk_usage(small_disk).free
            (small_disk / "ballast").write_bytes(bytes(free))
            driver.store.wait()
            with (
                driver.store.snapshot(),
                pytest.raises(StoreSpaceError, match="failed: No space left on device"),
            ):
                driver.steps(3)
    with pytest.raises(StoreSpaceError, match="free space there, remove a checkpoint"):
        driver.store.check()
    committed = driver.opened.commit.step
    driver.close()
    (small_disk / "ballast").unlink()
    driver = drive(leaves=leaves).init()
    assert driver.at == committed
    driver.check(committed)
    driver.steps(2).check(committed + 2)


def test_one_writer(drive, place):
    driver = drive().init()
    with pytest.raises(StoreLockedError, match="locked by this very process"):
        StoreLock(place / "store")
    driver.step()
    driver.close()
    drive().init().check(1)


def test_one_maker(drive, place, monkeypatch):
    """Two openings precede the store; the second continues with it."""
    first = drive()
    # As in another process, which knows nothing of the stores that are open here.
    monkeypatch.setattr("jaxinf.engine.open_stores._open", {})
    second = drive()
    first.init().step()
    first.close()
    second.init()
    assert second.at == 1
    second.steps(1).check(2)


def test_a_second_init_makes_a_new_store_anew(drive, place):
    driver = drive()
    assert driver.engine.bind(driver.description, may_create=True)
    workers = threads()
    other = Driver(place / "elsewhere", {"v": ((5,), "float32")})
    assert driver.engine.bind(other.description, may_create=True)
    assert threads() == workers
    assert [leaf.name for leaf in driver.store._manifest.leaves] == ["v"]
    other.close()
    other.store = driver.store
    other.init().steps(2).check(2)


def threads():
    import threading

    return sorted(t.name for t in threading.enumerate() if t.name.startswith("jaxinf"))


def test_update_needs_init(drive):
    driver = drive()
    with pytest.raises(StaleStateError, match=r"call tx\.init\(params\) on it first"):
        driver.engine.bind(driver.description)
    driver.init().step()


@pytest.mark.parametrize("num_csds", [0, 2])
@pytest.mark.parametrize("files", ["manifest", "all", "first commit"])
def test_creation_cut_short(drive, place, num_csds, files):
    driver = drive(num_csds=num_csds)
    if files == "manifest":
        (place / "store").mkdir()
        manifest = driver.description.manifest(
            [str(place / f"csd{i}") for i in range(num_csds)], "", ""
        )

        manifest.write(place / "store" / "jaxinf.json")
        driver.close()
    elif files == "all":
        driver.engine.bind(driver.description, may_create=True)
        driver.close()
    else:
        driver.init().close()
        (place / "store" / "current").unlink()
    driver = drive()
    assert not driver.store.exists
    driver.init().steps(1).check(1)
    # The new store has the roots of the unfinished one.
    assert len(driver.store._manifest.csds) == num_csds
    for csd in range(num_csds):
        assert len(list((place / f"csd{csd}").iterdir())) == 1


def test_creation_cut_short_before_the_manifest(drive, place):
    (place / "store").mkdir()
    for name in ("lock", ".jaxinf.json.12.ab12.tmp", "current.tmp"):
        (place / "store" / name).write_text("")
    drive().init().steps(1).check(1)


def test_a_store_that_lost_current_is_not_made_anew(drive, place):
    drive().init().steps(3).close()
    (place / "store" / "current").unlink()
    with pytest.raises(StoreFormatError, match="was the store copied without its sym"):
        jaxinf.open_store(place / "store")
    (place / "store" / "current").symlink_to("slots/b")
    drive().init().check(3)


@pytest.mark.parametrize("copy", ["cp -a", "cp -aL"])
def test_copies(drive, place, copy):
    drive().init().steps(3).close()
    os.system(f"{copy} {place}/store {place}/copy")
    if copy == "cp -a":
        drive("copy").init().steps(1).check(4)
    else:
        with pytest.raises(
            StoreFormatError, match=r"found a file; was the store copied"
        ):
            jaxinf.open_store(place / "copy")


def test_csd_roots_of_a_store(drive, place):
    drive(num_csds=2).init().steps(1).close()
    other = place / "other"
    other.mkdir()
    with pytest.raises(StoreMismatchError, match="leave csds out when opening an exis"):
        jaxinf.open_store(place / "store", csds=[other])
    with pytest.raises(StoreMismatchError, match="given were"):
        jaxinf.open_store(place / "store", csds=[place / "csd1", place / "csd0"])
    (place / "csd1").rename(place / "away")
    with pytest.raises(
        StoreFormatError, match=r"CSD 1 of the store should be at .*csd1"
    ):
        jaxinf.open_store(place / "store")
    (place / "away").rename(place / "csd1")
    drive(num_csds=2).init().check(1)


def test_csd_roots_of_a_store_without(drive, place):
    drive().init().close()
    (place / "other").mkdir()
    with pytest.raises(
        StoreMismatchError, match="CSD roots are the store itself, given"
    ):
        jaxinf.open_store(place / "store", csds=[place / "other"])


def test_other_optimizers_and_trees(drive):
    drive().init().close()
    driver = drive(leaves={**LEAVES, "bias": ((130,), "float32")})
    with pytest.raises(
        StoreMismatchError, match=r"leaf bias: shape \(129,\) in the sto"
    ):
        driver.init()
    driver.close()
    driver = drive(tx=optax.sgd(1.0))
    with pytest.raises(
        StoreMismatchError, match=r"states \(params float32, trace float"
    ):
        driver.init()
    driver.close()
    driver = drive(tx=optax.sgd(0.5, momentum=0.5, nesterov=True))
    with pytest.raises(StoreMismatchError, match=r"other equations:\n.*--- store"):
        driver.init()
    driver.close()
    driver = drive(tx=optax.sgd(0.25, momentum=0.75))  # constants are no difference
    assert not driver.engine.bind(driver.description)


def test_equations_of_other_versions_go_on_with_a_warning(drive, place, caplog):
    drive().init().close()
    path = place / "store" / "jaxinf.json"
    document = json.loads(path.read_text())
    document["created_by"]["optax"] = "0.1"
    path.write_bytes(seal(document))
    driver = drive(tx=optax.sgd(0.5, momentum=0.5, nesterov=True))
    assert not driver.engine.bind(driver.description)
    assert "so do the versions of jax or optax" in caplog.text


def test_other_params(drive):
    drive().init().steps(1).close()
    driver = drive()
    driver.initial["embed"][39, 1024] += 1
    with pytest.raises(
        StoreMismatchError, match=r"params are not those .* of that step \(leaf embed"
    ):
        driver.init()


def test_params_like(drive):
    import jax

    driver = drive(num_csds=2).init().steps(3)
    like = {
        n: jax.ShapeDtypeStruct(p.shape, "float32") for n, p in driver.initial.items()
    }
    for tree, dtype in ((driver.initial, None), (like, np.float32)):
        read = driver.store.params(tree)
        for number, (name, (master, _)) in enumerate(driver.expected(3).items()):
            wanted = master if dtype else driver.rounded(number, master)
            assert read[name].dtype == wanted.dtype
            np.testing.assert_array_equal(read[name], wanted)
    with pytest.raises(
        StoreMismatchError, match=r"`like` has other leaves than the store"
    ):
        driver.store.params({"bias": like["bias"]})
    driver.store.check()


def test_views_of_the_store(drive):
    driver = drive(num_csds=2).init().steps(2)
    driver.store.wait()
    assert repr(driver.store) == f"Store({str(driver.store.path)!r}, step 2)"
    array = driver.store.tensorstore("trace", "embed")
    _, momentum = driver.expected(2)["embed"]
    np.testing.assert_array_equal(array.read().result(), momentum)
    with pytest.raises(ValueError, match="no leaf 'x' in the store"):
        driver.store.tensorstore("trace", "x")


def test_closed(drive):
    driver = drive().init().steps(1)
    driver.close()
    driver.close()
    store = driver.store
    calls = [
        lambda: store.step,
        lambda: store.payload,
        lambda: store.params(driver.initial),
        lambda: store._manifest,
        store.check,
        store.wait,
        lambda: store.annotate(9, None),
        lambda: store.tensorstore("params", "bias"),
        lambda: store.snapshot().__enter__(),
        driver.update,
    ]
    for call in calls:
        with pytest.raises(
            StoreClosedError, match="the store is closed; open it again"
        ):
            call()


def test_a_damaged_store_gives_its_lock_back(drive, place):
    drive().init().close()
    record = place / "store" / "slots" / "a" / "commit.json"
    text = record.read_text()
    record.write_text("{")
    with pytest.raises(
        StoreFormatError, match="expected the record of a committed step"
    ):
        jaxinf.open_store(place / "store")
    damaged = json.loads(text)
    name, sums = next(iter(damaged["checksums"].items()))
    damaged["checksums"][name] = sums + " 00000000"
    record.write_bytes(seal(damaged))
    with pytest.raises(StoreFormatError, match=r"expected 1 checksums, .* found 2"):
        jaxinf.open_store(place / "store")
    record.write_text(text)
    StoreLock(place / "store").release()
    drive().init().check(0)


def test_errors_of_making_leave_a_place_that_can_be_used(drive, place):
    driver = drive()
    (place / "store" / "slots").mkdir(parents=True)
    with pytest.raises(StoreFormatError, match="nor emptiness"):
        driver.init()
    (place / "store" / "slots").rmdir()
    driver.init().steps(1).check(1)
    assert isinstance(driver.opened.directory, StoreDirectory)


def test_a_place_that_becomes_a_file(drive, place):
    driver = drive()
    (place / "store").write_text("")
    with pytest.raises((NotADirectoryError, FileExistsError, StoreIOError)):
        driver.init()
