"""Findings of `verify` beside damaged chunks: links, Orbax's links, records."""

import os

import pytest

from jaxinf.store import StoreDirectory, verify_step


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
def test_a_link_of_a_chunk(make_directory, write_step, kind, problem):
    directory = make_directory(num_csds=2)
    write_step(directory, "a", 1)
    write_step(directory, "b", 2)
    assert not damages(directory, "slots/b")
    link = chunk_links(directory, "b")[0]
    target, data = os.readlink(link), link.read_bytes()
    link.unlink()
    if kind == "file":
        link.write_bytes(data)
    if kind == "other":  # of the other slot
        link.symlink_to(target.replace("/b/", "/a/"))
        problem += target.replace("/b/", "/a/")
    first = damages(directory, "slots/b")[0]
    assert first.file == link
    assert first.problem.endswith(f"found {problem}")


@pytest.mark.parametrize("name", ["state", "default/_METADATA", "default/trace.a"])
@pytest.mark.parametrize("target", [None, "..", "/etc"])
def test_links_that_orbax_needs(golden_store, name, target):
    whole = StoreDirectory.open(golden_store())
    assert not damages(whole, "checkpoints/2")
    link = whole.path / "checkpoints/2" / name
    link.unlink()
    if target is not None:
        link.symlink_to(target)
    [damage] = damages(whole, "checkpoints/2")
    assert damage.what == f"link {name}"
    assert damage.file == link
