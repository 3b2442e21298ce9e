"""A program that trains a store and breaks its own system calls; see `shim.c`.

Reads a case from each line, as JSON: the store's path and options, the call that fails,
or the clock's error. Answers with the error of a step, and the committed step.
"""

import ctypes
import json
import sys
from pathlib import Path

from store_driver import Driver

SHIM = ctypes.CDLL(None)
NUM_STEPS = 3


def run(case):
    """Makes steps, then the failing one; returns its error and the store's step."""
    options = {"memory_bytes": 1 << 20} | case.get("options", {})
    driver = Driver(Path(case["path"]), csds=case["csds"], **options)
    driver.init().steps(NUM_STEPS)
    driver.store.wait()
    answer = {"before": driver.opened.commit.committed_at}
    SHIM.clock_shift(ctypes.c_long(case.get("clock_s", 0)))
    if "call" in case:
        call, path = case["call"].encode(), case["on"].encode()
        SHIM.fault_set(call, path, case["errno"], case.get("after", 0))
    try:
        for _ in range(case.get("steps", 1)):
            driver.step()
            if not driver.opened.options.rewrites_steps:
                driver.store.wait()
        driver.store.wait()
        answer["after"] = driver.opened.commit.committed_at
    except Exception as error:
        answer |= {"type": type(error).__name__, "text": str(error)}
        answer["notes"] = getattr(error, "__notes__", [])
    answer["step"] = driver.opened.commit.step
    answer["hits"] = SHIM.fault_count()
    SHIM.fault_set(b"", b"", 0, 0)
    driver.engine.close()
    SHIM.clock_shift(ctypes.c_long(0))
    return answer


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)
