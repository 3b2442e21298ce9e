"""Golden stores, whose bytes are kept; run as a program, this file makes them.

The stores below ``tests/golden`` have no CSDs, are at step 3, and have a checkpoint of
step 2: ``store`` with float32 masters, ``split`` with the split master of its bfloat16
leaf, ``scalars`` with much scalar state.
"""

import json
import os
import shutil
import sys
from pathlib import Path
from unittest import mock

import jax.numpy as jnp
import optax

import jaxinf
from jaxinf.csd import CsdSpec
from jaxinf.store.manifest import FORMAT_VERSION

GOLDEN = Path(__file__).parents[1] / "golden"
IS_SPLIT = {"store": False, "split": True, "scalars": False}
REMEDY = (
    "if the format was meant to change, raise FORMAT_VERSION, say what changed in "
    "docs/format.md, go on reading the versions of earlier releases, and write the "
    f"golden store anew: python tests/support/{Path(__file__).name}"
)
VOLATILE = {"store_id", "created_by", "committed_at", "crc32c"}


def optimizer(name):
    if name != "scalars":
        return optax.sgd(0.5, momentum=0.5)
    adam = optax.inject_hyperparams(optax.adam)(learning_rate=0.5, b1=0.5)
    return optax.chain(adam, optax.scale_by_schedule(lambda count: 1.0))


def golden(name):
    return GOLDEN / f"v{FORMAT_VERSION}_{name}"


def make(path, name):
    """Makes the same store every time, except for its id, versions and dates."""
    params = {
        "a": jnp.arange(6, dtype=jnp.float32).reshape(2, 3),
        "b": {"half": jnp.arange(5, dtype=jnp.bfloat16)},
        "scalar": jnp.float32(2),
    }
    with (
        mock.patch.object(CsdSpec, "codes_params", IS_SPLIT[name]),
        jaxinf.open_store(path) as store,
    ):
        tx = jaxinf.smart_update(optimizer(name), store, updates="float32")
        state = tx.init(params)
        for number in range(3):
            store.annotate(number + 1, {"at": number + 1})
            grads = {
                "a": jnp.ones((2, 3)),
                "b": {"half": jnp.ones(5, jnp.bfloat16)},
                "scalar": jnp.float32(1),
            }
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
            if number == 1:
                store.checkpoint(state=state)


def files_of(root):
    """Returns each file's bytes or symlink's target; varying parts are blanked."""
    found = {}
    for folder, folders, files in os.walk(root):
        for name in [*files, *(d for d in folders if os.path.islink(f"{folder}/{d}"))]:
            path = Path(folder) / name
            key = str(path.relative_to(root))
            if path.is_symlink():
                found[key] = os.readlink(path)
            elif name.endswith("lock"):
                continue
            elif name in ("_CHECKPOINT_METADATA", "jaxinf.json", "commit.json"):
                document = json.loads(path.read_text())
                for field in (*VOLATILE, "init_timestamp_nsecs"):
                    document.pop(field, None)
                document.pop("commit_timestamp_nsecs", None)
                document.pop("documents", None)  # of stores written before
                found[key] = document
            else:
                data = path.read_bytes()
                found[key] = data.rstrip(b"\0"), len(data)
    return found


def same_files(path, expected):
    written, held = files_of(path), files_of(expected)
    assert sorted(written) == sorted(held), REMEDY
    for file, content in held.items():
        assert written[file] == content, f"{file}: {REMEDY}"


if __name__ == "__main__":
    for name in IS_SPLIT:
        shutil.rmtree(golden(name), ignore_errors=True)
        make(golden(name), name)
        for lock in golden(name).glob("*lock"):  # they name a process
            lock.unlink()
        print(f"written: {golden(name)}", file=sys.stderr)
