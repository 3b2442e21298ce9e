"""Updates that fail or are refused: `optimizer/test_transform_refusals.py`.

python refused_updates.py STORE RUN …
"""

import sys

import callback_form
import jax
import jax.numpy as jnp
import optax
import pytest
from jax._src import xla_bridge
from jaxlib import xla_client

import jaxinf


def late(path):
    """A call whose gradient is still computed returns before it fails."""
    tx = jaxinf.smart_update(optax.sgd(1.0), path)
    params = {"w": jnp.ones((8, 8))}
    state = tx.init(params)
    update = jax.jit(tx.update).lower(params, state, params).compile()
    slow = jax.jit(lambda x: jnp.nan * (x @ x @ x)[:8, :8])
    gradients = {"w": slow(jnp.ones((3000, 3000)))}
    try:
        results = update(gradients, state, params)
    except jax.errors.JaxRuntimeError:
        pass  # it was not late, and JAX has raised the error
    else:
        with pytest.raises(jaxinf.NonFiniteGradientError):
            jaxinf.close(path)
        del results
    jaxinf.close(path)


def nan_gradient(path, how, handled):
    """The error is raised, or caught and named in another way."""
    tx = jaxinf.smart_update(optax.adam(1e-2), path)
    params = {"w": jnp.ones((30, 4))}
    state = tx.init(params)
    update = jax.jit(tx.update) if how == "jitted" else tx.update
    try:
        jax.block_until_ready(update({"w": jnp.full((30, 4), jnp.nan)}, state, params))
    except Exception as error:
        if handled == "caught":
            sys.exit(type(error).__name__)
        raise


def refused(path):
    """Prints why the devices of this process are refused."""
    try:
        tx = jaxinf.smart_update(optax.adam(1e-3), path)
        tx.init({"w": jnp.ones(3)})
    except jaxinf.DeviceConfigurationError as error:
        print(error)


def refused_without_a_cpu(path):
    """As `refused`, where the only backend is another one."""
    xla_bridge.register_backend_factory("pretended", xla_client.make_cpu_client)
    refused(path)


if __name__ == "__main__":
    callback_form.use_given()
    globals()[sys.argv[2]](sys.argv[1], *sys.argv[3:])
