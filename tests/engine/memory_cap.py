"""A program: steps of a store larger than the memory left to the process.

RLIMIT_DATA allows the caller's arrays, the budget and 32 MiB. Prints its progress.
"""

import resource
import sys
import threading
from pathlib import Path

from update_rig import UpdateRig

BUDGET_BYTES = 16 << 20
SLACK_BYTES = 32 << 20


def run(place, num_params):
    # The limit counts a thread's stack as what it may grow to, 8 MiB by default.
    threading.stack_size(1 << 20)
    warm = UpdateRig(place / "warm", 100_000, num_leaves=1, memory_bytes=BUDGET_BYTES)
    warm.step()
    warm.close()
    caller_bytes = 3 * 4 * num_params  # gradient, params, new params
    # Private writable memory of this process, as RLIMIT_DATA counts it.
    status = Path("/proc/self/status").read_text()
    own_bytes = int(status.partition("VmData:")[2].split()[0]) << 10
    limit = own_bytes + caller_bytes + BUDGET_BYTES + SLACK_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    rig = UpdateRig(
        place / "store", num_params, num_leaves=1, memory_bytes=BUDGET_BYTES
    )
    for _ in range(3):
        rig.step()
    rig.store.wait()
    print(rig.store.step)
    rig.close()


if __name__ == "__main__":
    run(Path(sys.argv[1]), int(sys.argv[2]))
