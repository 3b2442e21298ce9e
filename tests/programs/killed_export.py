"""Exports a store to a URL, killed at random bytes again and again, then to its end.

Every attempt is a process of its own, forked before tensorstore has threads.
"""

import os
import random
import signal
import sys
from pathlib import Path

import pytest
from copies import copied

from jaxinf.errors import ExchangeError
from jaxinf.exchange import ExportOptions, export_url
from jaxinf.store import StoreDirectory, read_step


def in_child(action):
    child = os.fork()
    if child == 0:
        status = 1
        try:
            action()
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1]


def export(store, url, after=None):
    def stop(done, total):
        if after is not None and done >= after * total:
            os.kill(os.getpid(), signal.SIGKILL)

    step = read_step(StoreDirectory.open(store), store / "current")
    export_url(step, url, options=ExportOptions(1 << 20, progress=stop))


def refuse(url, place):
    """Imports a part, which must be refused by the name of the manifest."""
    with pytest.raises(ExchangeError, match=r"export\.json"):
        copied(url, place)


def tear(folder, rng):
    """Leaves one object as a place does that is not atomic."""
    left = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    torn = rng.choice(left)
    os.truncate(torn, rng.randrange(torn.stat().st_size + 1))


def main(store, url, num_kills):
    rng = random.Random(0)
    folder = Path(url.removeprefix("file://")) if url.startswith("file:") else None
    for _ in range(num_kills):
        after = rng.random()
        assert in_child(lambda after=after: export(store, url, after)) == signal.SIGKILL
        if folder is not None and rng.random() < 0.5:
            tear(folder, rng)
        assert in_child(lambda: refuse(url, store.with_name("never"))) == 0
    assert in_child(lambda: export(store, url)) == 0


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
