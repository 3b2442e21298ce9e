"""Converts a store, and is killed at a call of it: `engine/test_killed_making.py`.

python killed_conversion.py FUNCTION NUM_CALLS STORE NEW CSD …

It is killed when the function is called once more than NUM_CALLS times.
"""

import os
import signal
import sys
from pathlib import Path

from jaxinf.engine import convert_store
from jaxinf.store import creation, owners


def main(name, num_calls, source, new, *csds):
    owner = {
        "publish": creation.StoreDirectory,
        "mkdir": Path,
        "_claim": owners,
    }.get(name, creation)
    real, calls = getattr(owner, name), 0

    def killed(*arguments, **options):
        nonlocal calls
        calls += 1
        if calls > int(num_calls):
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **options)

    setattr(owner, name, killed)
    convert_store(Path(source), Path(new), "bf16", csds=[*map(Path, csds)])


if __name__ == "__main__":
    main(*sys.argv[1:])
