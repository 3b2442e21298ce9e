"""Small leaves in one call of the host: the groups, and the same bits and files."""

import callback_form
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

import jaxinf
from jaxinf.optimizer import leaf_call
from jaxinf.optimizer.leaf_call import LeafCall, grouped

pytestmark = pytest.mark.optimized("long")

MIB = 1 << 20


MESH = jax.sharding.AbstractMesh((1,), ("a",))
KINDS = {
    "": None,
    "a": NamedSharding(MESH, PartitionSpec("a")),
    "b": NamedSharding(MESH, PartitionSpec()),
}


@given(
    st.lists(
        st.tuples(st.integers(0, 10 * MIB).map(lambda n: 4 * n), st.sampled_from("ab")),
        max_size=60,
    )
)
def test_every_leaf_is_in_one_call_within_its_bounds(leaves):
    sizes, kinds = [n for n, _ in leaves], [kind for _, kind in leaves]
    groups = grouped(
        [
            LeafCall(n, (size // 4,), KINDS[kind])
            for n, (size, kind) in enumerate(leaves)
        ]
    )
    assert sorted(n for group in groups for n in group) == list(range(len(leaves)))
    for group in groups:
        assert group == sorted(group, reverse=True)
        assert len({kinds[n] for n in group}) == 1
        if len(group) > 1:
            assert max(sizes[n] for n in group) < leaf_call.SMALL_BYTES
            assert sum(sizes[n] for n in group) <= leaf_call.GROUP_BYTES
            span = sum(sizes[group[-1] : group[0] + 1])
            assert span <= leaf_call.SPAN_BYTES


TIMED = ("commit.json", "_CHECKPOINT_METADATA")
"""Files with a date."""


def make(seed):
    """Makes small and long leaves, a frozen one, and one without elements."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape, np.float32))

    return {
        "bias": normal(7),
        "empty": jnp.zeros((0, 3)),
        "frozen": normal(33, 5),
        "half": normal(40, 41).astype(jnp.bfloat16),
        "long": normal(600, 500),
        "scale": normal(),
        "table": normal(128, 64),
    }


def optimizer(*, freezes):
    if not freezes:
        return optax.adamw(1e-2)
    labels = dict.fromkeys(make(0), "on") | {"frozen": "off"}
    return optax.multi_transform(
        {"on": optax.adamw(1e-2), "off": optax.set_to_zero()}, labels
    )


def train(path, compress, *, freezes):
    """Trains three steps; returns params, state and files."""
    with jaxinf.open_store(path) as store:
        tx = jaxinf.smart_update(optimizer(freezes=freezes), store, compress=compress)
        params = make(0)
        state = tx.init(params)
        step = jax.jit(tx.update)
        for seed in range(1, 4):
            updates, state = step(make(seed), state, params)
            params = optax.apply_updates(params, updates)
        final = jax.tree.leaves((store.params(like=params, state=state), params, state))
        store.wait()
        slot = (path / "current").resolve()
        files = {
            str(file.relative_to(slot)): file.read_bytes()
            for file in sorted(slot.rglob("*"))
            if file.is_file() and file.name not in TIMED
        }
        return [np.asarray(leaf) for leaf in final], files


@pytest.mark.long
@pytest.mark.parametrize(
    ("callback", "compress", "freezes"),
    [
        ("buffer", None, True),
        ("start", jaxinf.top_k(0.1, error_feedback=True, warmup_steps=1), False),
    ],
)
def test_bits_and_files_are_those_of_single_calls(
    place, monkeypatch, callback, compress, freezes
):
    callback_form.use(callback, monkeypatch)
    together = train(place / "together", compress, freezes=freezes)
    monkeypatch.setattr(leaf_call, "SMALL_BYTES", 0)
    single = train(place / "single", compress, freezes=freezes)
    for found, expected in zip(together[0], single[0], strict=True):
        np.testing.assert_array_equal(found, expected)
    assert together[1] == single[1]
    assert together[1]


def test_small_leaves_come_in_one_call(place, monkeypatch):
    calls = []
    update = jaxinf.engine.opened.OpenStore.update
    monkeypatch.setattr(
        jaxinf.engine.opened.OpenStore,
        "update",
        lambda self, step, *requests: (
            calls.append([request.leaf for request in requests])
            or update(self, step, *requests)
        ),
    )
    train(place / "store", None, freezes=False)
    assert sorted(map(sorted, calls)) == [[0, 1, 2, 3, 5, 6]] * 3 + [[4]] * 3
