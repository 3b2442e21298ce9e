"""Restores directories with stock Orbax alone, in every way; run as a program.

    XLA_FLAGS=--xla_force_host_platform_device_count=4 \
        python stock_orbax_program.py ARRAYS.npz CHECKPOINTS STEP DIRECTORY…

Each DIRECTORY is a checkpoint, and step STEP of a CheckpointManager on CHECKPOINTS is
another. ARRAYS.npz has the expected arrays of all, by names joined with ".".
"""

import sys
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp

MESH = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))


def sharding_of(shape):
    """Divides the first suitable dimension by four; otherwise replicates."""
    dim = next((d for d, n in enumerate(shape) if n and n % 4 == 0), None)
    spec = () if dim is None else (None,) * dim + ("x",)
    return jax.sharding.NamedSharding(MESH, jax.sharding.PartitionSpec(*spec))


def target(metadata):
    return jax.tree.map(
        lambda m: jax.ShapeDtypeStruct(m.shape, m.dtype, sharding=sharding_of(m.shape)),
        metadata,
    )


def check(tree, arrays, sharding=None):
    flat = jax.tree_util.tree_leaves_with_path(tree)
    found = {".".join(key.key for key in path): leaf for path, leaf in flat}
    assert sorted(found) == sorted(arrays), sorted(found)
    for name, value in found.items():
        assert value.dtype == arrays[name].dtype, name
        np.testing.assert_array_equal(np.asarray(value), arrays[name], name)
        if sharding is not None:
            assert value.sharding == sharding(value.shape), (name, value.sharding)


def check_directory(path, arrays):
    for kind in (ocp.StandardCheckpointer, ocp.PyTreeCheckpointer):
        with kind() as checkpointer:
            metadata = dict(checkpointer.metadata(path).item_metadata.tree)
            check(checkpointer.restore(path), arrays)
    wanted = target(metadata)
    with ocp.StandardCheckpointer() as checkpointer:
        check(checkpointer.restore(path, wanted), arrays, sharding_of)


def check_manager(root, step, arrays):
    standard = ocp.args.StandardRestore
    with ocp.CheckpointManager(root) as manager:
        assert manager.all_steps() == [step], manager.all_steps()
        check(manager.restore(step, args=standard()), arrays)
    handler = ocp.StandardCheckpointHandler()
    with ocp.CheckpointManager(root, item_handlers=handler) as manager:
        wanted = target(dict(manager.item_metadata(step).tree))
        check(manager.restore(step, args=standard(wanted)), arrays, sharding_of)


def main():
    names, checkpoints, step, *directories = sys.argv[1:]
    arrays = dict(np.load(names))
    for directory in directories:
        check_directory(Path(directory).resolve(), arrays)
    check_manager(Path(checkpoints).resolve(), int(step), arrays)
    assert not [name for name in sys.modules if name.split(".")[0] == "jaxinf"]
    print("restored")


if __name__ == "__main__":
    main()
