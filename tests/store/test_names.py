"""Names on disk: one path component each, never two leaves with one name."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinf.store import check_leaf_paths, leaf_name
from jaxinf.store.names import array_name, encode_key

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


def test_refuses_names_that_collide():
    with pytest.raises(ValueError, match=r"\['a', 'b.c'\] and \['a.b', 'c'\] would"):
        check_leaf_paths([("a", "b.c"), ("a.b", "c")], ["params"])


def test_refuses_names_too_long_for_a_file():
    check_leaf_paths([("x" * 248,)], ["params"])
    with pytest.raises(
        ValueError, match="takes 256 bytes, a file name has at most 255"
    ):
        check_leaf_paths([("x" * 249,)], ["params"])
    with pytest.raises(ValueError, match="shorten the keys"):
        check_leaf_paths([("é" * 130,)], ["mu"])
