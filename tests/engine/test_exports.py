"""Exports of steps to a URL while the run goes on."""

import contextlib
import logging
import signal
import threading
import time

import pytest
from copies import chunks_of, copied
from inject import at_each_call

import jaxinf
from jaxinf.errors import ExchangeError
from jaxinf.exchange import ObjectStore
from jaxinf.processes import raise_kept_interrupt, run_uninterrupted
from jaxinf.store import StoreDirectory

LEAVES = {"w": ((6, 1024), "float32"), "half": ((33, 257), "bfloat16")}


def pins_of(path):
    return [*(path / "snapshots").glob("*")]


def outcomes(driver):
    driver.store.wait()
    return [(info.step, not info.problem) for info in driver.store.exports()]


@pytest.fixture
def export(drive, place):
    """Makes a run that exports every second step."""

    def make(name="store", **options):
        options = {"export_to": f"file://{place}/out", "export_every": 2} | options
        options = {"leaves": LEAVES, "chunk_elements": 4096} | options
        return drive(name, **options).init()

    return make


def test_due_steps_are_exported_while_the_run_goes_on(export, place):
    driver = export(durability="checkpoint", num_csds=2, state="bf16")
    path, expected = driver.store.path, {}
    for step in range(1, 6):
        driver.step()
        if step % 2 == 0:
            name = driver.store.checkpoint()
            expected[step] = chunks_of(path, f"checkpoints/{name}")
    assert outcomes(driver) == [(2, True), (4, True)]
    assert not pins_of(path)
    driver.store.close()
    for step, chunks in expected.items():
        made = place / f"made{step}"
        copied(f"file://{place}/out/{step}", made)
        assert chunks_of(made) == chunks
        assert StoreDirectory.open(made).read_commit().step == step


@pytest.mark.usefixtures("pythons_handler")
@pytest.mark.parametrize("how", ["Ctrl-C", "an exception", "Ctrl-C in an update"])
def test_an_export_that_does_not_end_is_given_up(export, monkeypatch, how, caplog):
    """A chunk never reaches its place until then."""
    under_way = threading.Event()

    def hold(place, name, value):
        if "/c/" in f"{name}/" and place._stop is not None:
            under_way.set()
            while not place._stop.is_set():
                time.sleep(0.01)

    at_each_call(monkeypatch, ObjectStore, "put", hold)
    driver = export().steps(2)
    assert under_way.wait(60)
    interrupt = threading.Timer(0.3, signal.raise_signal, [signal.SIGINT])
    with contextlib.suppress(KeyboardInterrupt), driver.store:
        if how == "an exception":
            raise KeyboardInterrupt
        interrupt.start()
        if how == "Ctrl-C in an update":
            run_uninterrupted(driver.update)
            raise_kept_interrupt()
    [info] = driver.store.exports()
    assert info.problem.endswith("out/2: it was given up")
    said = "closing waits for the export to"
    assert (said in caplog.text) == (how == "Ctrl-C")
    assert "training goes on" not in caplog.text
    assert not pins_of(driver.store.path)
    with jaxinf.open_store(driver.store.path) as store:
        assert store.step == 2


def test_a_destination_that_fails_does_not_stop_the_run(export, place, caplog):
    driver = export()
    (place / "out/2").write_text("a file in its place")
    (place / "out/6").mkdir()
    (place / "out/6/other").write_text("of another tool")
    with caplog.at_level(logging.WARNING, "jaxinf"):
        driver.steps(8)
        assert outcomes(driver) == [(2, False), (4, True), (6, False), (8, True)]
    assert len(caplog.records) == 2
    assert "step 2 is not exported to" in caplog.text
    assert "found other objects, such as other" in caplog.text
    driver.check(8)
    assert not pins_of(driver.store.path)


def test_places_that_are_refused_before_a_store_is_made(export, place):
    export("one").steps(2).store.close()
    url = f"file://{place}/out"
    with pytest.raises(ExchangeError, match="as step 2 of this run is to be exported"):
        export("other", export_to=url)
    jaxinf.close(place / "other")
    assert not (place / "other/jaxinf.json").exists()
    for options, message in (
        ({"export_to": "s3://key:secret@bucket/a"}, r"export_to: s3://…: expected"),
        ({"export_to": None}, "expected export_every and export_to together"),
        ({"export_every": 0}, "expected .* at least 1 step .* found export_every=0"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            export("other", **options)
        assert "secret" not in str(caught.value)


def test_its_memory_is_a_part_of_the_stores(export, drive, place):
    options = {"leaves": {"w": ((8, 1 << 16), "float32")}, "chunk_elements": 1 << 16}
    need = 5 * (4 << 16)
    least = 2 * 4 * 8 * 4096
    memory = {"memory_bytes": need + least + 1024}
    driver = export("one", **options, **memory).steps(2)
    assert outcomes(driver) == [(2, True)]
    assert driver.store.peak_memory_bytes <= least + 1024
    beside = {"export_to": f"file://{place}/two-out"}
    with pytest.raises(ValueError, match=rf"beside the {need} of exports"):
        export("two", **options, **beside, memory_bytes=need + least - 1024)
