"""The JSON documents of a slot for readers of zarr v3 and for Orbax.

Invariant: they describe raw chunk files: with the codec ``bytes``, little endian, a
chunk file is the array's memory.
"""

from collections.abc import Sequence
from typing import Any

from jaxinf.compat import ORBAX_DICT_KEY, ORBAX_HANDLER
from jaxinf.store.contents import dtype_of
from jaxinf.store.names import encode_key

COMMIT_SUCCESS_TEXT = "Checkpoint commit was successful.\n"

ORBAX_ITEM = "default"
"""The name of a checkpoint's only tree for Orbax's CheckpointManager."""

ORBAX_STATE = "state"
"""The name of that tree for Orbax's newer Checkpointer."""


def group_metadata() -> dict[str, Any]:
    """Returns ``zarr.json`` of a slot."""
    return {"zarr_format": 3, "node_type": "group", "attributes": {}}


def array_metadata(
    shape: Sequence[int], chunk_shape: Sequence[int], dtype: str
) -> dict[str, Any]:
    """Returns ``zarr.json`` of one array.

    Args:
      chunk_shape: the chunk shape; every entry is at least 1.
      dtype: NumPy's name of the dtype; zarr has the same name for all stored dtypes.
    """
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(shape),
        "data_type": dtype,
        "chunk_grid": {
            "name": "regular",
            "configuration": {"chunk_shape": list(chunk_shape)},
        },
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": dtype_of(dtype).type(0).item(),
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        "attributes": {},
    }


def orbax_tree_metadata(keys: Sequence[tuple[str, ...]]) -> dict[str, Any]:
    """Returns ``_METADATA``: the pytree that Orbax restores, as nested dicts.

    Args:
      keys: for each array its state name followed by the leaf's path.
    """
    tree: dict[str, Any] = {}
    for raw in keys:
        path = tuple(encode_key(key) for key in raw)
        tree[str(path)] = {
            "key_metadata": [{"key": key, "key_type": ORBAX_DICT_KEY} for key in path],
            "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False},
        }
    return {
        "tree_metadata": tree,
        "use_ocdbt": False,
        "use_zarr3": True,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }


def orbax_checkpoint_metadata(
    timestamp_ns: int, *, is_item: bool = False
) -> dict[str, Any]:
    """Returns ``_CHECKPOINT_METADATA``, which marks a directory as a checkpoint.

    Args:
      is_item: whether the tree is the item `ORBAX_ITEM` of a checkpoint, as
        CheckpointManager expects, rather than the checkpoint itself.
    """
    return {
        "item_handlers": {ORBAX_ITEM: ORBAX_HANDLER} if is_item else ORBAX_HANDLER,
        "metrics": {},
        "performance_metrics": {},
        "init_timestamp_nsecs": timestamp_ns,
        "commit_timestamp_nsecs": timestamp_ns,
        "custom_metadata": {},
    }
