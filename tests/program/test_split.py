"""The division of optimizers: stored, shared and unchanged parts, and refusals."""

import jax
import jax.numpy as jnp
import optax
import optax.contrib
import pytest
from jax import lax

from jaxinf.errors import UnsupportedTransformError
from jaxinf.program import leaf_infos, trace_init, trace_update

pytestmark = pytest.mark.optimized

PARAMS = {"b": jnp.zeros(7), "w": jnp.zeros((200, 300)), "z": jnp.zeros(())}


def stateless(function):
    def update(updates, state, params=None):
        return jax.tree.map(function, updates, params), state

    return optax.GradientTransformation(lambda _: optax.EmptyState(), update)


def on_trace(function):
    """Makes a chain of momentum and `function` on the updates."""
    return optax.chain(optax.trace(0.9), stateless(lambda u, p: function(u)))


def test_disjoint_prefixes_share_a_name():
    tx = optax.multi_transform(
        {"one": optax.adam(1e-3), "two": optax.adam(1e-2)},
        {"b": "one", "w": "two", "z": "one"},
    )
    slots = trace_init(tx, PARAMS).layout.slots
    assert [[slot.name for slot in leaf] for leaf in slots] == [["mu", "nu"]] * 3


def test_prefixes_on_one_leaf_get_numbers_on_all():
    tx = optax.chain(
        optax.masked(optax.adam(1e-3), {"b": True, "w": False, "z": True}),
        optax.adam(1e-3),
    )
    b, w, z = trace_init(tx, PARAMS).layout.slots
    assert [slot.name for slot in b] == ["mu", "nu", "mu_1", "nu_1"]
    assert [slot.name for slot in w] == ["mu_1", "nu_1"]
    assert [slot.name for slot in z] == ["mu", "nu", "mu_1", "nu_1"]


def test_names_without_attributes_and_reserved_names():
    params = {"w": jnp.zeros(3)}
    for init, names in (
        (lambda p: ({"params": p}, (p,), p), ["0_params", "1_0", "2"]),
        (lambda p: p, ["state"]),
        (lambda p: {"params": p}, ["params_1"]),
    ):
        tx = optax.GradientTransformation(init, lambda u, s, p=None: (u, s))
        (slots,) = trace_init(tx, params).layout.slots
        assert [slot.name for slot in slots] == names


@pytest.mark.parametrize("shape", [(), (2,)])
def test_bare_params(shape):
    """A count or an old-style random key looks like the slot of a bare leaf."""
    noise = optax.GradientTransformation(
        lambda _: {"key": jax.random.PRNGKey(0), "count": jnp.int32(0)},
        lambda updates, state, params=None: (updates, state),
    )
    tx = optax.chain(noise, optax.adam(0.1))
    layout = trace_init(tx, jnp.zeros(shape)).layout
    assert [slot.name for slot in layout.slots[0]] == ["mu", "nu"]
    assert len(layout.scalar_paths) == 3
    assert leaf_infos(jnp.zeros(shape))[0].path == ()


def test_a_leaf_whose_path_ends_another():
    params = {"a": {"b": jnp.zeros(3)}, "b": jnp.zeros(3)}
    slots = trace_init(optax.sgd(0.1, momentum=0.9), params).layout.slots
    assert [[slot.state_index for slot in leaf] for leaf in slots] == [[0], [1]]


def test_leaves_are_checked():
    with pytest.raises(TypeError, match=r"params/a/0: expected float32.*found int32"):
        leaf_infos({"a": [jnp.arange(3)]})
    with pytest.raises(TypeError, match=r"params/w: expected an array, found str"):
        leaf_infos({"w": "text"})
    with pytest.raises(ValueError, match="expected at least one array"):
        trace_update(optax.adam(1e-3), {"a": None})


def keeping(change, more=()):
    """Makes a transformation whose state is a copy of the params, which it changes."""
    more = {name: jnp.float32(value) for name, value in dict(more).items()}

    def update(updates, state, params=None):
        return (state if not more else updates), change(state)

    return optax.GradientTransformation(lambda params: {**params, **more}, update)


REFUSED = {
    "lamb": (
        optax.lamb(1e-3),
        r"params/b: .*reduce_sum \(from safe_norm in optax/.*, for scale_by_trust",
    ),
    "norm_of_adam": (
        optax.chain(optax.adam(1e-3), optax.clip_by_global_norm(1.0)),
        r"params/b: .*reduce_sum \(from tree_sum in optax/.*, for clip_by_global_norm"
        r"\) on it; .* to the gradients instead, before",
    ),
    "norm_of_accumulated": (
        optax.MultiSteps(
            optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)), 2
        ).gradient_transformation(),
        r"params/b: .*reduce_sum .*, for clip_by_global_norm\) .* outside optax.Multi",
    ),
    "prodigy": (
        optax.contrib.prodigy(),
        r"state.estim_lr: .*reduce_sum .*, for prodigy\) .*docs/optimizers.md lists",
    ),
    "large state": (optax.adafactor(1e-2), r"v_col\['w'\].*65536 bytes"),
    "cumsum": (
        on_trace(lambda u: jnp.cumsum(u.ravel()).reshape(u.shape)),
        "reshape|cum",
    ),
    "erf": (
        on_trace(lax.erf),
        r"primitive erf \(from .* in test_split.py, for stateless\)",
    ),
    "scalar_of_stored_state": (
        keeping(lambda state: {**state, "sum": jnp.sum(state["b"])}, {"sum": 0.0}),
        r"state\['sum'\].*reduce_sum",
    ),
    "of_another_leaf": (
        keeping(lambda state: {"b": state["c"], "c": state["b"]}),
        r"params/b: .* another leaf",
    ),
    "another_dtype": (
        keeping(lambda state: jax.tree.map(lambda s: s.astype("bfloat16"), state)),
        r"expected float32\[5, 5\] .* found bfloat16",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_elementwise_is_refused(name):
    tx, message = REFUSED[name]
    params = {"b": jnp.zeros((5, 5)), "c": jnp.zeros((5, 5))}
    if name == "large state":
        params = {"w": jnp.zeros((20000, 300))}
    with pytest.raises(UnsupportedTransformError, match=message):
        trace_update(tx, params)


def test_what_needs_no_storage_is_an_array():
    """Reductions and shuffles of gradients belong to the prologue."""
    program = trace_update(
        stateless(lambda g, p: g + jnp.flip(g) + jnp.mean(p, axis=0, keepdims=True)),
        {"w": jnp.ones((2, 3))},
    )
    kernel = program.leaves[0].kernel
    assert len(kernel.array_dtypes) == 2
    gradients, params = [jnp.ones((2, 3))], [jnp.ones((2, 3), jnp.bfloat16)]
    _, (inputs,) = program.prologue(gradients, params, [])
    assert {array.shape for array in inputs.arrays} == {(2, 3)}


def test_extra_args_are_inputs_or_fixed():
    def by_factor(updates, state, params=None, *, factor, flags, **_):
        del params
        sign = -1.0 if flags["negate"] else 1.0
        return jax.tree.map(lambda g: sign * factor * g, updates), state

    tx = optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), by_factor)
    traced = {"factor": 1.0, "flags": {"negate": True}}
    program, leaves = trace_update(tx, PARAMS, traced), jax.tree.leaves(PARAMS)

    def scalars(extra_args):
        _, inputs = program.prologue(leaves, leaves, [], extra_args)
        return [float(scalar) for scalar in inputs[0].scalars]

    assert scalars({**traced, "factor": 2.0}) == [-2.0]
    assert scalars({**traced, "factor": jnp.float32(3.0)}) == [-3.0]
    for extra_args, message in (
        ({"factor": 2.0, "flags": {"negate": False}}, "expected True, as .* traced"),
        ({"factor": 2.0}, "extra_args: expected PyTreeDef"),
        ({**traced, "factor": jnp.ones(2)}, r"extra_args: expected ShapeDtypeStruct"),
    ):
        with pytest.raises(ValueError, match=message):
            scalars(extra_args)


def test_the_prologue_is_pruned():
    """No float32 copy of a 16-bit gradient is made where none is reduced."""
    params = {"w": jnp.zeros((200, 300), jnp.bfloat16)}
    program = trace_update(optax.adamw(optax.linear_schedule(1, 0, 9)), params)
    leaves = jax.tree.leaves(params)
    counts = [jnp.int32(0)] * 2
    traced = jax.make_jaxpr(program.prologue)(leaves, leaves, counts)
    assert all(not var.aval.shape for eqn in traced.eqns for var in eqn.outvars)
    assert "f64" not in str(traced)
