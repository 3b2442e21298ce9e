"""Commands on stores with a record, of a checkpoint or of the last step, in pieces."""

import json
import shutil

import pytest
from golden_stores import golden

import jaxinf
from jaxinf.store import seal


@pytest.fixture
def store(tmp_path):
    """At step 3, with a checkpoint of step 2."""
    return shutil.copytree(golden("store"), tmp_path / "store", symlinks=True)


def flip(file):
    data = bytearray(file.read_bytes())
    data[40] ^= 1
    file.unlink()  # other names of the file keep its bytes
    file.write_bytes(data)


def test_a_checkpoint_takes_the_place_of_a_step_whose_record_is_damaged(store, run):
    flip(store / "current/commit.json")
    words = ("checkpoint", "restore", store, "2")
    refused = run(*words)
    assert refused.status == 1
    line = f"jaxinf checkpoint restore {store} 2 --discard-current"
    assert refused.err.strip().endswith(line)
    assert run(*line.split()[1:]).status == 0
    assert run("verify", store).status == 0
    with jaxinf.open_store(store) as opened:
        assert opened.step == 2


def test_a_program_restores_over_a_damaged_record(store, run):
    flip(store / "current/commit.json")
    with pytest.raises(jaxinf.StoreFormatError, match="the record of a committed step"):
        jaxinf.open_store(store)
    with jaxinf.open_store(store, restore="2") as opened:
        assert opened.step == 2
    assert run("verify", store).status == 0


@pytest.mark.parametrize("damage", ["flipped", "gone", "no manifest"])
def test_a_damaged_checkpoint_is_removed_and_not_restored(store, run, damage):
    checkpoint = store / "checkpoints/2"
    if damage == "flipped":
        flip(checkpoint / "commit.json")
    else:
        name = "jaxinf.json" if damage == "no manifest" else "commit.json"
        (checkpoint / name).unlink()
    result = run("checkpoint", "restore", store, "2", "--discard-current")
    assert result.status == 1
    assert str(checkpoint) in result.err
    with jaxinf.open_store(store) as opened:
        assert opened.step == 3
    assert run("checkpoint", "remove", store, "2").status == 0
    assert not checkpoint.exists()
    assert run("verify", store).status == 0


def test_a_good_checkpoint_beside_a_damaged_one(store, run):
    assert run("checkpoint", "save", store, "good").status == 0
    flip(store / "checkpoints/2/commit.json")
    assert run("checkpoint", "restore", store, "good").status == 0
    assert run("checkpoint", "list", store).out.count("good") == 1


def test_a_record_that_lacks_checksums_of_an_array_is_reported(store, run):
    file = (store / "current/commit.json").resolve()
    document = json.loads(file.read_bytes())
    del document["crc32c"], document["checksums"]["trace.a"]
    file.unlink()
    file.write_bytes(seal(document))
    found = run("verify", store)
    assert found.status == 1
    assert "1 damaged" in found.out
    assert "checkpoint 2" in found.out
    assert "clean" in found.out
    assert run("verify", store, "--json").out.startswith("{")
    refused = run("store", "copy", store, store.parent / "copy")
    assert refused.status == 1
    assert "trace.a" in refused.err
