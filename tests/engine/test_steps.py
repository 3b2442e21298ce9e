"""Steps: exact numbers, memory within the budget, counted bytes."""

from dataclasses import replace

import numpy as np
import optax
import pytest
from families import family
from raw_stores import chunk_file
from store_driver import RATE, TX

from jaxinf.csd.cards.memory import card_buffer_bytes
from jaxinf.errors import DivergedParamsError, StaleStateError, StoreError

PAGE = 4096
NUM_BYTES = 8  # of state a param: master and momentum


LEAST = {"num_workers": 1, "memory_bytes": 2 * NUM_BYTES * PAGE}
LITTLE = {"num_workers": 4, "memory_bytes": 8 * NUM_BYTES * PAGE}
SMALL_CHUNKS = {"num_workers": 3, "chunk_elements": PAGE}


@pytest.mark.parametrize(
    ("num_csds", "options"),
    [
        pytest.param(0, {}, marks=pytest.mark.long),
        pytest.param(1, LITTLE, marks=pytest.mark.long),
        (3, LEAST),
        (3, SMALL_CHUNKS),
    ],
)
def test_steps_are_exact(drive, num_csds, options):
    driver = drive(num_csds=num_csds, **options).init()
    driver.check(0)
    for step in range(1, 6):
        results = driver.step()
        for number, (name, out) in enumerate(results.items()):
            master, momentum = driver.expected(step)[name]
            rounded = driver.rounded(number, master)
            wanted = rounded if name == "half" else -RATE * momentum
            np.testing.assert_array_equal(out, wanted)
        driver.check(step)
    limit = driver.files.options.memory_bytes
    if driver.files.options.csd.has_cards:  # a card holds at least one subgroup
        limit = max(limit, card_buffer_bytes(4 * NUM_BYTES * PAGE, 4 * PAGE))
    assert driver.engine.files.fleet.peak_bytes <= limit
    driver.close()
    again = drive(num_workers=4).init()
    assert again.at == 5
    again.steps(1).check(6)


FROZEN_LEAVES = {
    "cold": ((50, 4096), "float32"),
    "half": ((40, 4096), "bfloat16"),
    "warm": ((3, 4096), "float32"),
}


@pytest.mark.parametrize("num_csds", family([0, 2], short=[2]))
def test_frozen_leaves_cost_nothing(drive, num_csds):
    labels = {"cold": "freeze", "half": "freeze", "warm": "train"}
    tx = optax.multi_transform({"train": TX, "freeze": optax.set_to_zero()}, labels)
    driver = drive(num_csds=num_csds, leaves=FROZEN_LEAVES, tx=tx, chunk_elements=4096)
    driver.init()
    for step in range(1, 3):
        for number, name in enumerate(FROZEN_LEAVES):
            part = driver.part(number)
            if name != "warm":
                start = driver.initial[name]
                part = replace(part, probe=start.ravel()[:8])
            driver.engine.steps.update(driver.at, part)
            if name != "warm":
                wanted = driver.initial[name] if name == "half" else 0
                np.testing.assert_array_equal(part.out, wanted)
        driver.finish()
        driver.store.wait()
        traffic = driver.store.metrics.traffic
        assert traffic.drive_write_bytes == 2 * 3 * 4096 * 4
        # The 16-bit leaf's params are read for the result; a remainder is not.
        itemsize = 2 if driver.files.options.csd.codes_params else 4
        wanted = 2 * 3 * 4096 * 4 + 40 * 4096 * itemsize
        stays = step > 1 and not driver.files.options.csd.has_cards
        assert traffic.drive_read_bytes == (0 if stays else wanted)
        found = driver.found()
        np.testing.assert_array_equal(found["cold"][0], driver.initial["cold"])
        warm, _ = driver.expected(step)["warm"]
        np.testing.assert_array_equal(found["warm"][0], warm)
    files = driver.files.directory
    for leaf, num_links in ((0, 2), (2, 1)):
        file = chunk_file(files, "a", leaf, "params")
        assert file.stat().st_nlink == num_links


@pytest.mark.parametrize("num_csds", [0, 2])
def test_abandoned_steps_leave_no_trace(drive, num_csds):
    driver = drive(num_csds=num_csds).init()
    for step in range(4):
        for order in (None, [3, 1], []):
            driver.update(order, gradient=np.nan)
            assert driver.engine.steps._step is not None or order == []
            driver.engine.steps.abandon()
            assert driver.engine.steps._step is None
            driver.check(step)
        driver.update()
        driver.finish(skipped_steps=3 * step)
        driver.check(step + 1)
        assert driver.store.skipped_steps == 3 * step


def test_a_computation_that_failed_elsewhere_may_run_again(drive):
    driver = drive(chunk_elements=PAGE).init()
    for step in range(1, 4):
        driver.update([1, 3], gradient=-5.0)
        driver.update([3, 0, 1], gradient=7.0)
        driver.step()
        driver.check(step)


def test_a_leaf_that_a_failed_computation_has_updated_is_not_left_alone(drive):
    driver = drive().init()
    driver.update()
    with pytest.raises(StoreError, match=r"step 1 was to leave params as they are"):
        driver.engine.steps.finish(0, driver.scalars(1), 0, kept=[0])


def test_states_of_other_steps_are_refused(drive):
    driver = drive().init().steps(2)
    with pytest.raises(StaleStateError, match=r"of step 1, the store is at step 2"):
        driver.engine.steps.update(1, driver.part(0))
    with pytest.raises(StaleStateError, match=r"of step 3, the store is at step 2"):
        driver.engine.steps.finish(3, [], 0)


@pytest.mark.parametrize("number", [0, 3, 4])
def test_other_params_are_refused(drive, number):
    driver = drive().init()
    part = driver.part(number)
    part.probe[...] += 1
    with pytest.raises(DivergedParamsError, match=r"leaf .*not those that the store's"):
        driver.engine.steps.update(0, part)


def test_annotations_ride_on_their_step(drive):
    driver = drive().init()
    store = driver.store
    payload = {"position": [1]}
    store.annotate(1, payload)
    payload["position"].append(2)
    store.annotate(2, "two")
    for wanted in ({"position": [1]}, "two", None):
        driver.step()
        assert store.payload == wanted
    with pytest.raises(ValueError, match=r"annotate\(step=3\): expected a step still"):
        store.annotate(3, None)
    driver.step()
    driver.check(4)
