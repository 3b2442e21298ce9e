"""What stays in memory, against every choice that there is."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinf.transfer import stays


def most_held(order, kept):
    """The most bytes that stay between two uses, when the cycle repeats."""
    held, num_uses = [0] * len(order), len(order)
    for use, (key, num_bytes) in enumerate(order):
        following = (n for n in range(1, num_uses + 1))
        length = next(n for n in following if order[(use + n) % num_uses][0] == key)
        for gap in range(use, use + length * kept[use]):
            held[gap % num_uses] += num_bytes
    return max(held, default=0)


def hit_bytes(order, kept):
    return sum(size for (_, size), own in zip(order, kept, strict=True) if own)


@given(
    st.lists(st.integers(0, 3), max_size=8),
    st.lists(st.integers(1, 4), min_size=4, max_size=4),
    st.integers(0, 12),
)
def test_what_stays_fits_and_all_of_it_if_there_is_room(keys, size, capacity):
    order = [(key, size[key]) for key in keys]
    kept = stays(order, capacity)
    assert most_held(order, kept) <= capacity
    if capacity >= sum(size[key] for key in set(keys)):
        assert all(kept)


@given(st.lists(st.integers(0, 3), max_size=8), st.integers(0, 4))
def test_no_choice_is_better_for_pieces_of_one_length(keys, capacity):
    order = [(key, 1) for key in keys]
    choices = product([False, True], repeat=len(order))
    best = max(hit_bytes(order, k) for k in choices if most_held(order, k) <= capacity)
    assert best - 1 <= hit_bytes(order, stays(order, capacity)) <= best


@pytest.mark.parametrize("num_pieces", [8, 97, 1250])
def test_half_of_what_is_used_in_turn_is_found_in_half_of_the_memory(num_pieces):
    order = [(n, 1 + n % 5) for n in range(num_pieces)]
    total = sum(size for _, size in order)
    found = hit_bytes(order, stays(order, total // 2))
    assert 0.45 * total <= found <= 0.5 * total


def test_a_piece_stays_for_its_nearer_use_and_one_beyond_the_room_passes_through():
    order = [("a", 1), ("b", 1), ("b", 1), ("a", 1), ("c", 1)]
    assert stays(order, 1) == [False, True, False, True, False]
    assert stays([("long", 9), ("short", 1)], 2) == [False, True]
