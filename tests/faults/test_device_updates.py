"""Runs whose updates a JAX device shares, killed at each point: no bit is lost."""

from pathlib import Path

import device_updates
import numpy as np
import pytest
import small_stores
from streaming_cases import states

pytestmark = pytest.mark.optimized

KILLS = [
    ("store", "device", 6),
    ("store-rare", "device", 11),
    ("store", "updated", 14),
    ("store", "write", 3),
    ("store-rare", "write", 3),
    ("store", "commit", 2),
]


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    path = tmp_path_factory.mktemp("plain") / "store"
    store = small_stores.open_store(path, **device_updates.CHUNKS)
    with device_updates.open_step(store, None) as step:
        for batch in device_updates.batches():
            step(batch)
        store.wait()
        return states(store)


@pytest.mark.faults
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "point", "number"), KILLS)
def test_a_killed_run_goes_on_with_the_same_bits(
    name, point, number, place, expected, run_python
):
    path, program = place / name, Path(device_updates.__file__)
    killed = run_python(program, path, point, number, check=False)
    assert killed.returncode == -9, killed.stderr
    noted = Path(f"{path}.step")
    store = small_stores.open_store(path, **device_updates.CHUNKS)
    committed = int(noted.read_text()) if noted.exists() else 0
    assert committed <= store.step <= committed + 1 + ("rare" in name)
    with device_updates.open_step(store, 2, replan=True) as step:
        for batch in device_updates.batches()[store.step :]:
            step(batch)
        store.wait()
        found = states(store)
    for key, array in expected.items():
        np.testing.assert_array_equal(found[key], array, err_msg=str(key))
