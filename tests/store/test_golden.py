"""The format's bytes: a store written long ago must open, and be written the same now.

Below ``tests/golden`` are stores of two CSD-less slots at step 3 with a checkpoint at
step 2, made by this file run as a program: ``store`` with float32 masters, ``split``
with the master of its bfloat16 leaf in two halves.
"""

import json
import os
import shutil
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxinf
from jaxinf.store import StoreDirectory, Verifier

GOLDEN = Path(__file__).parents[1] / "golden"
MASTERS = {"store": "stored", "split": "auto"}
REMEDY = (
    "if the format was meant to change, raise FORMAT_VERSION, say what changed in "
    "docs/format.md, teach jaxinf.store.migrate the old one, and write the golden "
    f"store anew: python tests/store/{Path(__file__).name}"
)
VOLATILE = {"store_id", "created_by", "committed_at"}


def make(path, master):
    """The same store every time, but for its id, versions and dates."""
    params = {
        "a": jnp.arange(6, dtype=jnp.float32).reshape(2, 3),
        "b": {"half": jnp.arange(5, dtype=jnp.bfloat16)},
        "scalar": jnp.float32(2),
    }
    with jaxinf.open_store(path, master=master) as store:
        tx = jaxinf.smart_update(optax.sgd(0.5, momentum=0.5), store)
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
    """Each file's bytes, or where its symlink points; what varies is blanked."""
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
                found[key] = document
            else:
                data = path.read_bytes()
                found[key] = data.rstrip(b"\0"), len(data)
    return found


@pytest.mark.parametrize("name", MASTERS)
def test_the_same_bytes_are_written(tmp_path, name):
    make(tmp_path / "store", MASTERS[name])
    written, golden = files_of(tmp_path / "store"), files_of(GOLDEN / name)
    assert sorted(written) == sorted(golden), REMEDY
    for file, content in golden.items():
        assert written[file] == content, f"{file}: {REMEDY}"


@pytest.fixture(params=MASTERS)
def held(request, tmp_path):
    """A copy of a golden store to write to."""
    return shutil.copytree(GOLDEN / request.param, tmp_path / "held", symlinks=True)


def test_the_golden_store_opens_and_goes_on(held):
    directory = StoreDirectory.open(held)
    verifier = Verifier(directory)
    assert verifier.verify(held / "current") == []
    assert verifier.verify(held / "checkpoints" / "2") == []
    with jaxinf.open_store(held) as store:
        assert store.step == 3
        assert store.payload == {"at": 3}
        assert [c.name for c in store.checkpoints()] == ["2"]
        # Momentum 1, 1.5, 1.75 times the learning rate of 0.5.
        master = store.tensorstore("params", "scalar").read().result()
        np.testing.assert_array_equal(master, 2 - 0.5 * (1 + 1.5 + 1.75))
        half = store.read("params", "b/half")
        np.testing.assert_array_equal(half, np.arange(5) - 0.5 * (1 + 1.5 + 1.75))
    with jaxinf.open_store(held, restore="2") as store:
        assert store.step == 2
        trace = store.tensorstore("trace", "b/half").read().result()
        np.testing.assert_array_equal(trace, 1.5)


if __name__ == "__main__":
    for name, master in MASTERS.items():
        shutil.rmtree(GOLDEN / name, ignore_errors=True)
        make(GOLDEN / name, master)
        for lock in (GOLDEN / name).glob("*lock"):  # they name a process
            lock.unlink()
        print(f"written: {GOLDEN / name}", file=sys.stderr)
