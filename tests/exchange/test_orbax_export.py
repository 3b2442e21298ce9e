"""Stock Orbax restores exports to the bit, and memory stays within its budget."""

import json

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore

from jaxinf.errors import StoreCorruptError, StoreIOError, StoreSpaceError
from jaxinf.exchange import destination, export_orbax, export_safetensors
from jaxinf.store import CommitRecord, Manifest


def as_arrays(tree, prefix=()):
    """Arrays of a restored tree, by the name of their directory in a store."""
    if not isinstance(tree, dict):
        return {".".join(prefix): np.asarray(tree)}
    found = {}
    for key, value in tree.items():
        found |= as_arrays(value, (*prefix, key))
    return found


@pytest.fixture(params=[0, 3], ids=["no CSD root", "3 CSD roots"])
def exported(request, make_step, place):
    """A step, its arrays, and its export."""
    step, arrays = make_step(num_csds=request.param)
    export_orbax(step, place / "export", memory_bytes=1 << 20)
    return step, arrays, place / "export"


@pytest.mark.parametrize("kind", ["pytree", "standard"])
def test_stock_orbax_restores_it(exported, check_bits, kind):
    _, arrays, path = exported
    kinds = {"pytree": ocp.PyTreeCheckpointer, "standard": ocp.StandardCheckpointer}
    with kinds[kind]() as checkpointer:
        restored = checkpointer.restore(path)
        metadata = checkpointer.metadata(path).item_metadata
    check_bits(as_arrays(restored), arrays)
    shapes = {name: value.shape for name, value in as_arrays_of_metadata(metadata)}
    assert shapes == {name: value.shape for name, value in arrays.items()}


def as_arrays_of_metadata(metadata):
    flat = jax.tree_util.tree_leaves_with_path(dict(metadata.tree))
    return [(".".join(key.key for key in path), leaf) for path, leaf in flat]


def test_onto_a_device(exported, check_bits):
    _, arrays, path = exported
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with ocp.StandardCheckpointer() as checkpointer:
        tree = checkpointer.restore(path)
        target = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
        )
        restored = checkpointer.restore(path, target)
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(restored))
    check_bits(as_arrays(restored), arrays)


def test_as_an_item_of_a_checkpoint_manager(make_step, place, check_bits):
    step, arrays = make_step()
    export_orbax(step, place / "run" / "7" / "default")
    with ocp.CheckpointManager(place / "run") as manager:
        assert manager.all_steps() == [7]
        restored = manager.restore(7, args=ocp.args.StandardRestore())
    check_bits(as_arrays(restored), arrays)


def test_it_is_compressed_zarr_in_ocdbt(exported):
    _, _, path = exported
    kvstore = {"driver": "ocdbt", "base": f"file://{path}/"}
    store = tensorstore.KvStore.open(kvstore).result()
    array = json.loads(store["params.h0.attn.kernel/zarr.json"])
    assert [codec["name"] for codec in array["codecs"]] == ["bytes", "zstd"]


def test_manifest_and_commit_travel_along(exported):
    step, _, path = exported
    assert Manifest.read(path / "jaxinf.json") == step.manifest
    commit = CommitRecord.read(path / "commit.json")
    assert commit.to_json() == step.commit.to_json()


def test_progress(make_step, place):
    step, arrays = make_step()
    calls = []
    export_orbax(step, place / "export", progress=lambda *call: calls.append(call))
    total_bytes = sum(a.nbytes for a in arrays.values())
    assert calls[-1] == (total_bytes, total_bytes)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


def test_a_destination_that_exists_is_refused(make_step, place):
    step, _ = make_step()
    (place / "export").mkdir()
    with pytest.raises(FileExistsError, match=r"export: expected a name that is free"):
        export_orbax(step, place / "export")


def test_no_space(make_step, place, monkeypatch):
    step, _ = make_step()
    monkeypatch.setattr(destination, "_SLACK_BYTES", 1 << 60)
    with pytest.raises(StoreSpaceError, match=r"takes up to .* free some"):
        export_orbax(step, place / "export")
    assert not list(place.glob("*export*"))


def test_a_damaged_step_leaves_nothing(make_step, place):
    step, _ = make_step()
    (step.path / "mu.h0.attn.bias" / "c" / "0").resolve().write_bytes(b"short")
    with pytest.raises(StoreIOError, match=r"mu.h0.attn.bias/c/0: truncated"):
        export_orbax(step, place / "export")
    assert not list(place.glob("*export*"))


@pytest.mark.parametrize("export", [export_orbax, export_safetensors])
def test_a_flipped_bit_is_not_exported(make_step, place, export):
    step, _ = make_step()
    file = (step.path / "params.sharded.rows" / "c" / "1" / "0").resolve()
    content = bytearray(file.read_bytes())
    content[1000] ^= 1
    file.write_bytes(content)
    with pytest.raises(
        StoreCorruptError,
        match=r"sharded/rows, params, chunk \d+ of \d+, on CSD 0: .* CRC",
    ):
        export(step, place / "export")
    assert not list(place.glob("*export*"))


def test_too_little_memory(make_step, place):
    step, _ = make_step()
    with pytest.raises(ValueError, match=r"memory_bytes=1000: .* at least"):
        export_orbax(step, place / "export", memory_bytes=1000)
