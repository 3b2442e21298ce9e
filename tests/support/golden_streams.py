"""A golden store of a streamed program; run as a program, this file makes it.

``tests/golden/streamed.tar.gz`` holds a store after two steps, and ``record.json``: the
losses of all four steps, the params after them, and who wrote it. Every number of the
program is a short binary fraction, so no sum is rounded, and the bits are the same on
every CPU, whatever the cuts. The store's plan has more cuts than would be chosen. It is
in a file of its own, as stores of before kept it.
"""

import json
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from raw_stores import edit

import jaxinf
from jaxinf.store import seal

GOLDEN = Path(__file__).parents[1] / "golden" / "streamed.tar.gz"
TX = optax.lion(1 / 16, b1=0.5, b2=0.5, weight_decay=0.0)
CUTS = [0, 4, 8, 12]


def grid(seed, *shape, step, most):
    draw = np.random.default_rng(seed).integers
    return (step * draw(-most, most + 1, shape)).astype(np.float32)


PARAMS = {
    "layers": [grid(seed, 8, 8, step=1 / 4, most=2) for seed in range(2)],
    "out": grid(9, 8, 8, step=1 / 4, most=2),
}
BATCH = {"x": grid(100, 4, 8, step=1, most=1), "y": grid(101, 4, 8, step=1, most=4)}


def loss(params, batch):
    x = batch["x"]
    for w in params["layers"]:
        x = jax.nn.relu(x @ w)
    return jnp.mean(jnp.abs(x @ params["out"] - batch["y"]))


def opened(path, **options):
    store = jaxinf.open_store(path, memory_bytes=4 << 20)
    step = jaxinf.stream(loss, TX, store, memory_bytes=16 << 20, **options)
    step.load(PARAMS)
    return step


def run(step, num_steps):
    return [float(step(BATCH)[0]).hex() for _ in range(num_steps)]


def unpacked(place):
    with tarfile.open(GOLDEN) as archive:
        archive.extractall(place, filter="data")
    return place / "store", json.loads((place / "record.json").read_text())


def streams(path):
    return json.loads((path / "current/commit.json").read_text()).get("streams", {})


def make(place):
    path = place / "store"
    step = opened(path)
    run(step, 1)
    step.close()
    ((name, plan),) = streams(path).items()
    shutil.rmtree(path)
    opened(path).close()
    (path / "stream").mkdir()
    (path / f"stream/{name}.json").write_bytes(seal(plan | {"cuts": CUTS}))
    step = opened(path)
    losses = run(step, 2)
    step.close()
    for record in path.glob("slots/*/commit.json"):
        edit(record, streams={})
    for lock in path.glob("*lock"):  # they name a process
        lock.unlink()
    with tarfile.open(GOLDEN, "w:gz") as archive:
        archive.add(path, "store")
        step = opened(path)
        record = {
            "jaxinf": jaxinf.__version__,
            "jax": jax.__version__,
            "losses": losses + run(step, 2),
            "params": jax.tree.map(
                lambda leaf: np.asarray(leaf).tolist(), step.store.params(like=PARAMS)
            ),
        }
        step.close()
        (place / "record.json").write_text(json.dumps(record))
        archive.add(place / "record.json", "record.json")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder))
    print(f"written: {GOLDEN}, {GOLDEN.stat().st_size} bytes", file=sys.stderr)
