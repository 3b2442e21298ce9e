"""A checkpoint's directory makes the same store again, to the bit."""

import itertools
import json
import shutil

import numpy as np
import pytest
from copies import copied

from jaxinf.errors import (
    StoreCorruptError,
    StoreFormatError,
    StoreMismatchError,
)
from jaxinf.exchange.params import stream
from jaxinf.store import StoreDirectory, dtype_of, save_checkpoint, seal, step_of


def export(step):
    """Saves the step as a checkpoint, and returns its directory."""
    store = step.path.parent
    save_checkpoint(StoreDirectory.open(store), "kept")
    return store / "checkpoints" / "kept"


def read_step(directory):
    step = step_of(directory, directory.path / "current")
    arrays = {}
    for leaf in directory.manifest.leaves:
        for state in leaf.states:
            whole = np.empty(leaf.shape, dtype_of(state.dtype))
            for portion, values in stream(step, leaf, state, 1000):
                whole[(*portion.slices, ...)] = values
            arrays[leaf.array_name(state.name)] = whole
    return step, arrays


@pytest.mark.long
@pytest.mark.parametrize(("num_csds", "num_new_csds"), [(0, 3), (3, 0), (0, 0), (3, 2)])
def test_round_trip(make_step, place, check_bits, num_csds, num_new_csds):
    step, arrays = make_step(num_csds=num_csds)
    kept = export(step)
    roots = [place / f"root{i}" for i in range(num_new_csds)]
    for root in roots:
        root.mkdir()
    calls = []
    copied(kept, place / "again", lambda *call: calls.append(call), roots=roots)
    directory = StoreDirectory.open(place / "again")
    again, found = read_step(directory)
    check_bits(found, arrays)
    assert again.commit.to_json() == step.commit.to_json()
    assert directory.manifest.csds == tuple(map(str, roots))
    assert directory.manifest.store_id != step.manifest.store_id
    assert not directory.manifest.tree_difference(step.manifest)
    if not num_csds + num_new_csds:
        for file in (f for name in arrays for f in (step.path / name).rglob("*")):
            new = place / "again/current" / file.relative_to(step.path)
            assert file.is_dir() or new.read_bytes() == file.read_bytes()
    assert dict(directory.manifest.kernels) == dict(step.manifest.kernels)
    # The other slot has room for as much.
    assert calls[-1][0] == calls[-1][1] == 2 * sum(a.nbytes for a in arrays.values())


def test_a_record_of_other_arrays_is_refused_before_it_begins(make_step, place):
    leaves = {("a",): ((5,), (1,)), ("b",): ((1 << 16,), (1,))}
    step, _ = make_step(leaves=leaves)
    kept = export(step)
    manifest = (kept / "jaxinf.json").read_text().replace('"b"', '"c"')
    (kept / "jaxinf.json").write_bytes(seal(json.loads(manifest)))
    with pytest.raises(StoreMismatchError, match="holds other arrays than the store"):
        copied(kept, place / "again")
    shutil.move(kept, place / "alone")
    with pytest.raises(StoreFormatError, match="are not of one store"):
        copied(place / "alone", place / "again")
    assert not (place / "again").exists()


def test_a_flipped_bit_in_an_export_is_found(make_step, place):
    step, _ = make_step()
    kept = export(step)
    file = kept / "age.sharded.both" / "c" / "0" / "0" / "0"
    content = bytearray(file.read_bytes())
    content[0] ^= 1
    file.write_bytes(content)
    with pytest.raises(StoreCorruptError, match=r"leaf sharded/both, age, chunk 0"):
        copied(kept, place / "again")
    assert not (place / "again" / "jaxinf.json").exists()


def test_a_failure_leaves_no_store(make_step, place):
    step, _ = make_step()
    kept = export(step)
    calls = itertools.count()

    def fail(done, total):
        if next(calls) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        copied(kept, place / "again", fail)
    assert not (place / "again" / "jaxinf.json").exists()
    copied(kept, place / "again")
