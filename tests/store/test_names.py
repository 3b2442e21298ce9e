"""Names on disk, and paths of places in the optimizer's state: each is of one alone."""

from typing import NamedTuple

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinf import compat
from jaxinf.store import check_leaf_paths, encode_path, leaf_name
from jaxinf.store.documents import array_name, encode_key

KEYS = st.text(st.characters(blacklist_categories=("Cs",)))


@given(KEYS, KEYS)
def test_encoding_is_one_path_component_and_injective(one, other):
    name = encode_key(one)
    assert "/" not in name
    assert "\0" not in name
    assert (encode_key(other) == name) == (one == other)


def test_names():
    path = ("h/0", "50%", "a\n")
    assert leaf_name(path) == "h%2F0/50%25/a%0A"
    assert array_name("mu", path) == "mu.h%2F0.50%25.a%0A"
    assert array_name("params", ()) == "params"


def test_refuses_names_that_collide_or_are_too_long():
    check_leaf_paths([("x" * 248,)], ["params"])
    for paths, states, message in (
        (
            [("a", "b.c"), ("a.b", "c")],
            ["params"],
            r"\['a', 'b.c'\] and \['a.b', 'c'\]",
        ),
        ([("x" * 249,)], ["params"], "takes 256 bytes, a file name has at most 255"),
        ([("é" * 130,)], ["mu"], "shorten the keys"),
    ):
        with pytest.raises(ValueError, match=message):
            check_leaf_paths(paths, states)


# --- paths ---------------------------------------------------------------------------

NAMES = st.text(st.characters(blacklist_categories=("Cs",)), max_size=6)


class Pair(NamedTuple):
    mu: object
    value: object


def trees(names):
    return st.recursive(
        st.just(0),
        lambda inner: (
            st.dictionaries(names, inner, min_size=1, max_size=3)
            | st.lists(inner, min_size=1, max_size=3)
            | st.builds(Pair, inner, inner)
        ),
        max_leaves=8,
    )


def paths_of(tree):
    return [path for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]


def encoded(path):
    return encode_path(compat.path_keys(path))


@given(trees(NAMES | st.integers()))
def test_places_are_told_apart(tree):
    try:
        found = [encoded(path) for path in paths_of(tree)]
    except ValueError:  # JAX cannot sort the keys of a dict
        return
    assert len(set(found)) == len(found)
    assert all(path.isprintable() or not path.isascii() for path in found)


@pytest.mark.parametrize(
    ("keys", "path"),
    [
        ((), ""),
        ((("field", "count"),), ".count"),
        ((("key", 3), ("key", "a/b")), "#3/a%2Fb"),
        ((("key", ".count"),), "%2Ecount"),
        ((("key", "#3"), ("key", "=x")), "%233/%3Dx"),
        ((("key", ""), ("key", True), ("key", None)), "=/=True/=None"),
        ((("key", -1), ("other", "x[0]")), "#-1/=x[0]"),
    ],
)
def test_spelling(keys, path):
    assert encode_path(keys) == path
