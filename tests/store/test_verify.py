"""Findings of `verify` beside damaged chunks: links, Orbax's links, records."""

import json
import os
import shutil

import pytest
from golden_stores import golden

from jaxinf.store import StoreDirectory, seal, verify_step


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


def test_swapped_links_of_chunks(spread):
    links = [
        link
        for link in chunk_links(spread, "b")
        if "params.h0.attn.kernel" in str(link)
    ][:2]
    targets = [os.readlink(link) for link in links]
    for link, target in zip(links, reversed(targets), strict=True):
        link.unlink()
        link.symlink_to(target)
    found = damages(spread, "slots/b")
    named = [f"link {link.relative_to(spread.path / 'slots/b')}" for link in links]
    assert [damage.what for damage in found][:2] == named
    assert f"to {targets[0]}, found one to {targets[1]}" in found[0].problem


def test_links_to_the_other_slot(spread):
    link = chunk_links(spread, "b")[0]
    target = os.readlink(link).replace("/b/", "/a/")
    link.unlink()
    link.symlink_to(target)
    assert f"found one to {target}" in damages(spread, "slots/b")[0].problem


def test_a_missing_link(spread):
    link = chunk_links(spread, "b")[0]
    link.unlink()
    first = damages(spread, "slots/b")[0]
    assert first.file == link
    assert first.problem.endswith("found nothing")


def test_a_file_in_a_links_place(spread):
    link = chunk_links(spread, "b")[0]
    data = link.read_bytes()
    link.unlink()
    link.write_bytes(data)
    [damage] = damages(spread, "slots/b")
    assert damage.problem.endswith("found another file")


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


def test_a_bit_of_a_chunk(whole):
    chunk = whole.path / "current/params.a/c/0/0"
    data = bytearray(chunk.read_bytes())
    data[3] ^= 1
    chunk.write_bytes(data)
    [damage] = damages(whole, "current")
    assert "leaf a, params, chunk" in damage.what
    assert damage.problem.startswith("expected CRC-32C ")


def test_another_shape_in_the_documents_of_an_array(whole):
    step = whole.path / "current"
    file = step / "params.a/zarr.json"
    document = json.loads(file.read_text())
    document["shape"][0] += 1
    file.write_text(json.dumps(document, indent=1) + "\n")
    [damage] = damages(whole, "current")
    assert (damage.file, damage.what) == (file, "params.a/zarr.json")
    assert damage.problem == "expected what jaxinf writes, found others"


def test_the_marker_that_orbax_needs(whole):
    (whole.path / "checkpoints/2/orbax.checkpoint").unlink()
    [damage] = damages(whole, "checkpoints/2")
    assert damage.what == "orbax.checkpoint"


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("step", -1, "step: expected a whole number >= 0"),
        ("step", 2**31, "step: expected a whole number <= 2147483647"),
        ("skipped_steps", -1, "skipped_steps: expected a whole number"),
    ],
    ids=["negative", "large", "skipped"],
)
def test_records(whole, key, value, problem):
    file = whole.path / "current/commit.json"
    document = json.loads(file.read_text())
    del document["crc32c"]
    file.write_bytes(seal({**document, key: value}))
    found = damages(whole, "current")
    assert found
    assert all(problem in damage.problem for damage in found)


def test_spellings_of_a_scalar_that_disagree(tmp_path):
    path = shutil.copytree(golden("scalars"), tmp_path / "store", symlinks=True)
    file = path / "current/commit.json"
    document = json.loads(file.read_text())
    del document["crc32c"]
    scalar = next(s for s in document["scalar_state"] if "learning_rate" in s["path"])
    assert scalar["value"] == "0.5"
    scalar["value"] = "0.25"
    file.write_bytes(seal(document))
    [damage] = damages(StoreDirectory.open(path), "current")
    assert "its data says 0.5, its value says '0.25'" in damage.problem
