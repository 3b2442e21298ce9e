"""Flipped bits are found before they are trained on."""

import pytest
from families import family
from store_driver import flip

from jaxinf.engine import bind_optimizer
from jaxinf.errors import StoreCorruptError
from jaxinf.transfer import Task

LEAVES = {"w": ((300, 1025), "float32"), "s": ((), "float32"), "h": ((77,), "bfloat16")}
MANY, ONE = 1 << 18, 1 << 24
"""Bytes of memory that cut a chunk in many subgroups, or leave it whole."""


def read_ahead(driver, number):
    files, chunks = driver.files, driver.files.chunks
    layouts = [
        one for chunk in files.subgroups.layouts_by_chunk(number) for one in chunk
    ]
    files.mover.prefetch([Task(x, loads=chunks.sources(x, (0, 1))) for x in layouts])


@pytest.mark.parametrize(
    ("leaf", "byte", "state", "memory_bytes", "ahead"),
    family(
        [
            ("w", 0, "params", MANY, False),
            ("w", 700_001, "trace", MANY, True),
            ("w", 700_001, "params", ONE, True),
            ("w", 300 * 1025 * 4 - 1, "trace", ONE, False),
            ("s", 3, "params", MANY, False),
            ("h", 153, "trace", MANY, True),
        ],
        short=[("w", 700_001, "trace", MANY, True), ("s", 3, "params", MANY, False)],
    ),
)
def test_a_flipped_bit_is_named_and_not_trained_on(
    drive, leaf, byte, state, memory_bytes, ahead
):
    options = {"leaves": LEAVES, "memory_bytes": memory_bytes, "num_workers": 2}
    driver = drive(num_csds=2, **options).init().steps(3)
    driver.close()
    file = flip(driver, leaf, state, byte)
    again = drive(driver.store.path, **options)
    bind_optimizer(again.engine, again.description)
    again.at = 3
    number = list(again.leaves).index(leaf)
    if ahead:
        read_ahead(again, number)
    with pytest.raises(StoreCorruptError, match=f"leaf {leaf}, {state}, chunk 0") as e:
        again.update([number])
    for text in (str(file.resolve()), "on CSD", "checkpoint"):
        assert text in str(e.value)
    for call in (again.finish, again.store.check):
        with pytest.raises(StoreCorruptError):
            call()
    again.close()
    reopened = drive(driver.store.path, **options)
    assert reopened.store.step == 3
    flip(driver, leaf, state, byte)
    reopened.init().steps(1).check(4)


def read_again(driver, layouts):
    """Reads momentum twice, like an evicted prefetch and then its task."""
    files = driver.files
    tasks = [
        Task(layout, lambda *_: None, loads=files.chunks.sources(layout, (1,)))
        for layout in layouts
    ]
    files.mover.run(tasks)


def written_before(drive):
    """Opens a store of which this process knows no checksums of parts."""
    drive(leaves=LEAVES, memory_bytes=1 << 18).init().steps(1).close()
    driver = drive(leaves=LEAVES, memory_bytes=1 << 18).init()
    assert not driver.files.chunks._newest_parts
    return driver


def test_a_part_that_was_written_is_verified_by_itself(drive):
    driver = drive(leaves=LEAVES, memory_bytes=1 << 18).init().steps(1)
    driver.store.wait()
    number = list(driver.leaves).index("w")
    layouts = driver.files.subgroups.layouts(number, (0, 0), (300, 1025))
    driver.files.mover.drop_prefetched()
    flip(driver, "w", "trace", byte=5)
    with pytest.raises(StoreCorruptError, match=r"leaf w, trace, .* as written, found"):
        read_again(driver, layouts[:1])


@pytest.mark.parametrize("num_read_first", [1, None])
def test_a_subgroup_that_is_read_twice_must_be_the_same(drive, num_read_first):
    """The chunk was complete in memory before, or not yet."""
    driver = written_before(drive)
    number = list(driver.leaves).index("w")
    layouts = driver.files.subgroups.layouts(number, (0, 0), (300, 1025))
    assert len(layouts) > 10
    read_again(driver, layouts[:num_read_first])
    read_again(driver, layouts[:1])
    flip(driver, "w", "trace", byte=5)
    message = "leaf w, trace, .* when elements from 0 on were read before, found"
    with pytest.raises(StoreCorruptError, match=message):
        read_again(driver, layouts[:1])


def test_what_a_step_that_was_given_up_has_read_still_counts(drive):
    driver = written_before(drive)
    number = list(driver.leaves).index("w")
    driver.update([number])
    flip(driver, "w", "trace", byte=5)

    def give_up_and_update():
        driver.engine.steps.abandon()  # the prefetch may find it, too
        driver.update([number])

    with pytest.raises(StoreCorruptError, match="were read before"):
        give_up_and_update()
