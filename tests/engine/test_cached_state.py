"""State that stays in memory: fewer bytes move, and nothing else changes."""

from itertools import product

import pytest
from families import family
from inject import at_each_call

from jaxinf.csd.cards import card
from jaxinf.transfer import page_ceil

LEAVES = {
    "bias": ((129,), "float32"),
    "embed": ((40, 1024), "float32"),
    "half": ((64, 1024), "bfloat16"),
    "kernel": ((512, 128), "float32"),
}
LEAST = 1 << 18
PART = 1 << 20
ALL = 2 << 20


@pytest.fixture
def cached(drive):
    """Makes drivers of stores with an amount of memory; leaves have several chunks."""

    def make(name="store", *, memory, **options):
        options = {"chunk_elements": 16384, "num_workers": 4} | options
        return drive(name, memory_bytes=memory, leaves=LEAVES, **options)

    return make


def state_bytes(driver, *, staying):
    """Bytes, in whole pages, of subgroups that stay, or of those that do not."""
    files, directory = driver.files, driver.files.directory
    kept = files.subgroups.choose_cached(files.memory_bytes)
    total = 0
    for leaf, record in enumerate(directory.manifest.leaves):
        whole = (0,) * len(record.shape), record.shape
        for layout in files.subgroups.layouts(leaf, *whole):
            if (layout.subgroup in kept) == staying:
                total += sum(page_ceil(one.num_bytes) for one in layout.extents)
    return total


def moved(driver, num_steps):
    """Bytes that the next steps read and write."""
    before = driver.files.meters.snapshot()
    driver.steps(num_steps)
    driver.engine.steps.join()
    traffic = driver.files.meters.snapshot() - before
    return traffic.drive_read_bytes, traffic.drive_write_bytes


@pytest.mark.parametrize(
    ("memory", "num_csds"),
    family(product([LEAST, PART, ALL], [0, 3]), short=[(PART, 3)]),
)
def test_what_stays_is_not_read_again(cached, memory, num_csds):
    options = {"num_csds": num_csds, "num_workers": 4}
    driver = cached(memory=memory, **options).init()
    stays = state_bytes(driver, staying=True)
    rest = state_bytes(driver, staying=False)
    assert (stays > 0) == (memory > LEAST)
    assert stays <= memory  # or the first steps would wait for ever
    assert (rest == 0) == (memory == ALL)
    driver.steps(2).engine.steps.join()
    read, written = moved(driver, 6)
    assert 5 * rest <= read <= 7 * rest  # a part of a step's bytes is read ahead
    assert written >= 6 * (stays + rest)
    share = driver.store.metrics_of(8).hit_share
    assert share == pytest.approx(stays / (stays + rest))
    driver.check(8)
    driver.close()
    driver = cached(memory=memory).init().steps(1)  # its first step reads all
    assert driver.store.metrics_of(9).hit_share == 0
    driver.check(9)


def test_with_rare_commits_it_is_written_at_a_commit_alone(cached):
    driver = cached(memory=PART, durability=3).init().steps(3)
    driver.engine.steps.join()
    stays = state_bytes(driver, staying=True)
    rest = state_bytes(driver, staying=False)
    assert stays
    written = [moved(driver, 1)[1] for _ in range(3)]
    assert written[0] == written[1] <= rest
    assert written[2] >= stays + rest
    driver.check(6)


@pytest.mark.parametrize(
    ("memory", "durability", "order"),
    [(PART, "step", [3, 1]), (ALL, 3, [0, 1, 2, 3])],
)
def test_a_step_that_is_given_up_leaves_memory_as_before(
    cached, memory, durability, order
):
    driver = cached(memory=memory, durability=durability).init().steps(3)
    driver.update(order, gradient=7.0)
    driver.engine.steps.abandon()
    driver.steps(4).check(7)


@pytest.mark.parametrize("memory", family([PART, 16 * ALL], short=[16 * ALL]))
def test_state_of_cards_never_crosses_the_host_link(cached, memory, monkeypatch):
    """Gradients go down and results up; state is read from each drive in each step."""
    driver = cached(memory=memory, csd="emulated", num_csds=2).init().steps(1)
    driver.engine.steps.join()
    through_host = []

    def note(file, memory, offset, num_bytes, **options):
        if "buffered" not in options:  # else it is the card's
            through_host.append(num_bytes)

    for name in ("read_into", "write_from"):  # what a drive sends to the host's memory
        at_each_call(monkeypatch, card, name, note)
    assert not driver.files.subgroups.choose_cached(driver.files.memory_bytes)
    sent = sum(params.nbytes for params in driver.initial.values())
    rest = state_bytes(driver, staying=False)
    before = driver.files.meters.snapshot()
    driver.steps(3)
    driver.engine.steps.join()
    traffic = driver.files.meters.snapshot() - before
    assert traffic.link_down_bytes == traffic.link_up_bytes == 3 * sent
    assert 2 * rest <= traffic.drive_read_bytes <= 4 * rest
    assert traffic.drive_write_bytes == 3 * rest
    assert driver.store.metrics_of(4).hit_share == 0
    # No drive sends a card less than a page: the state of the bias.
    assert set(through_host) <= {129 * 4}
    driver.check(4)
