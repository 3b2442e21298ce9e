"""Slots, snapshots and checkpoints are readable by stock zarr and Orbax.

Tests elsewhere read by tensorstore: `raw_stores.read_array`.
"""

from pathlib import Path

import numpy as np
import pytest
import zarr
from families import family

from jaxinf.store import StateRecord, pinned_step, save_checkpoint

PROGRAM = Path(__file__).with_name("stock_orbax_program.py")

# Dtypes that every reader supports; only tensorstore has bfloat16.
STATES = (
    StateRecord("params", "float32"),
    StateRecord("mu", "float16"),
    StateRecord("count", "int32"),
    StateRecord("sign", "bool"),
)


@pytest.fixture
def committed(make_directory, write_step):
    """A store on three CSD roots at step 3, and its arrays."""
    directory = make_directory(num_csds=3, states=STATES)
    for step in range(3):
        write_step(directory, "ab"[step % 2], step)
    return directory, write_step(directory, "b", 3)


@pytest.fixture(
    params=family(["current", "snapshot", "checkpoint"], short=["checkpoint"])
)
def opened(request, committed):
    """A path to the committed step, and its arrays."""
    directory, arrays = committed
    if request.param == "current":
        yield directory.path / "current", arrays
    elif request.param == "checkpoint":
        save_checkpoint(directory, "best")
        yield directory.path / "checkpoints" / "best", arrays
    else:
        with pinned_step(directory) as step:
            path = step.path
            yield path, arrays


def check(found, arrays):
    assert sorted(found) == sorted(arrays)
    for name, value in found.items():
        assert value.dtype == arrays[name].dtype
        np.testing.assert_array_equal(value, arrays[name])


def test_zarr_python(opened):
    path, arrays = opened
    group = zarr.open_group(str(path), mode="r")
    # Listing the group works too, with a warning about each of Orbax's files.
    check({name: np.asarray(group[name]) for name in arrays}, arrays)


@pytest.mark.long
@pytest.mark.parametrize("num_csds", [0, 3])
def test_orbax_alone_in_every_way(
    make_directory, write_step, tmp_path, num_csds, run_python
):
    """A program with Orbax and four JAX devices, without jaxinf."""
    directory = make_directory(num_csds=num_csds, states=STATES)
    arrays = write_step(directory, "a", 3)
    save_checkpoint(directory)
    save_checkpoint(directory, "best")  # no step's number: managers do not list it
    np.savez(tmp_path / "arrays.npz", **arrays)
    checkpoints = directory.path / "checkpoints"
    flags = "--xla_force_host_platform_device_count=4"
    with pinned_step(directory) as step:
        places = [directory.path / "current", step.path]
        places += [checkpoints / "best", checkpoints / "3"]
        words = [tmp_path / "arrays.npz", checkpoints, "3", *places]
        assert run_python(PROGRAM, *words, XLA_FLAGS=flags).stdout == "restored\n"
