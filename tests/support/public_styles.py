"""Trainers in the styles of ten public ones, written with plain optax.

`CHANGES` has the lines that put a program's state into a store, and `RESUMING` those
that make one without checkpoints of its own go on after a kill: a part of a line, and
what takes its place. A test makes the changed program from the plain one's source.
"""

import inspect
import pickle
import re
import textwrap
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import flax
import flax.linen as nn
import flax.serialization
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from flax.training.dynamic_scale import DynamicScale
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec
from program_styles import EVERY, NUM_STEPS, WIDTH, LinenNetwork, NnxNetwork, loss_of

import jaxinf

ROWS = jnp.ones((1, WIDTH))


def lm1b(run):
    """Linen on a mesh; saves after each step whose number divides."""
    mesh = jax.make_mesh((1,), ("data",))
    whole = NamedSharding(mesh, PartitionSpec())
    network, file = LinenNetwork(), run.place / "train.msgpack"
    rate = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 20)
    tx = optax.adamw(rate, b2=0.98)

    def make(key):
        params = network.init(key, ROWS)["params"]
        return TrainState.create(apply_fn=network.apply, params=params, tx=tx)

    train = jax.jit(make, out_shardings=whole)(jax.random.key(0))
    if file.exists():
        train = flax.serialization.from_bytes(train, file.read_bytes())

    @partial(jax.jit, in_shardings=(whole, whole), out_shardings=whole)
    def step(train, rows):
        def loss(params):
            return loss_of(train.apply_fn({"params": params}, rows), rows)

        value, gradients = jax.value_and_grad(loss)(train.params)
        return train.apply_gradients(grads=gradients), value

    for number in range(int(train.step), NUM_STEPS):
        train, value = step(train, run.batch(number))
        run.losses[number] = float(value)
        if number % EVERY == 0:
            file.write_bytes(flax.serialization.to_bytes(train))


class Normalised(nn.Module):
    """A network with statistics of batches."""

    @nn.compact
    def __call__(self, rows, *, is_training=True):
        hidden = nn.BatchNorm(not is_training)(nn.Dense(16)(rows))
        return nn.Dense(WIDTH)(nn.relu(hidden))


class Scaled(TrainState):
    """A state with statistics and a loss scale."""

    batch_stats: Any
    dynamic_scale: DynamicScale


def imagenet(run):
    """Linen with statistics of batches and a loss scale that begins too high."""
    network, file = Normalised(), run.place / "train.msgpack"
    variables = network.init(jax.random.key(0), ROWS)
    tx = optax.sgd(0.1, momentum=0.9, nesterov=True)
    train = Scaled.create(
        apply_fn=network.apply,
        tx=tx,
        dynamic_scale=DynamicScale(scale=3e38),
        **variables,
    )
    if file.exists():
        train = flax.serialization.from_bytes(train, file.read_bytes())

    @jax.jit
    def step(train, rows):
        def loss(params):
            given = {"params": params, "batch_stats": train.batch_stats}
            outputs, new = train.apply_fn(given, rows, mutable=["batch_stats"])
            return 10 * loss_of(outputs, rows), new["batch_stats"]

        found = train.dynamic_scale.value_and_grad(loss, has_aux=True)(train.params)
        dynamic_scale, is_finite, (value, batch_stats), gradients = found
        new = train.apply_gradients(grads=gradients, batch_stats=batch_stats)
        select = partial(jnp.where, is_finite)
        params = jax.tree.map(select, new.params, train.params)
        opt_state = jax.tree.map(select, new.opt_state, train.opt_state)
        new = new.replace(params=params, opt_state=opt_state)
        return new.replace(dynamic_scale=dynamic_scale), value

    for number in range(int(train.step), NUM_STEPS):
        train, value = step(train, run.batch(number))
        run.losses[number] = float(value)
        if (number + 1) % EVERY == 0:
            file.write_bytes(flax.serialization.to_bytes(train))


class Training(NamedTuple):
    """A Haiku program's state."""

    params: Any
    opt_state: Any
    key: Any


def haiku_transformer(run):
    """Haiku; the update gets no params; no checkpoints."""

    def network(rows):
        tokens = hk.Linear(4)(rows[:, :, None])
        scale = hk.initializers.VarianceScaling(1.0)
        mixed = hk.MultiHeadAttention(1, 4, w_init=scale)(tokens, tokens, tokens)
        return hk.Linear(1)(tokens + mixed)[..., 0]

    transformed = hk.without_apply_rng(hk.transform(network))
    clip = optax.clip_by_global_norm(1.0)
    tx = optax.chain(clip, optax.adam(1e-2, b2=0.99))
    params = transformed.init(jax.random.key(0), ROWS)
    train = Training(params, tx.init(params), jax.random.key(1))
    first = 0

    @jax.jit
    def update(train, rows):
        key, _ = jax.random.split(train.key)

        def loss(params):
            return loss_of(transformed.apply(params, rows), rows)

        value, gradients = jax.value_and_grad(loss)(train.params)
        updates, opt_state = tx.update(gradients, train.opt_state)
        params = optax.apply_updates(train.params, updates)
        return Training(params, opt_state, key), value

    for number in range(first, NUM_STEPS):
        train, value = update(train, run.batch(number))
        run.losses[number] = float(value)


def equinox_frozen(run):
    """Equinox with one trained layer, whose state is of all; no checkpoints."""
    model = eqx.nn.MLP(WIDTH, WIDTH, 16, 1, key=jax.random.key(0))
    spec = jax.tree.map(lambda _: False, model)
    last = lambda model: (model.layers[-1].weight, model.layers[-1].bias)  # noqa: E731
    spec = eqx.tree_at(last, spec, replace=(True, True))
    tx = optax.sgd(1e-1)
    state = tx.init(model)
    first = 0

    @eqx.filter_jit
    def step(model, state, rows):
        trained, static = eqx.partition(model, spec)
        value, gradients = eqx.filter_value_and_grad(
            lambda part: loss_of(jax.vmap(eqx.combine(part, static))(rows), rows)
        )(trained)
        updates, state = tx.update(gradients, state)
        return eqx.apply_updates(model, updates), state, value

    for number in range(first, NUM_STEPS):
        model, state, value = step(model, state, run.batch(number))
        run.losses[number] = float(value)


def equinox_diffusion(run):
    """Equinox; the update is an argument of the step, without params."""
    model = eqx.nn.MLP(WIDTH, WIDTH, 16, 2, key=jax.random.key(0))
    tx = optax.adabelief(1e-2)
    state = tx.init(eqx.filter(model, eqx.is_inexact_array))
    first = 0

    @eqx.filter_jit
    def step(model, rows, key, state, update):
        def loss(model):
            noise = jax.random.normal(key, rows.shape)
            return loss_of(jax.vmap(model)(rows + 0.1 * noise), rows)

        value, gradients = eqx.filter_value_and_grad(loss)(model)
        updates, state = update(gradients, state)
        return eqx.apply_updates(model, updates), state, value

    for number in range(first, NUM_STEPS):
        key = jax.random.key(number % 2)
        model, state, value = step(model, run.batch(number), key, state, tx.update)
        run.losses[number] = float(value)


class Flow(flax.struct.PyTreeNode):
    """A train state of one's own, whose update also gives metrics."""

    params: Any
    opt_state: Any
    tx: Any = flax.struct.field(pytree_node=False)

    @jax.jit
    def update(self, rows):
        """Returns the state after a step, and its metrics."""

        def loss(params):
            return loss_of(LinenNetwork().apply({"params": params}, rows), rows)

        value, gradients = jax.value_and_grad(loss)(self.params)
        updates, opt_state = self.tx.update(gradients, self.opt_state, self.params)
        params = optax.apply_updates(self.params, updates)
        return self.replace(params=params, opt_state=opt_state), {"loss": value}


def jax_flow(run):
    """Linen; an evaluation calls `update` and drops its result; pickled."""
    params = LinenNetwork().init(jax.random.key(0), ROWS)["params"]
    tx = optax.adamw(1e-2, b1=0.9, b2=0.99)
    train, file = Flow(params, tx.init(params), tx), run.place / "run.pickle"
    first = 0
    if file.exists():
        first, params, opt_state = pickle.loads(file.read_bytes())
        train = train.replace(params=params, opt_state=opt_state)

    def eval_model(number):
        return train.update(run.batch(number))[1]["loss"]

    for number in range(first, NUM_STEPS):
        train, metrics = train.update(run.batch(number))
        run.losses[number] = float(metrics["loss"])
        if (number + 1) % EVERY == 0:
            assert np.isfinite(eval_model(number))
            kept = jax.tree.map(np.asarray, (train.params, train.opt_state))
            file.write_bytes(pickle.dumps((number + 1, *kept)))


def big_vision(run):
    """Dicts of arrays, groups of params, a jitted `init`, a flat archive."""
    keys = jax.random.split(jax.random.key(0))
    params = {
        "kernel": 0.3 * jax.random.normal(keys[0], (WIDTH, 16)),
        "head": {"kernel": 0.3 * jax.random.normal(keys[1], (16, WIDTH))},
        "bias": jnp.zeros((16,)),
    }
    decays = {"kernel": True, "head": {"kernel": True}, "bias": False}
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1.0, 2, 20)
    tx = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(b2=0.95),
        optax.masked(optax.add_decayed_weights(1e-4), decays),
        optax.scale_by_schedule(lambda count: -1e-2 * schedule(count)),
    )
    opt, file = jax.jit(tx.init)(params), run.place / "run.npz"
    first = 0
    if file.exists():
        kept = np.load(file)
        first, flat = int(kept["step"]), [kept[f"{n}"] for n in range(len(kept) - 1)]
        params, opt = jax.tree.structure((params, opt)).unflatten(flat)

    @partial(jax.jit, donate_argnums=(0, 1))
    def update_fn(params, opt, rows):
        def loss(params):
            hidden = jax.nn.gelu(rows @ params["kernel"] + params["bias"])
            return loss_of(hidden @ params["head"]["kernel"], rows)

        value, gradients = jax.value_and_grad(loss)(params)
        updates, opt = tx.update(gradients, opt, params)
        return optax.apply_updates(params, updates), opt, value

    for number in range(first, NUM_STEPS):
        params, opt, value = update_fn(params, opt, run.batch(number))
        run.losses[number] = float(value)
        if (number + 1) % EVERY == 0:
            flat = {f"{n}": x for n, x in enumerate(jax.tree.leaves((params, opt)))}
            np.savez(file, step=number + 1, **flat)


def nnx_scan(run):
    """NNX with its parts as the carry of a scan over batches; Orbax."""
    model = NnxNetwork(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
    graph, parts = nnx.split((model, optimizer))
    kept = [run.place / f"{n}" for n in range(NUM_STEPS + 1)]
    first = max((n for n, path in enumerate(kept) if path.exists()), default=0)

    @jax.jit
    def train(parts, batches):
        def one(parts, rows):
            model, optimizer = nnx.merge(graph, parts)
            value, gradients = nnx.value_and_grad(lambda m: loss_of(m(rows), rows))(
                model
            )
            optimizer.update(model, gradients)
            return nnx.state((model, optimizer)), value

        return jax.lax.scan(one, parts, batches)

    with ocp.StandardCheckpointer() as checkpointer:
        if first:
            parts = checkpointer.restore(kept[first], parts)
        for number in range(first, NUM_STEPS, EVERY):
            batches = [run.batch(n) for n in range(number, number + EVERY)]
            parts, values = train(parts, jnp.stack(batches))
            run.losses.update(enumerate(map(float, values), number))
            checkpointer.save(kept[number + EVERY], parts)
            checkpointer.wait_until_finished()


def purejaxrl(run):
    """All of a training in one jit: init, a scan of updates, nothing outside."""
    network = LinenNetwork()
    first = 0
    batches = jnp.stack([run.batch(number) for number in range(first, NUM_STEPS)])

    def train(key):
        params = network.init(key, ROWS)["params"]
        clip = optax.clip_by_global_norm(0.5)
        tx = optax.chain(clip, optax.adam(1e-2, eps=1e-5))
        state = TrainState.create(apply_fn=network.apply, params=params, tx=tx)

        def one(state, rows):
            def loss(params):
                return loss_of(state.apply_fn({"params": params}, rows), rows)

            value, gradients = jax.value_and_grad(loss)(state.params)
            return state.apply_gradients(grads=gradients), value

        return jax.lax.scan(one, state, batches)[1]

    values = jax.vmap(jax.jit(train))(jax.random.key(0)[None])[0]
    run.losses.update(enumerate(map(float, values), first))


def optimistix_minimise(run):
    """The state is in the carry of a `while_loop`; no checkpoints."""
    params = LinenNetwork().init(jax.random.key(0), ROWS)["params"]
    clip = optax.clip_by_global_norm(1.0)
    tx = optax.chain(clip, optax.adam(1e-2, b2=0.98))
    state = tx.init(params)
    first = 0

    @jax.jit
    def minimise(params, state, batches):
        def one(carry):
            number, params, state, values = carry
            rows = batches[number]

            def loss(params):
                return loss_of(LinenNetwork().apply({"params": params}, rows), rows)

            value, gradients = jax.value_and_grad(loss)(params)
            updates, state = tx.update(gradients, state, params)
            params = optax.apply_updates(params, updates)
            return number + 1, params, state, values.at[number].set(value)

        start = jnp.int32(0), params, state, jnp.zeros(EVERY)
        return jax.lax.while_loop(lambda carry: carry[0] < EVERY, one, start)[1:]

    for number in range(first, NUM_STEPS, EVERY):
        batches = [run.batch(n) for n in range(number, number + EVERY)]
        params, state, values = minimise(params, state, jnp.stack(batches))
        run.losses.update(enumerate(map(float, values), number))


STYLES: dict[str, Callable[[Any], None]] = {
    f.__name__: f
    for f in (
        *(lm1b, imagenet, haiku_transformer, equinox_frozen, equinox_diffusion),
        *(jax_flow, big_vision, nnx_scan, purejaxrl, optimistix_minimise),
    )
}


def stored(transformation: str, options: str = "") -> str:
    """The changed line's transformation."""
    return f"jaxinf.smart_update({transformation}, run.store{options})"


def kept(line: str, state: str) -> dict[str, str]:
    """A line that saves, and the one before it that keeps the store's step."""
    return {line: f"jaxinf.store_of(run.store).checkpoint(state={state})\n{line}"}


def wrapped(transformation: str, options: str = "") -> dict[str, str]:
    """A part of a line, and that part with the store around it."""
    return {transformation: stored(transformation, options)}


def keeping(transformation: str) -> dict[str, str]:
    """As `wrapped`, with a store that keeps the steps that the program saves."""
    store = f"jaxinf.open_store(run.store, keep_steps={EVERY})"
    return {transformation: f"jaxinf.smart_update({transformation}, {store})"}


CHANGES: dict[str, dict[str, str]] = {
    "lm1b": {  # is killed right after a save
        **wrapped("optax.adamw(rate, b2=0.98)"),
        **kept("file.write_bytes(flax", "train.opt_state"),
    },
    "imagenet": {  # steps that are skipped are none of the store's
        **wrapped("optax.sgd(0.1, momentum=0.9, nesterov=True)", ', nonfinite="skip"'),
        **kept("file.write_bytes(flax", "train.opt_state"),
    },
    "haiku_transformer": wrapped("optax.chain(clip, optax.adam(1e-2, b2=0.99))"),
    "equinox_frozen": wrapped("optax.sgd(1e-1)"),
    "equinox_diffusion": wrapped("optax.adabelief(1e-2)"),
    # Its evaluation is a step of the store, too, until the next one discards it.
    "jax_flow": keeping("optax.adamw(1e-2, b1=0.9, b2=0.99)"),
    "big_vision": {
        "opt, file = jax": f"tx = {stored('tx')}\nopt, file = jax",
        **kept('flat = {f"{n}": x for', "opt"),
    },
    "nnx_scan": keeping("optax.adamw(1e-2)"),
    "purejaxrl": wrapped("optax.chain(clip, optax.adam(1e-2, eps=1e-5))"),
    "optimistix_minimise": wrapped("optax.chain(clip, optax.adam(1e-2, b2=0.98))"),
}


def resumed(line: str, params: str) -> dict[str, str]:
    """Lines that take params and step from the store."""
    return {
        line: "store = jaxinf.store_of(run.store)\nif store.exists:\n"
        f"    {params} = store.params(like={params})\n{line}",
        "first = 0": "first = store.step",
    }


RESUMING = {
    "haiku_transformer": resumed("train = Training(params, tx.init(", "params"),
    "equinox_frozen": resumed("state = tx.init(", "model"),
    "equinox_diffusion": resumed("state = tx.init(", "model"),
    "optimistix_minimise": resumed("state = tx.init(", "params"),
    "purejaxrl": {
        "first = 0": "store = jaxinf.open_store(run.store)\n"
        "first = store.step if store.exists else 0",
        "clip = optax": "if store.exists:\n"
        "    params = store.params(like=params)\nclip = optax",
    },
}


def all_changes(style: str) -> dict[str, str]:
    """Returns the changes of a program that goes on after it has ended."""
    return {**RESUMING.get(style, {}), **CHANGES[style]}


def source_of(style: str, changes: dict[str, str]) -> str:
    """A program's source with changes, each in one line of it."""
    lines = textwrap.dedent(inspect.getsource(STYLES[style])).splitlines()
    for part, new in changes.items():
        [place] = [n for n, line in enumerate(lines) if part in line]
        indent = re.match(" *", lines[place])[0]
        first, *others = lines[place].replace(part, new).splitlines()
        lines[place : place + 1] = [first, *(indent + line for line in others)]
    return "\n".join(lines) + "\n"


def run_style(style: str, changes: dict[str, str], run: Any) -> dict[int, float]:
    """Runs a program with changes; returns the loss of each step."""
    names = {**globals()}
    exec(compile(source_of(style, changes), style, "exec"), names)
    try:
        names[style](run)
    finally:
        jaxinf.close(run.store)
    return run.losses
