"""What stays in memory, against every choice that there is."""

import random
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinf.transfer import stays


def intervals(order):
    """Start and length, in uses, of the time from each use to the next one."""
    num_uses = len(order)
    for use, (key, _) in enumerate(order):
        length = next(
            n for n in range(1, num_uses + 1) if order[(use + n) % num_uses][0] == key
        )
        yield use, length


def most_held(order, kept):
    """The most bytes that stay between two uses, when the cycle repeats."""
    held = [0] * len(order)
    for (use, length), stays_on in zip(intervals(order), kept, strict=True):
        for gap in range(use, use + length * stays_on):
            held[gap % len(order)] += order[use][1]
    return max(held, default=0)


def hit_bytes(order, kept):
    return sum(size for (_, size), own in zip(order, kept, strict=True) if own)


def best(order, capacity):
    return max(
        hit_bytes(order, kept)
        for kept in product([False, True], repeat=len(order))
        if most_held(order, kept) <= capacity
    )


sizes = st.lists(st.integers(1, 4), min_size=4, max_size=4)
uses = st.lists(st.integers(0, 3), max_size=8)


@given(uses, sizes, st.integers(0, 12))
def test_what_stays_fits_and_all_of_it_if_there_is_room(keys, size, capacity):
    order = [(key, size[key]) for key in keys]
    kept = stays(order, capacity)
    assert most_held(order, kept) <= capacity
    if capacity >= sum(size[key] for key in set(keys)):
        assert all(kept)


def test_the_best_choice_is_hardly_better():
    found = most = 0
    chosen = random.Random(1)
    for _ in range(500):
        size = [chosen.randint(1, 4) for _ in range(4)]
        keys = [chosen.randrange(4) for _ in range(chosen.randint(1, 8))]
        order, capacity = [(key, size[key]) for key in keys], chosen.randint(0, 12)
        found += hit_bytes(order, stays(order, capacity))
        most += best(order, capacity)
    assert 0.96 * most <= found <= most


@given(uses, st.integers(0, 4))
def test_no_choice_is_better_for_pieces_of_one_length(keys, capacity):
    order = [(key, 1) for key in keys]
    found, most = hit_bytes(order, stays(order, capacity)), best(order, capacity)
    assert most - 1 <= found <= most


@pytest.mark.parametrize("num_pieces", [8, 97, 1250])
def test_half_of_what_is_used_in_turn_is_found_in_half_of_the_memory(num_pieces):
    order = [(n, 1 + n % 5) for n in range(num_pieces)]
    total = sum(size for _, size in order)
    found = hit_bytes(order, stays(order, total // 2))
    assert 0.45 * total <= found <= 0.5 * total


def test_a_piece_stays_for_its_nearer_use():
    order = [("a", 1), ("b", 1), ("b", 1), ("a", 1), ("c", 1)]
    assert stays(order, 1) == [False, True, False, True, False]


def test_a_piece_beyond_the_room_passes_through():
    assert stays([("long", 9), ("short", 1)], 2) == [False, True]
    assert stays([], 2) == []
