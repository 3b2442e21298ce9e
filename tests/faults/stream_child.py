"""A program that trains in memory and breaks its own reads and writes; see `shim.c`.

Reads a case from each line, as JSON: the policy, the call that fails, and when. Answers
with the losses of steps before, in and after the failure.
"""

import ctypes
import json
import sys
import warnings

import jax.numpy as jnp
import numpy as np
import optax

import jaxinf

SHIM = ctypes.CDLL(None)
MEMORY_BYTES = 18 << 20


def loss(params, x):
    for w in params:
        x = jnp.tanh(x @ w) @ w + x
    return jnp.mean(x**2)


def run(folder, case):
    """Makes steps, one of them with a failure; returns losses and what was told."""
    rng = np.random.default_rng(0)
    step = jaxinf.stream_in_memory(
        loss,
        optax.adam(1e-2),
        memory_bytes=MEMORY_BYTES,
        policy=case["policy"],
        scratch=folder,
    )
    step.load([(rng.standard_normal((32, 32)) / 6).astype(np.float32)] * 12)
    batch = rng.standard_normal((8192, 32)).astype(np.float32)
    answer = {"losses": [float(step(batch)[0]) for _ in range(4)], "told": []}
    if "call" in case:
        call = case["call"].encode()
        SHIM.fault_set(call, b"(deleted)", case["errno"], case["after"])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            answer["losses"].append(float(step(batch)[0]))
        except Exception as error:
            answer["error"] = f"{type(error).__name__}: {error}"
    answer["told"] = [str(one.message) for one in told]
    answer["hits"] = SHIM.fault_count()
    SHIM.fault_set(b"", b"", 0, 0)
    answer["losses"] += [float(step(batch)[0]) for _ in range(2)]
    answer["written_bytes"] = step.traffic.drive_write_bytes
    step.close()
    return answer


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(run(sys.argv[1], json.loads(line))), flush=True)
