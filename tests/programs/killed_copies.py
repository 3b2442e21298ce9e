"""Copies a store in place for other numbers of processes, killed.

As a program it kills a copy so many times, at random calls of the operating system,
looks at what is left, completes it, and goes on with the next number.
"""

import os
import random
import signal
import sys
import traceback
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import raw_stores
from copies import copied
from raw_stores import decoded

from jaxinf.store import (
    StateRecord,
    StepReader,
    StoreDirectory,
    find_members,
    read_step,
    save_checkpoint,
    store_source,
    verify_step,
)

MU = StateRecord("mu", "bfloat16", "bf16")
LEAVES = {
    ("rows",): ((12, 4096), (4, 1)),
    ("columns",): ((3, 16384), (1, 4)),
    ("replicated",): ((9, 4096), (1, 1)),
    ("bias",): ((129,), (1,)),
    ("scale",): ((), ()),
    ("empty",): ((0, 7), (1, 1)),
    # Other numbers of shards cut the chunks of these.
    ("cut",): ((60, 64), (4, 1)),
    ("across",): ((5, 1536), (1, 4)),
}


def make(place, num_csds=0, mu=MU):
    roots = [f"{root}/0" for root in raw_stores.make_roots(place, "x", num_csds)]
    for number, root in enumerate(roots):
        roots[number] = root = str(place / f"csd{number}/0")
        for process in range(4):
            Path(root).with_name(str(process)).mkdir(parents=True)
    states = (StateRecord("params", "float32"), mu)
    directory = raw_stores.make_store(place / "run", states, LEAVES, roots)
    draw = partial(raw_stores.any_bits, np.random.default_rng(0))
    for step, slot in enumerate(("a", "b")):
        raw_stores.commit(directory, slot, draw, step=step, payload={"seed": 3})
        if step == 0:
            save_checkpoint(directory, "kept")
    return directory.path


CALLS = ("rename", "replace", "link", "symlink", "mkdir", "unlink", "rmdir", "fsync")
CALLS += ("pwrite", "ftruncate")


def contents(path, checkpoint=None):
    if find_members(path):
        with store_source(path, checkpoint) as source:
            return _arrays(source.step)
    directory = StoreDirectory.open(path)
    place = path / ("current" if checkpoint is None else f"checkpoints/{checkpoint}")
    return _arrays(read_step(directory, place))


def _arrays(step):
    with StepReader(step) as reader:
        return {
            leaf.array_name(state.name): decoded(reader, leaf, state).tobytes()
            for leaf in step.manifest.leaves
            for state in leaf.states
            if not state.is_companion
        }


def damages(path):
    found = []
    for part in find_members(path) or [path]:
        directory = StoreDirectory.open(part)
        for place in (part / "current", *part.glob("checkpoints/[!.]*")):
            found += verify_step(directory, place)
    return found


def grids_of(path):
    [first, *_] = find_members(path) or [path]
    return [leaf.chunk_shape for leaf in StoreDirectory.open(first).manifest.leaves]


def leftovers(path):
    return [file for file in path.parent.iterdir() if file.name.endswith(".copying")]


def count_calls(action, last=None):
    """Counts the calls of an action in a process of its own, or kills it at one.

    Args:
      action: what is done.
      last: number of the call at which it is killed.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        made = [0]

        def counted(original):
            def call(*arguments, **options):
                made[0] += 1
                if made[0] == last:
                    os.kill(os.getpid(), signal.SIGKILL)
                return original(*arguments, **options)

            return call

        for name in CALLS:
            setattr(os, name, counted(getattr(os, name)))
        status = 1
        try:
            action()
            os.write(writing, str(made[0]).encode())
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(writing)
    status = os.waitpid(child, 0)[1]
    with os.fdopen(reading) as told:
        return status, told.read()


def num_processes(path):
    return len(find_members(path)) or 1


def main(path, num_kills):
    rng, seen, num_regridded = random.Random(1), Counter(), 0
    expected = {None: contents(path), "kept": contents(path, "kept")}
    numbers = [4, 2, 3, 1]
    for number in range(num_kills):
        count, before = numbers[number % 4], num_processes(path)
        grids = grids_of(path)
        roots = [str(root) for root in sorted(path.parent.glob("csd*"))]
        roots = [f"{root}/{{process}}" for root in roots]
        last = rng.randrange(1, 3000)
        action = partial(copied, path, processes=count, roots=roots)
        status, _ = count_calls(action, last)
        assert status in (0, signal.SIGKILL), status
        outcome = "old" if num_processes(path) == before else "new"
        for name, arrays in expected.items():
            assert contents(path, name) == arrays, (number, outcome)
        seen[outcome] += status == signal.SIGKILL
        assert count_calls(action)[0] == 0
        num_regridded += grids_of(path) != grids
        assert num_processes(path) == count
        assert not leftovers(path)
        for name, arrays in expected.items():
            assert contents(path, name) == arrays, number
        assert not damages(path), number
        for root in path.parent.glob("csd*/*"):
            assert len(list(root.iterdir())) <= (int(root.name) < count), root
    assert num_regridded > num_kills // 4
    print(f"{sum(seen.values())} kills: {dict(seen)}; {num_regridded} new grids after")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
