"""Gradients that wait in memory and in a file: bits, order, how long they last."""

import numpy as np
import pytest

from jaxinf.streaming.move.scratch import PART_BYTES, Scratch
from jaxinf.streaming.move.spill import Spill, file_bytes, waiting
from jaxinf.streaming.program.graph import Piece
from jaxinf.transfer.pages import page_ceil

SIZES = [4, 70_000, PART_BYTES + 4, 4096]


@pytest.fixture(params=[0, 80_000], ids=["file", "memory and file"])
def spill(tmp_path, request):
    sizes = {Piece(number): num_bytes for number, num_bytes in enumerate(SIZES)}
    own = Spill(Scratch([tmp_path]), waiting(sizes, request.param))
    yield own
    own.close()


def gradients(seed):
    rng = np.random.default_rng(seed)
    arrays = [rng.standard_normal(size // 4, np.float32) for size in SIZES]
    return {Piece(number): array for number, array in enumerate(arrays)}


def test_gradients_outlive_what_is_read_after_them(spill):
    kept = []
    for seed in range(3):
        given = gradients(seed)
        for piece, gradient in given.items():
            spill.put(piece, gradient)
        first = list(spill.read())  # another pass reads them again
        kept += [(given[p], found) for p, found in first]
        last = list(spill.read(removes=True))
        kept += [(given[p], found) for p, found in last]
        assert [p for p, _ in first] == [p for p, _ in last] == list(given)
        assert not list(spill.read())
        on_file = [n for n in SIZES if not spill.planned.capacity_bytes or n > 80_000]
        assert spill.written_bytes == sum(map(page_ceil, on_file))
        assert spill.written_bytes == file_bytes(spill.planned)
        spill.reset()
    for given, found in kept:
        np.testing.assert_array_equal(found, given)


def test_a_pass_that_is_given_up_leaves_nothing(spill):
    for seed in range(2):
        given = gradients(seed)
        for piece, gradient in given.items():
            spill.put(piece, gradient)
        piece, found = next(spill.read())
        np.testing.assert_array_equal(found, given[piece])
        spill.reset()
        assert not list(spill.read())
