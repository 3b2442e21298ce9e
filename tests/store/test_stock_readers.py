"""A slot and a snapshot are readable by stock zarr and Orbax."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
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


@pytest.fixture(params=family([0, 3], short=[3]), ids=["no CSD root", "3 CSD roots"])
def committed(request, make_directory, write_step):
    """A store at step 3, and its arrays."""
    directory = make_directory(num_csds=request.param, states=STATES)
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


def as_tree(directory_tree, prefix=()):
    """Arrays of a restored tree by the name of their directory."""
    for key, value in directory_tree.items():
        if isinstance(value, dict):
            yield from as_tree(value, (*prefix, key))
        else:
            yield ".".join((*prefix, key)), np.asarray(value)


def check(found, arrays):
    assert sorted(found) == sorted(arrays)
    for name, value in found.items():
        assert value.dtype == arrays[name].dtype
        np.testing.assert_array_equal(value, arrays[name])


def test_tensorstore(opened):
    path, arrays = opened
    spec = {"driver": "zarr3", "kvstore": {"driver": "file"}}
    found = {}
    for name in arrays:
        spec["kvstore"]["path"] = f"{path / name}/"
        found[name] = ts.open(spec, open=True, read=True).result().read().result()
    check(found, arrays)


def test_zarr_python(opened):
    path, arrays = opened
    group = zarr.open_group(str(path), mode="r")
    # Listing the group works too, with a warning about each of Orbax's files.
    check({name: np.asarray(group[name]) for name in arrays}, arrays)


@pytest.mark.parametrize("kind", family(["pytree", "standard"], short=["standard"]))
def test_orbax(opened, kind):
    path, arrays = opened
    kinds = {"pytree": ocp.PyTreeCheckpointer, "standard": ocp.StandardCheckpointer}
    with kinds[kind]() as checkpointer:
        restored = checkpointer.restore(path.resolve())
    assert set(restored) == {"params", "mu", "count", "sign"}
    check(dict(as_tree(restored)), arrays)


def test_orbax_with_a_target(opened):
    path, arrays = opened
    with ocp.StandardCheckpointer() as checkpointer:
        plain = checkpointer.restore(path.resolve())
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        target = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), plain
        )
        restored = checkpointer.restore(path.resolve(), target)
    assert isinstance(restored["params"]["scale"], jax.Array)
    check(dict(as_tree(restored)), arrays)


@pytest.mark.long
def test_orbax_alone_in_every_way(committed, tmp_path):
    """A program with Orbax and four JAX devices, without jaxinf."""
    directory, arrays = committed
    save_checkpoint(directory)
    save_checkpoint(directory, "best")  # no step's number: managers do not list it
    np.savez(tmp_path / "arrays.npz", **arrays)
    checkpoints = directory.path / "checkpoints"
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    with pinned_step(directory) as step:
        pinned = step.path
        places = [directory.path / "current", pinned]
        places += [checkpoints / "best", checkpoints / "3"]
        done = subprocess.run(
            [
                sys.executable,
                PROGRAM,
                tmp_path / "arrays.npz",
                checkpoints,
                "3",
                *places,
            ],
            capture_output=True,
            text=True,
            env={**os.environ, **flags, "JAX_PLATFORMS": "cpu"},
        )
    assert done.stdout == "restored\n", done.stderr
