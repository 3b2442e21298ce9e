"""Times the compression of a gradient on the JAX device, and its use on the host.

Selection: the sort of ``selection="exact"`` against ``"threshold"``, for one chunk,
with the share of the largest elements that the latter finds. Scattering: a subgroup's
update with a dense gradient against a sparse one that is scattered piece by piece into
a scratch that stays in the cache. All run in turns; medians are printed. ``--clock
processor`` counts this process's processor time, on which other work on a shared
machine has the least effect.
"""

import argparse
import json
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxinf.compress import SparseGradient, top_k
from jaxinf.compress.select import select
from jaxinf.csd.sparse import run_sparse
from jaxinf.kernels import Passage, compiled
from jaxinf.program import trace_update

CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}


def median_ms(functions, repetitions, now):
    """Returns each function's median time; every repetition calls all of them."""
    times = [[] for _ in functions]
    for _ in range(repetitions + 1):
        for index, function in enumerate(functions):
            began = now()
            function()
            times[index].append(1e3 * (now() - began))
    return [statistics.median(values[1:]) for values in times]


def gradient_of(num_elements):
    """Draws numbers with heavier tails than a normal distribution's, like gradients."""
    return np.random.default_rng(0).standard_normal(num_elements, np.float32) ** 3


def selection(gradient, k, repetitions, now):
    chunk = jnp.asarray(gradient)
    jitted = jax.jit(select, static_argnums=(1, 2))
    exact, found = (
        np.asarray(jitted(chunk, k, kind)) for kind in ("exact", "threshold")
    )
    exact_ms, threshold_ms = median_ms(
        [
            lambda: jitted(chunk, k, "exact").block_until_ready(),
            lambda: jitted(chunk, k, "threshold").block_until_ready(),
        ],
        repetitions,
        now,
    )
    return {
        "exact_ms": exact_ms,
        "threshold_ms": threshold_ms,
        "found": np.isin(found, exact).mean(),
    }


def scattering(gradient, indices, repetitions, now):
    kernel = trace_update(optax.adamw(1e-3), jnp.zeros(8)).leaves[0].kernel
    run = compiled(kernel).run
    num = gradient.size
    params, mu, nu, out = np.zeros((4, num), np.float32)
    scalars = [np.float32(0.1), np.float32(0.001)]
    sparse = SparseGradient(indices, gradient[indices], num)
    whole = np.zeros(num, np.float32)

    def zero_fill():
        whole[...] = 0
        sparse.put_into(whole)
        dense(whole)

    def dense(gradient=gradient):
        run(
            gradient=gradient, params=params, slots=[mu, nu],
            scalars=scalars, arrays=[], out=out,
        )  # fmt: skip

    def pieces():
        run_sparse(
            run, gradient=sparse, params=params, slots=[mu, nu],
            scalars=scalars, arrays=[], out=out, passage=Passage(),
        )  # fmt: skip

    dense_ms, filled_ms, pieces_ms = median_ms(
        [dense, zero_fill, pieces], repetitions, now
    )
    return {
        "dense_update_ms": dense_ms,
        "zero_fill_ms": filled_ms,
        "sparse_update_ms": pieces_ms,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--elements", type=int, default=4 << 20, help="of a chunk")
    parser.add_argument("--ratio", type=float, default=0.02, help="of the link volume")
    parser.add_argument("--repetitions", type=int, default=11)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    arguments = parser.parse_args()
    now = CLOCKS[arguments.clock]
    gradient = gradient_of(arguments.elements)
    k = top_k(arguments.ratio).num_kept(gradient.size, gradient.dtype)
    result = {
        "backend": jax.default_backend(),
        "elements": gradient.size,
        "kept": k,
        **selection(gradient, k, arguments.repetitions, now),
    }
    chosen = np.asarray(jax.jit(select, static_argnums=(1, 2))(gradient, k, "exact"))
    result |= scattering(gradient, chosen, arguments.repetitions, now)
    rounded = {n: round(v, 3) if isinstance(v, float) else v for n, v in result.items()}
    print(json.dumps(rounded))


if __name__ == "__main__":
    main()
