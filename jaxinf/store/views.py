"""Committed state as tensorstore arrays.

Invariant: read-only; nothing here writes to a store.
"""

from pathlib import Path
from typing import Any

import tensorstore

from jaxinf.store.manifest import LeafRecord, Manifest
from jaxinf.store.names import MASTER_PARAMS


def find_leaf(manifest: Manifest, state: str, leaf: str) -> LeafRecord:
    """Returns the record of a leaf by its name as `jaxinf inspect` prints it.

    Raises:
      ValueError: there is no such leaf or state; lists the existing ones.
    """
    for record in manifest.leaves:
        if record.name == leaf.strip("/"):
            states = [s.name for s in record.states]
            if state not in states:
                raise ValueError(
                    f"leaf {leaf}: it has the states {', '.join(states)}, asked for "
                    f"was {state!r}"
                )
            return record
    names = [record.name for record in manifest.leaves]
    listed = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
    raise ValueError(f"no leaf {leaf!r} in the store; there are {listed}")


def open_array(slot_path: Path, record: LeafRecord, state: str) -> Any:
    """Opens a leaf's state in a slot or a snapshot.

    Args:
      slot_path: a slot, `current`, or a snapshot.
      record: the leaf's record.
      state: ``"params"`` for the master params, or an optax field's name.

    Returns:
      A read-only ``tensorstore.TensorStore`` of the leaf's natural shape.
    """
    spec = {
        "driver": "zarr3",
        "kvstore": {
            "driver": "file",
            "path": str(slot_path / record.array_name(state or MASTER_PARAMS)) + "/",
        },
    }
    return tensorstore.open(spec, open=True, read=True).result()
