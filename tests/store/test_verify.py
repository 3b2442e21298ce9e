"""Findings of `verify` beside damaged chunks: links, Orbax's links, records."""

import os
import shutil

import pytest
from golden_stores import golden

from jaxinf.store import StoreDirectory, verify_step


@pytest.fixture
def spread(make_directory, write_step):
    """A store on two CSDs, at step 2."""
    directory = make_directory(num_csds=2)
    write_step(directory, "a", 1)
    write_step(directory, "b", 2)
    assert not damages(directory, "slots/b")
    return directory


@pytest.fixture
def whole(tmp_path):
    """A store with a checkpoint."""
    path = shutil.copytree(golden("store"), tmp_path / "store", symlinks=True)
    directory = StoreDirectory.open(path)
    assert not damages(directory, "checkpoints/2")
    return directory


def damages(directory, place):
    return verify_step(directory, directory.path / place)


def chunk_links(directory, slot):
    found = (directory.path / "slots" / slot).rglob("c/**/*")
    links = sorted(path for path in found if path.is_symlink())
    assert len(links) > 4
    return links


@pytest.mark.parametrize(
    ("kind", "problem"),
    [("gone", "nothing"), ("file", "another file"), ("other", "one to ")],
)
def test_a_link_of_a_chunk(spread, kind, problem):
    link = chunk_links(spread, "b")[0]
    target, data = os.readlink(link), link.read_bytes()
    link.unlink()
    if kind == "file":
        link.write_bytes(data)
    if kind == "other":  # of the other slot
        link.symlink_to(target.replace("/b/", "/a/"))
        problem += target.replace("/b/", "/a/")
    first = damages(spread, "slots/b")[0]
    assert first.file == link
    assert first.problem.endswith(f"found {problem}")


@pytest.mark.parametrize("name", ["state", "default/_METADATA", "default/trace.a"])
@pytest.mark.parametrize("target", [None, "..", "/etc"])
def test_links_that_orbax_needs(whole, name, target):
    link = whole.path / "checkpoints/2" / name
    link.unlink()
    if target is not None:
        link.symlink_to(target)
    [damage] = damages(whole, "checkpoints/2")
    assert damage.what == f"link {name}"
    assert damage.file == link
