"""The format's bytes: a store written before opens, and a new one has its bytes."""

import numpy as np
import pytest
from golden_stores import IS_SPLIT, golden, make, same_files
from raw_stores import stored

import jaxinf
from jaxinf.store import StoreDirectory, verify_step


@pytest.mark.parametrize("name", IS_SPLIT)
def test_the_same_bytes_are_written(tmp_path, name):
    make(tmp_path / "store", name)
    same_files(tmp_path / "store", golden(name))


@pytest.mark.parametrize("name", ["store", "split"])
def test_the_golden_store_opens_and_goes_on(golden_store, name):
    held = golden_store(name)
    directory = StoreDirectory.open(held)
    assert verify_step(directory, held / "current") == []
    assert verify_step(directory, held / "checkpoints" / "2") == []
    with jaxinf.open_store(held) as store:
        assert store.step == 3
        assert store.payload == {"at": 3}
        assert [c.name for c in store.checkpoints()] == ["2"]
        # Momentum 1, 1.5, 1.75 times the learning rate of 0.5.
        master = stored(store, "params", "scalar")
        np.testing.assert_array_equal(master, 2 - 0.5 * (1 + 1.5 + 1.75))
        half = store.read("params", "b/half")
        np.testing.assert_array_equal(half, np.arange(5) - 0.5 * (1 + 1.5 + 1.75))
    with jaxinf.open_store(held, restore="2") as store:
        assert store.step == 2
        np.testing.assert_array_equal(store.read("trace", "b/half"), 1.5)
