"""Slots, snapshots and checkpoints are readable by stock zarr and Orbax.

Tests elsewhere read by tensorstore: `raw_stores.read_array`.
"""

from pathlib import Path

import numpy as np
import pytest
import zarr

from jaxinf.store import StateRecord, pinned_step, save_checkpoint

PROGRAM = Path(__file__).with_name("stock_orbax_program.py")

# Dtypes that every reader supports; only tensorstore has bfloat16.
STATES = (
    StateRecord("params", "float32"),
    StateRecord("mu", "float16"),
    StateRecord("count", "int32"),
    StateRecord("sign", "bool"),
)


def test_zarr_python(make_directory, write_step):
    directory = make_directory(num_csds=3, states=STATES)
    write_step(directory, "a", 0)
    arrays = write_step(directory, "b", 1)
    save_checkpoint(directory, "best")
    with pinned_step(directory) as step:
        for place in ("current", "checkpoints/best", f"snapshots/{step.path.name}"):
            group = zarr.open_group(str(directory.path / place), mode="r")
            # Listing the group works too, with a warning about each of Orbax's files.
            for name, expected in arrays.items():
                found = np.asarray(group[name])
                assert found.dtype == expected.dtype
                np.testing.assert_array_equal(found, expected)


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
