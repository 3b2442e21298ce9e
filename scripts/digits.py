"""A plain optax loop on scikit-learn's digits, which can also run on a drive.

The loop is ordinary: an MLP, Adam, minibatches. With `--store DIR` the line that makes
the optimizer changes, and a run that was stopped goes on:

    python scripts/digits.py
    python scripts/digits.py --store /mnt/nvme0/digits
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import jaxinf


def init_params(key):
    sizes = [64, 128, 64, 10]
    keys = jax.random.split(key, len(sizes))
    return [
        {"w": jax.random.normal(k, (m, n)) * (2 / m) ** 0.5, "b": jnp.zeros(n)}
        for k, m, n in zip(keys, sizes, sizes[1:], strict=False)
    ]


def logits_of(params, x):
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


def loss_of(params, x, y):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits_of(params, x), y)
    return losses.mean()


def main(store=None, num_steps=400):
    images, labels = load_digits(return_X_y=True)
    x, y = jnp.asarray(images / 16.0, jnp.float32), jnp.asarray(labels)
    params = init_params(jax.random.key(0))
    tx, first = optax.adam(1e-3), 0
    if store is not None:
        tx = jaxinf.smart_update(optax.adam(1e-3), store)  # the one line
        kept = jaxinf.store_of(store)
        if kept.exists:  # of an earlier run
            params, first = kept.params(like=params), kept.step
    state = tx.init(params)

    @jax.jit
    def step(params, state, x, y):
        gradients = jax.grad(loss_of)(params, x, y)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    batches = np.random.default_rng(0).integers(0, 1400, (num_steps, 64))
    for rows in batches[first:]:
        params, state = step(params, state, x[rows], y[rows])
    accuracy = float((logits_of(params, x[1400:]).argmax(1) == y[1400:]).mean())
    if store is not None:
        jaxinf.close(store)
    print(f"test accuracy {accuracy:.4f} after {num_steps} steps")
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--store", help="directory for the optimizer state")
    main(parser.parse_args().store)
