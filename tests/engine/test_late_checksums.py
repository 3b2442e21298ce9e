"""Checksums of read state that are known only after its update."""

import numpy as np
import pytest
from flipped_bits import LEAVES, flip

from jaxinf.errors import StoreCorruptError
from jaxinf.transfer import Task


@pytest.mark.parametrize("state", ["params", "trace"])
@pytest.mark.parametrize("memory_bytes", [1 << 18, 1 << 24])
@pytest.mark.parametrize("ahead", [False, True], ids=["at once", "ahead"])
def test_a_flipped_bit_is_found_by_the_update(drive, state, memory_bytes, ahead):
    options = {"leaves": LEAVES, "memory_bytes": memory_bytes, "num_workers": 2}
    driver = drive(**options).init().steps(2)
    driver.close()
    file = flip(driver, "w", state, byte=700_001)
    again = drive(driver.store.path, **options)
    again.engine.bind(again.description)
    again.at = 2
    number = list(again.leaves).index("w")
    if ahead:
        again.store._engine.opened.update(2, again.part(list(again.leaves).index("s")))
        mover, chunks = again.opened.mover, again.opened.chunks
        shape = again.part(number).gradient.shape
        layouts = again.opened.layouts(number, (0, 0), shape)
        mover.prefetch(
            [
                Task(
                    layout,
                    lambda csd, buffer, tells: None,
                    loads=tuple((n, chunks.source(layout, n)) for n in (0, 1)),
                )
                for layout in layouts
            ]
        )
    with pytest.raises(StoreCorruptError, match=f"leaf w, {state}, chunk 0") as error:
        again.update([number])
    assert str(file.resolve()) in str(error.value)
    with pytest.raises(StoreCorruptError):
        again.close()
    assert drive(driver.store.path, **options).store.step == 2


def test_what_the_host_reads_is_checked_by_the_host(drive):
    driver = drive(leaves=LEAVES).init().steps(2)
    params = {name: np.zeros(a.shape, a.dtype) for name, a in driver.initial.items()}
    driver.store.wait()
    held = driver.store.params(like=params)  # of what was read ahead for the next step
    wanted = driver.expected(2)["w"][0]
    np.testing.assert_array_equal(held["w"], wanted)
    driver.close()
    flip(driver, "w", "params", byte=12345)
    again = drive(driver.store.path, leaves=LEAVES)
    with pytest.raises(StoreCorruptError):
        again.store.params(like=params)
    with pytest.raises(StoreCorruptError):
        again.close()
