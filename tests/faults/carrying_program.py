"""A model with batch statistics and dropout that trains, and may kill itself.

    python carrying_program.py STORE {update,stream} NUM_STEPS [FUNCTION:CALL]

It prints each step's loss, and at the end the accuracy on other data. With the last
argument it gets SIGKILL right before that call of the function.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from inject import at_call, die

import jaxinf
from jaxinf.engine import opened
from jaxinf.store import StoreDirectory

PLACES = {
    "unpublish": StoreDirectory,
    "make_carry": opened,
    "write_carry": opened,
    "sync": StoreDirectory,
    "write_record": StoreDirectory,
    "flip": StoreDirectory,
}
OPTIMIZER = optax.adam(1e-2)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(8, 32, rngs=rngs)
        self.norm = nnx.BatchNorm(32, momentum=0.7, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.last = nnx.Linear(32, 3, rngs=rngs)

    def __call__(self, x):
        return self.last(self.dropout(jax.nn.relu(self.norm(self.first(x)))))


def batch_of(number, size=32):
    x = jax.random.normal(jax.random.key(number), (size, 8)) * 2 + 1
    return x, jnp.argmax(x[:, :3] + x[:, 3:6], 1)


GRAPH, PARAMS, REST = nnx.split(Net(nnx.Rngs(0)), nnx.Param, ...)
PARAMS, REST = nnx.to_pure_dict(PARAMS), nnx.to_pure_dict(REST)


def loss_of(params, batch):
    model = nnx.merge(GRAPH, params, batch["rest"])
    x, y = batch["data"]
    loss = optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()
    return loss, nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.Param)))


def accuracy_of(params, rest):
    model = nnx.merge(GRAPH, params, rest)
    model.eval()
    x, y = batch_of(10_000, 256)
    return float((jnp.argmax(model(x), 1) == y).mean())


def updating(store):
    """Returns the params now, and what makes a step, of a loop of one's own."""
    tx = jaxinf.smart_update(OPTIMIZER, store)
    params = store.params(like=PARAMS) if store.exists else PARAMS
    held = [params, tx.init(params)]

    @jax.jit
    def train(params, state, batch):
        grad = jax.value_and_grad(loss_of, has_aux=True)
        (loss, rest), grads = grad(params, batch)
        updates, state = tx.update(grads, state, params, carry=rest)
        return optax.apply_updates(params, updates), state, loss, rest

    def step(batch):
        *held[:], loss, rest = train(*held, batch)
        return loss, rest

    return lambda: held[0], step


def streaming(store):
    step = jaxinf.stream(
        loss_of,
        OPTIMIZER,
        store,
        memory_bytes=256 << 20,
        has_aux=True,
        carry=lambda rest: rest,
    )
    step.load(PARAMS)
    return step.params, step


def main(path, kind, num_steps, kill_at=""):
    if kill_at:
        name, count = kill_at.split(":")
        at_call(PLACES[name], name, count, die)
    with jaxinf.open_store(path) as store:
        params, step = {"update": updating, "stream": streaming}[kind](store)
        rest = store.carried(like=REST) if store.step else REST
        for number in range(store.step, int(num_steps)):
            loss, rest = step({"data": batch_of(number), "rest": rest})
            bits = np.asarray(loss, np.float32).view(np.uint32)
            print(f"loss {number} {int(bits):08x}", flush=True)
        print(f"accuracy {accuracy_of(params(), rest)}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
