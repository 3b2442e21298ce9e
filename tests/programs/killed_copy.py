"""Copies a store, and is killed at a call of it: `store/test_copies.py`.

python killed_copy.py FUNCTION NUM_CALLS OLD NEW CSD …

It is killed when the function is called once more than NUM_CALLS times.
"""

import os
import signal
import sys
from pathlib import Path

from jaxinf.store import StoreDirectory, copy_chunks, copying, creation


def main(name, num_calls, source, new, *csds):
    sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
    from copies import copied

    owner = {
        "flip": StoreDirectory,
        "mkdir": Path,
        "_recode": copy_chunks,
        "make_csds": creation,
        "create_documents": creation,
    }.get(name, copying)
    real, calls = getattr(owner, name), 0

    def killed(*arguments, **options):
        nonlocal calls
        calls += 1
        if calls > int(num_calls):
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **options)

    setattr(owner, name, killed)
    copied(Path(source), Path(new), state="bf16", roots=csds)


if __name__ == "__main__":
    main(*sys.argv[1:])
