"""Arrays of a step as tensorstore shows them, without jaxinf's readers."""

import tensorstore

from jaxinf.store import StoreDirectory, find_leaf


def read_array(step, leaf, state):
    """Returns an array of a step's directory, in the form that is stored."""
    path = f"{step / leaf.array_name(state)}/"
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": path}}
    return tensorstore.open(spec, open=True, read=True).result().read().result()


def stored(store, state, leaf):
    """Returns an array of an open store's last step."""
    store.wait()
    record = find_leaf(StoreDirectory.open(store.path).manifest, state, leaf)
    return read_array(store.path / "current", record, state)
