"""The optimizers whose kernels come compiled with the package.

Invariant: hyperparameters are arguments of a kernel, so one kernel for each structure
is enough. These options change the structure: a schedule (the rate is a scalar, not a
literal), one leaf or several (see `Kernel.reciprocals`), clipping, Nesterov, an average
of the params.
"""

from collections.abc import Mapping

import jax.numpy as jnp
import optax

from jaxinf.program.average import ema, with_average
from jaxinf.program.kernel import Kernel
from jaxinf.program.update import trace_update


def trace_standard_kernels() -> Mapping[str, Kernel]:
    """Traces kernels by name, for several leaves and for one; some share their C++.

    Those with an average are for several leaves only, to keep the package small.
    """
    leaf, leaves = jnp.zeros(8), [jnp.zeros(8), jnp.zeros(9)]
    return {
        name + suffix: trace_update(tx, params).leaves[0].kernel
        for name, tx in _optimizers().items()
        for suffix, params in (("", leaves), ("_one_leaf", leaf))
        if not (suffix and "average" in name)
    }


def _optimizers() -> Mapping[str, optax.GradientTransformation]:
    optimizers: dict[str, optax.GradientTransformation] = {}
    for suffix, rate in (("", 0.1), ("_schedule", optax.linear_schedule(1.0, 0.1, 9))):
        variants = {
            "adam": optax.adam(rate),
            "adam_nesterov": optax.adam(rate, nesterov=True),
            "adamw": optax.adamw(rate),
            "adamw_clipped": optax.chain(
                optax.clip_by_global_norm(1.0), optax.adamw(rate)
            ),
            "adamw_nesterov": optax.adamw(rate, nesterov=True),
            "sgd": optax.sgd(rate),
            "sgd_momentum": optax.sgd(rate, momentum=0.9),
            "sgd_nesterov": optax.sgd(rate, momentum=0.9, nesterov=True),
            "adagrad": optax.adagrad(rate),
            "lion": optax.lion(rate),
            "rmsprop": optax.rmsprop(rate),
            "rmsprop_centered": optax.rmsprop(rate, centered=True),
            "rmsprop_momentum": optax.rmsprop(rate, momentum=0.9),
        }
        for name in ("adamw", "adamw_clipped"):
            variants[f"{name}_average"] = with_average(variants[name], ema(0.999))
        optimizers |= {name + suffix: tx for name, tx in variants.items()}
    optimizers["sgd_rate_1"] = optax.sgd(1.0)
    optimizers["set_to_zero"] = optax.set_to_zero()
    return optimizers
