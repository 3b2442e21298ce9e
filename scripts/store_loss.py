"""Computes the loss of a model in a store, without a gradient, in little memory.

    python scripts/store_loss.py --store DIR --preset llama2-7b --memory 5GiB

The store is one of `python -m jaxinf.train --model llama` on bytes of text; the text
here is the beginning of this script.
"""

import argparse
import math
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jaxinf_models import MODELS, abstract_params, task_loss

import jaxinf
from jaxinf.terminal import parse_bytes


def main() -> None:
    """Prints the loss and the time of the second call, which compiles nothing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    presets = MODELS["llama"].presets
    parser.add_argument("--store", type=Path, required=True, metavar="DIR")
    parser.add_argument("--preset", choices=[*presets], default="llama2-7b")
    parser.add_argument("--memory", type=parse_bytes, required=True)
    parser.add_argument("--seq-len", type=int, default=128)
    arguments = parser.parse_args()
    graphdef, _ = abstract_params(presets[arguments.preset])

    def loss(params: Any, batch: Any) -> jax.Array:
        return task_loss(nnx.merge(graphdef, params), "causal-lm", batch)

    text = np.frombuffer(Path(__file__).read_bytes(), np.uint8).astype(np.int32)
    row = text[: arguments.seq_len + 1][None]
    batch = {"tokens": row[:, :-1], "targets": row[:, 1:]}
    with jaxinf.stream_function(
        loss, arguments.store, memory_bytes=arguments.memory
    ) as compute:
        first = float(compute(batch))
        began_s = time.perf_counter()
        found = float(compute(batch))
        seconds = time.perf_counter() - began_s
    if found != first or not math.isfinite(found):
        raise SystemExit(f"expected one finite loss twice, found {first} and {found}")
    print(f"loss    {found:.4f} of {arguments.seq_len} tokens in {seconds:.0f} s")


if __name__ == "__main__":
    main()
