"""A hostile store: no name in it leads out of it.

Each test puts something into a store, or on its CSD, that leads to a victim's file or
directory beside it. No command changes or reads the victim: a command that meets such a
thing refuses it, and others do their work.
"""

import os
import shutil

import pytest
from copies import copied
from families import family
from store_driver import Driver

import jaxinf
from jaxinf.cli import main
from jaxinf.errors import StoreError, StoreFormatError
from jaxinf.store import Manifest, StoreDirectory, pinned_step, save_checkpoint, seal

on_csds = pytest.mark.parametrize("store", [2], indirect=True, ids=["2 CSDs"])
first_without_csds = pytest.mark.parametrize(
    "store", family([0, 2], short=[0]), indirect=True, ids=["no CSDs", "2 CSDs"]
)

LEAVES = {"scale": ((), "float32"), "w": ((2, 4096), "float32")}


@pytest.fixture(params=[0, 2], ids=["no CSDs", "2 CSDs"])
def store(request, place):
    """A store at step 2, with a checkpoint and leftovers of a crash."""
    options = {"num_csds": request.param, "chunk_elements": 4096}
    driver = Driver(place / "store", LEAVES, **options).init().steps(1)
    driver.store.checkpoint("kept")
    driver.steps(1).close()
    (driver.store.path / "snapshots").mkdir(exist_ok=True)
    return StoreDirectory.open(driver.store.path)


@pytest.fixture
def victim(place):
    """A directory with files of each kind, which nothing may touch."""
    path, content = place / "victim", b"mine" * 8192
    for name in ("file", "a/file", "c/file", "c/0", "kept/file", "x/y/z"):
        file = path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        os.utime(file, (0, 2e9))  # so each read would be noted, on a usual mount
    names = sorted(path.rglob("*"))
    files = [file for file in names if file.is_file()]
    yield path
    assert all(file.stat().st_atime == 0 for file in files), "a file was read"
    assert sorted(path.rglob("*")) == names
    assert all(file.read_bytes() == content for file in files)


def replaced(path, target):
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.is_dir():
        shutil.rmtree(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


# The names that each command looks at, before it does anything.
EVERYWHERE = {
    *("lock", "publish.lock", "checkpoints.lock", "jaxinf.json"),
    *("slots", "slots/a", "slots/b", "current", "checkpoints", "snapshots", "stream"),
}
# For others: commands that cannot do their work. With CSDs, names of chunks in STORE
# are for stock readers, and only `verify` and what replaces them looks there.
REFUSING = {
    "slots/a/commit.json": {"inspect", "verify", "export", "convert", "open", "save"},
    "slots/a/params.w/c/0/0": {"verify", "export", "convert", "save", "train"},
    "slots/b/params.w/c/0/0": {"train"},
    "slots/b/params.w": {"save", "train"},
    "slots/b/params.w/c": {"save", "train"},
    "checkpoints/kept/params.w/c/0/0": {"verify", "restore", "open to restore"},
    "checkpoints/kept/jaxinf.json": {"verify", "restore", "open to restore"},
    "checkpoints/kept/default/params.w": {"verify"},
    "checkpoints/kept/default": {"verify"},
    "checkpoints/kept/state": {"verify"},
    "checkpoints/kept": {"remove", "restore", "open to restore"},
    "checkpoints/.new-1": {"save", "remove", "open", "train"},
    "checkpoints/.gone-1": {"save", "remove", "open", "train"},
    "checkpoints/.old-1": {"save", "remove", "open", "train"},
    "snapshots/old/owner.lock": {"open", "train"},
}


def check_refused(store, name):
    refused, tried = use(store.path)
    if name in EVERYWHERE:
        assert refused == tried
    known = REFUSING.get(name, set())
    if known and store.manifest.csds and "/params.w" in name and "default" not in name:
        known = {"verify"}
    assert refused >= known


FILES = (
    *("lock", "publish.lock", "checkpoints.lock", "jaxinf.json"),
    *("slots/a/params.w/c/0/0", "slots/b/params.w/c/0/0", "slots/b/params.w/c/0/0.new"),
    *("slots/a/commit.json", "slots/b/commit.json", "slots/b/zarr.json"),
    *("checkpoints/kept/params.w/c/0/0", "checkpoints/kept/jaxinf.json"),
    *("checkpoints/kept/default/params.w", "snapshots/old/owner.lock", "stream/plan"),
)
FOLDERS = (
    *("slots", "slots/a", "slots/b", "slots/b/params.w", "slots/b/params.w/c"),
    *("current", "current.tmp", "checkpoints", "checkpoints/kept", "snapshots"),
    *("checkpoints/.new-1", "checkpoints/.gone-1", "checkpoints/.old-1"),
    *("snapshots/old", "stream"),
    *("checkpoints/kept/default", "checkpoints/kept/state"),
)
KINDS = (  # one of each kind, for `make test`
    *("lock", "jaxinf.json", "slots/b/params.w/c/0/0", "slots/a/commit.json"),
    *("checkpoints/kept/jaxinf.json", "snapshots/old/owner.lock", "stream/plan"),
    *("slots", "slots/b/params.w", "current", "checkpoints", "snapshots/old"),
)


def use(path):
    """Does everything that a user can do with a store; returns what was refused."""
    new, root, refused = path.with_name("new"), path.with_name("another"), set()
    root.mkdir(exist_ok=True)
    for name, action in ACTIONS.items():
        try:
            status = action(path)
            if status in (1, 2):  # of a command; a copy returns its bytes
                refused.add(name)
        except (StoreError, ValueError):
            refused.add(name)
        if name in refused:
            assert not new.exists(), name
        shutil.rmtree(new, ignore_errors=True)
    if "copy in place" in refused:
        assert not list(root.iterdir())
    return refused, EVERYTHING


def command(*words):
    def call(path):
        places = {"STORE": path, "NEW": path.with_name("new")}
        return main([str(places.get(word, word)) for word in words])

    return call


def pin(path):
    with pinned_step(StoreDirectory.open(path)):
        pass


def train(path):
    driver = Driver(path, leaves=LEAVES)
    try:
        driver.init().steps(2)
    finally:
        driver.close()


ACTIONS = {
    "list": command("checkpoint", "list", "STORE"),
    "inspect": command("inspect", "STORE"),
    "verify": command("verify", "STORE"),
    "export": command("checkpoint", "export", "STORE", "NEW"),
    "save": command("checkpoint", "save", "STORE", "more"),
    "open": lambda path: jaxinf.open_store(path).close(),
    "convert": lambda path: copied(path, path.with_name("new"), state="bf16"),
    "snapshot": pin,
    "save in Python": lambda path: save_checkpoint(StoreDirectory.open(path), "m"),
    "train": train,
    "open to restore": lambda path: jaxinf.open_store(path, restore="kept").close(),
    "restore": command("checkpoint", "restore", "STORE", "kept", "--discard-current"),
    "remove": command("checkpoint", "remove", "STORE", "kept"),
    "copy in place": lambda path: copied(path, roots=[path.with_name("another")]),
}
EVERYTHING = {*ACTIONS}


@pytest.mark.parametrize("name", family([*FILES, *FOLDERS], short=KINDS))
@first_without_csds
def test_a_link_that_leads_out(store, victim, name):
    own = {"current": "a"}.get(name, "file" if name in FILES else "")  # as a slot
    replaced(store.path / name, victim / own)
    check_refused(store, name)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a/params.w/c/0/0", {"verify", "export", "convert", "save", "train"}),
        ("b/params.w", {"save", "train"}),
        ("a", EVERYTHING),
        ("checkpoints", EVERYTHING),
        ("", EVERYTHING),  # the store's own directory
    ],
)
@on_csds
def test_a_link_on_a_csd(store, victim, name, expected):
    for folder in store.csd_directories:
        path = folder / name
        if path.exists():
            replaced(path, victim / "file" if path.is_file() else victim)
    refused, _ = use(store.path)
    assert refused >= expected


@pytest.mark.parametrize(
    "name", ["slots/b/params.w/c/0/0", "stream/x", "snapshots/y/c"]
)
@first_without_csds
def test_a_pipe(store, victim, name):
    path = store.path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    check_refused(store, name)


@on_csds
def test_chunk_links_to_a_directory_that_the_manifest_does_not_know(store, place):
    """The links have the form of the format's own."""
    link = next((store.path / "slots").glob("a/params.w/c/0/*"))
    target = os.readlink(link).replace(str(place), str(place / "elsewhere"))
    link.unlink()
    link.symlink_to(target)
    refused, _ = use(store.path)
    assert "verify" in refused


def test_a_manifest_that_names_a_victims_directory(store, victim):
    """The store is unfinished, so `open_store` would remove files on its CSDs."""
    folder = victim / f"jaxinf-{store.manifest.store_id}"
    (folder / "a").mkdir(parents=True)
    (folder / "a" / "file").write_text("mine")
    (store.path / "current").unlink()
    for record in store.path.glob("slots/*/commit.json"):
        record.unlink()
    document = Manifest.read(store.path / "jaxinf.json").to_json()
    document["csds"] = [str(victim)]
    for leaf in document["leaves"]:
        leaf["csds"] = [0] * len(leaf["csds"])
    (store.path / "jaxinf.json").write_bytes(seal(document))
    with pytest.raises(StoreFormatError):
        Driver(store.path, leaves=LEAVES).init()
    assert (folder / "a" / "file").read_text() == "mine"
    shutil.rmtree(folder)


@pytest.mark.parametrize("name", ["checkpoints/kept", "slots/a"])
def test_a_step_is_no_store(store, name):
    """A checkpoint has a manifest, too; a run on its path must not remove it."""
    path = store.path / name
    before = sorted(path.rglob("*"))
    with pytest.raises(StoreFormatError):
        Driver(path, leaves=LEAVES).init()
    left = [p for p in path.rglob("*") if p.name not in ("lock", "checkpoints.lock")]
    assert sorted(left) == before
