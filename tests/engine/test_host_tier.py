"""State that stays on the host: fewer bytes move, and nothing else changes."""

import shutil
from itertools import product

import pytest
from families import family

from jaxinf.errors import StoreCorruptError, StoreError
from jaxinf.io.pages import page_ceil

LEAVES = {
    "bias": ((129,), "float32"),
    "embed": ((40, 1024), "float32"),
    "half": ((64, 1024), "bfloat16"),
    "kernel": ((512, 128), "float32"),
}
MEMORY = 1 << 22
ALL = 2 << 20


@pytest.fixture
def tiered(drive):
    """Makes drivers of stores with a host tier; leaves have several chunks."""

    def make(name="store", *, tier, **options):
        options = {"memory_bytes": MEMORY, "chunk_elements": 16384} | options
        return drive(name, tiers={"host": tier}, leaves=LEAVES, **options)

    return make


def state_bytes(driver, *, staying):
    """Bytes, in whole pages, of subgroups that stay, or of those that do not."""
    shape, directory = driver.opened, driver.opened.directory
    total = 0
    for leaf, record in enumerate(directory.manifest.leaves):
        whole = (0,) * len(record.shape), record.shape
        for layout in shape.layouts(leaf, *whole):
            if (layout.subgroup in shape.host_tier) == staying:
                total += sum(page_ceil(one.num_bytes) for one in layout.extents)
    return total


def moved(driver, num_steps):
    """Bytes that the next steps read and write."""
    before = driver.opened.meters.snapshot()
    driver.steps(num_steps)
    driver.engine.join()
    traffic = driver.opened.meters.snapshot() - before
    return traffic.drive_read_bytes, traffic.drive_write_bytes


@pytest.mark.parametrize(
    ("tier", "num_csds"),
    family(product([0, 200_000, 700_000, ALL], [0, 3]), short=[(700_000, 3)]),
)
def test_what_stays_is_not_read_again(tiered, tier, num_csds):
    driver = tiered(tier=tier, num_csds=num_csds).init().steps(2)
    driver.engine.join()
    stays = state_bytes(driver, staying=True)
    rest = state_bytes(driver, staying=False)
    assert (stays > 0) == (tier > 0)
    assert (rest == 0) == (tier == ALL)
    read, written = moved(driver, 6)
    assert 5 * rest <= read <= 7 * rest  # a part of a step's bytes is read ahead
    assert written >= 6 * (stays + rest)
    driver.check(8)
    driver.close()
    driver = tiered(tier=tier).init().steps(1)  # its first step reads all
    driver.check(9)


@pytest.mark.parametrize("tier", family([700_000, ALL], short=[700_000]))
def test_with_rare_commits_it_is_written_at_a_commit_alone(tiered, tier):
    driver = tiered(tier=tier, durability=3).init().steps(3)
    driver.engine.join()
    stays = state_bytes(driver, staying=True)
    rest = state_bytes(driver, staying=False)
    for _ in range(2):
        written = [moved(driver, 1)[1] for _ in range(3)]
        assert written[0] == written[1] <= rest
        assert written[2] >= stays + rest
    driver.check(9)


@pytest.mark.parametrize("tier", family([200_000, 700_000, ALL], short=[200_000]))
@pytest.mark.parametrize("durability", family([3, "checkpoint"], short=[3]))
def test_a_crash_costs_the_steps_since_the_last_commit(tiered, place, tier, durability):
    driver = tiered(tier=tier, durability=durability).init().steps(5)
    driver.engine.join()
    shutil.copytree(driver.store.path, place / "crashed", symlinks=True)
    crashed = tiered(place / "crashed", tier=tier)
    committed = 3 if durability == 3 else 0
    assert crashed.store.step == committed
    crashed.init().check(committed)
    crashed.steps(2).check(committed + 2)
    driver.check(5)
    driver.steps(2).check(7)


def test_what_shows_the_store_writes_first(tiered, place):
    driver = tiered(tier=ALL, durability="checkpoint").init().steps(3)
    with driver.store.snapshot() as path:
        driver.check(3, path)
    driver.steps(2)
    driver.store.checkpoint("five")
    driver.steps(2).check(7)
    driver.check(5, driver.store.path / "checkpoints" / "five")
    before = moved(driver, 1)
    assert before[1] == 0
    driver.close()
    assert tiered(tier=0).init().at == 8


@pytest.mark.parametrize(
    ("tier", "durability", "order"),
    family(
        product([700_000, ALL], ["step", 3], [[0], [3, 1], [0, 1, 2, 3]]),
        short=[(700_000, "step", [3, 1]), (ALL, 3, [0, 1, 2, 3])],
    ),
)
def test_a_step_that_is_given_up_leaves_memory_as_before(
    tiered, tier, durability, order
):
    driver = tiered(tier=tier, durability=durability).init().steps(3)
    driver.update(order, gradient=7.0)
    driver.engine.steps.abandon()
    driver.steps(4).check(7)


def test_a_leaf_that_is_updated_again_in_a_step_starts_over(tiered):
    driver = tiered(tier=ALL).init().steps(2)
    driver.update([1, 2], gradient=7.0)
    driver.steps(2).check(4)


def test_uncommitted_steps_that_were_overwritten_in_memory_are_lost(tiered):
    driver = tiered(tier=ALL, durability=10).init().steps(3)
    driver.update([0])
    with pytest.raises(StoreError, match="step 4 was given up"):
        driver.engine.steps.abandon()
    with pytest.raises(StoreError, match="step 4 was given up"):
        driver.close()
    tiered(tier=ALL).init().check(0)


def test_a_drive_that_fails_at_the_commit_costs_the_steps_since_the_last(
    tiered, monkeypatch
):
    driver = tiered(tier=ALL, durability=10).init().steps(3)
    driver.engine.join()
    full = OSError(28, "No space left on device")
    with monkeypatch.context() as context:

        def refuse(transfers):
            raise full

        for csd in driver.opened.csds:
            context.setattr(csd, "write", refuse)
        with pytest.raises(OSError, match="No space left"):
            driver.store.wait()
    with pytest.raises(OSError, match="No space left"):
        driver.close()
    tiered(tier=ALL).init().check(0)


def test_damage_is_found_when_the_state_is_read(tiered):
    driver = tiered(tier=ALL).init().steps(2)
    driver.close()
    chunks = sorted((driver.store.path / "current" / "params.embed" / "c").rglob("*"))
    chunk = next(path for path in chunks if path.is_file())
    content = bytearray(chunk.read_bytes())
    content[100] ^= 1
    chunk.write_bytes(content)
    driver = tiered(tier=ALL)
    with pytest.raises(StoreCorruptError, match=r"params.embed"):
        driver.init().step()


def test_a_tier_beyond_the_free_memory_is_refused(tiered, place, monkeypatch):
    driver = tiered(tier=ALL).init().steps(2)
    driver.engine.join()
    held = driver.opened.handler._queues.memories[0].prefetched.values()
    held_bytes = sum(resident.task.layout.num_bytes for resident in held)
    driver.close()
    found = held_bytes - 1, "the limit"
    monkeypatch.setattr("jaxinf.engine.division.free_memory", lambda: found)
    message = rf"{held_bytes} bytes of free memory .*found {found[0]} \(the limit\)"
    with pytest.raises(ValueError, match=message):
        tiered(tier=ALL)  # a store that is there
    with pytest.raises(ValueError, match=message):
        tiered("new", tier=ALL).init()
    assert not (place / "new").exists()
    monkeypatch.setattr("jaxinf.engine.division.free_memory", lambda: (held_bytes, ""))
    tiered(tier=ALL).init().steps(1).check(3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tiers": {"drive": 1 << 20}}, "there is no other tier"),
        ({"tiers": ["host"]}, "expected the memory for state"),
        ({"tiers": {"host": "much"}}, 'tiers\\["host"\\]'),
        ({"tiers": {"host": -1}}, "at least 0"),
        ({"tiers": {"host": MEMORY}}, "or a smaller tier"),
        ({"tiers": {"host": 1}, "csd": "emulated"}, "never passes the host"),
    ],
)
def test_tiers_that_cannot_be(drive, place, options, message):
    with pytest.raises(ValueError, match=message):
        drive(memory_bytes=MEMORY, **options).init()
    assert not (place / "store").exists()
