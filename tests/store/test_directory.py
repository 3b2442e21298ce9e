"""Directories, slots and hard links of a store."""

import json
import os

import pytest
from raw_stores import chunk_file, chunk_of, make_manifest

from jaxinf.errors import StoreFormatError, StoreSpaceError
from jaxinf.store import (
    StateRecord,
    StoreDirectory,
    StoreLock,
    check_space,
    create_store,
    discard_store,
    required_bytes,
)


@pytest.mark.parametrize("num_csds", [0, 3])
def test_creation(make_directory, num_csds):
    directory = make_directory(num_csds=num_csds)
    assert StoreDirectory.open(directory.path).manifest == directory.manifest
    assert directory.committed_slot() is None
    assert directory.read_commit() is None
    allocated = 0
    for slot in ("a", "b"):
        root = directory.step_path(slot)
        for number, leaf in enumerate(directory.manifest.leaves):
            for state in leaf.states:
                array = root / leaf.array_name(state.name)
                found = json.loads((array / "zarr.json").read_text())
                assert found["data_type"] == state.dtype
                assert tuple(found["shape"]) == leaf.shape
                for position, chunk in enumerate(leaf.grid.chunks()):
                    file = chunk_file(directory, slot, number, state.name, position)
                    assert not file.is_symlink()
                    assert file.samefile(array / chunk.key)
                    assert (array / chunk.key).is_symlink() == (num_csds > 0)
                    stat = file.stat()
                    assert stat.st_size == chunk.stored_elements * state.itemsize
                    assert stat.st_nlink == 1
                    allocated += stat.st_blocks * 512
    assert allocated == sum(required_bytes(directory).values())


def test_space_is_checked_before_anything_is_written(place):
    states = [StateRecord(name, "float32") for name in ("params", "mu", "nu")]
    huge = make_manifest(states, {("w",): ((1 << 20, 1 << 22), (1, 1))}, (), 1 << 34)
    directory = StoreDirectory(place / "new" / "store", huge)
    with pytest.raises(StoreSpaceError, match=r"slots of [\d,]+ params need [\d,]+"):
        check_space(directory)
    assert not (place / "new").exists()


@pytest.mark.parametrize("num_csds", [0, 2])
@pytest.mark.parametrize("keeps", [False, True])
def test_what_takes_a_linked_file_s_place(make_directory, write_step, keeps, num_csds):
    directory = make_directory(num_csds=num_csds)
    write_step(directory, "a", 0)
    one = chunk_of(directory, 0, "mu")
    file = directory.chunk_path("a", one)
    before = file.stat().st_ino
    assert directory.prepare_write("a", one, keeps_content=keeps) == file
    assert file.stat().st_ino == before
    os.link(file, other := file.with_name("other"))
    assert directory.prepare_write("a", one, keeps_content=keeps) == file
    assert not file.samefile(other)
    assert file.stat().st_nlink == other.stat().st_nlink == 1
    wanted = other.read_bytes() if keeps else bytes(other.stat().st_size)
    assert any(other.read_bytes())
    assert file.read_bytes() == wanted


@pytest.mark.parametrize("num_csds", [0, 2])
def test_discard(make_directory, place, num_csds):
    directory = make_directory(num_csds=num_csds)
    lock = StoreLock(directory.path)
    discard_store(directory)
    lock.release()
    assert [p.name for p in directory.path.iterdir()] == ["lock"]
    for csd in range(num_csds):
        assert not list((place / f"store-csd{csd}").iterdir())
    create_store(directory)


def test_a_store_with_steps_is_never_discarded(make_directory, write_step):
    directory = make_directory()
    write_step(directory, "a", 0)
    with pytest.raises(StoreFormatError, match="expected no committed step, found one"):
        discard_store(directory)
    write_step(directory, "b", 1)
    (directory.path / "current").unlink()
    with pytest.raises(StoreFormatError, match=r"ln -s slots/b current"):
        discard_store(directory)
    assert chunk_file(directory, "b", 0, "mu").exists()
