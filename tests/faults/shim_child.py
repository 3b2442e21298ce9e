"""A program that trains and breaks its own system calls; see `shim.c`.

A case is a store's path and options, or a folder for the values of a step in memory,
and the call that fails. The answer has the error of a step, and the committed step, or
the losses.
"""

import ctypes
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
from cases import serve
from store_driver import Driver

import jaxinf

SHIM = ctypes.CDLL(None)
NUM_STEPS = 3


def stored(case):
    options = {"memory_bytes": 1 << 20} | case.get("options", {})
    driver = Driver(Path(case["path"]), num_csds=case["num_csds"], **options)
    driver.init().steps(NUM_STEPS)
    driver.store.wait()
    answer = {}
    if "call" in case:
        call, path = case["call"].encode(), case["on"].encode()
        SHIM.fault_set(call, path, case["errno"], 0)
    try:
        for _ in range(case.get("steps", 1)):
            driver.step()
            if not driver.files.options.rewrites_steps:
                driver.store.wait()
        driver.store.wait()
    except Exception as error:
        answer |= {"type": type(error).__name__, "text": str(error)}
        answer["notes"] = getattr(error, "__notes__", [])
    answer["step"] = driver.files.commit.step
    answer["hits"] = SHIM.fault_count()
    SHIM.fault_set(b"", b"", 0, 0)
    driver.engine.close()
    return answer


def loss(params, x):
    for w in params:
        x = jnp.tanh(x @ w) @ w + x
    return jnp.mean(x**2)


def streamed(case):
    rng = np.random.default_rng(0)
    step = jaxinf.stream_in_memory(
        loss,
        optax.adam(1e-2),
        memory_bytes=18 << 20,
        policy="offload",
        scratch=case["folder"],
    )
    step.load([(rng.standard_normal((32, 32)) / 6).astype(np.float32)] * 12)
    batch = rng.standard_normal((8192, 32)).astype(np.float32)
    answer = {"losses": [float(step(batch)[0]) for _ in range(4)]}
    if "call" in case:
        call = case["call"].encode()
        SHIM.fault_set(call, b"(deleted)", case["errno"], case["after"])
    try:
        answer["losses"].append(float(step(batch)[0]))
    except Exception as error:
        answer["error"] = f"{type(error).__name__}: {error}"
    answer["hits"] = SHIM.fault_count()
    SHIM.fault_set(b"", b"", 0, 0)
    answer["losses"] += [float(step(batch)[0]) for _ in range(2)]
    step.close()
    return answer


if __name__ == "__main__":
    serve(stored, streamed)
