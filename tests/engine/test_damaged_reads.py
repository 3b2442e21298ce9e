"""Every reader of a store's chunks refuses a chunk with a flipped bit."""

import pytest
from copies import copied
from families import family
from raw_stores import chunk_of
from store_driver import flip

from jaxinf.errors import StoreCorruptError
from jaxinf.exchange import export_safetensors, export_url
from jaxinf.store import (
    ChunkFile,
    StepReader,
    StoreDirectory,
    pinned_step,
    read_step,
    verify_step,
)

LEAVES = {"h": ((70, 257), "bfloat16"), "w": ((1100, 1025), "float32")}
"""The second leaf is read in more than one piece."""


def read(driver, leaf, state):
    driver.store.read(state, leaf)


def params(driver, leaf, state):
    driver.store.params(like=driver.initial)


def compare(driver, leaf, state):
    """Gives other params than the stored ones, so the comparison reads chunks."""
    driver.initial[leaf][:] = 0
    driver.init()


def read_raw(driver, leaf, state):
    record = next(r for r in driver.files.directory.manifest.leaves if r.name == leaf)
    step = read_step(driver.files.directory, driver.store.path / "current")
    with StepReader(step) as reader:
        list(reader.stored_pieces(ChunkFile(-1, record, record.state(state), 0)))


def verify(driver, leaf, state):
    path = driver.store.path / "current"
    damages = verify_step(driver.files.directory, path)
    raise StoreCorruptError("\n".join(f"{d.what}: {d.problem}" for d in damages))


def convert(driver, leaf, state):
    copied(driver.store.path, driver.store.path.with_name("new"), state="int8")


def export(driver, leaf, state):
    with pinned_step(driver.files.directory) as step:
        export_url(step, f"file://{driver.store.path.with_name('out')}")


def to_safetensors(driver, leaf, state):
    with pinned_step(driver.files.directory) as step:
        export_safetensors(step, driver.store.path.with_name("new"))


ALL = [read, read_raw, verify, convert, export]
CASES = [("params", use) for use in [*ALL, to_safetensors, params, compare]]
CASES.remove(("params", convert))  # a link, whose readers refuse it
CASES += [("trace", use) for use in ALL]


@pytest.mark.parametrize("where", family(["first", "last"], short=["last"]))
@pytest.mark.parametrize(("state", "use"), CASES)
def test_a_flipped_bit_is_refused(drive, capsys, place, state, use, where):
    leaf = "h" if where == "first" else "w"
    driver = drive(leaves=LEAVES).init()
    number = list(LEAVES).index(leaf)
    last = chunk_of(driver.files.directory, number, state).num_bytes - 1
    driver.close()
    flip(driver, leaf, state, 0 if where == "first" else last)
    driver = drive(leaves=LEAVES)
    try:
        use(driver, leaf, state)
        said = capsys.readouterr().err
    except StoreCorruptError as error:
        said = str(error)
    assert f"leaf {leaf}, {state}, chunk 0 of" in said
    assert "expected CRC-32C" in said
    assert not (place / "new" / "jaxinf.json").exists()
    assert not (place / "out" / "export.json").exists()
    assert StoreDirectory.open(place / "store").read_commit().step == 0
