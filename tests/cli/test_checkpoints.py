"""``jaxinf verify`` and ``jaxinf checkpoint``."""

import json

import jax.numpy as jnp
import optax
import pytest
import small_stores
from copies import copied
from raw_stores import chunk_file, make_roots
from raw_stores import flip_bit as flip

import jaxinf
from jaxinf.store import (
    StoreDirectory,
    find_members,
    list_checkpoints,
    open_members,
    save_checkpoint,
    seal,
)

PARAMS = {"w": jnp.ones((70, 1025)), "b": jnp.ones(3)}


@pytest.fixture
def store(tmp_path):
    path = tmp_path / "store"
    train(path, 2, csds=make_roots(tmp_path, "store", 2))
    return path


def train(path, num_steps, **options):
    with jaxinf.open_store(path, **options) as opened:
        given = [lambda params: params] * num_steps
        *_, state = small_stores.train(opened, optax.adam(0.1), PARAMS, given)
        opened.wait(state)
        return opened.step


def chunk(path, place, state="mu", leaf=1):
    return chunk_file(StoreDirectory.open(path), place, leaf, state)


def test_verify_says_what_is_damaged(store, run):
    assert "step 2, committed: 841 KiB, clean" in run("verify", store).out
    assert run("checkpoint", "save", store, "good").status == 0
    train(store, 3)
    slot = StoreDirectory.open(store).committed_slot()
    flip(chunk(store, slot))
    chunk(store, slot, "nu", 0).unlink()
    (store / "slots" / slot / "params.w" / "zarr.json").write_text("{}")
    found = run("verify", store)
    assert found.status == 1
    for said in (
        "step 5, committed: 841 KiB, 3 damaged",
        "leaf w, mu, chunk 0 of 1, on CSD",
        "leaf b, nu, chunk 0 of 1, on CSD",
        "params.w/zarr.json: expected what jaxinf writes, found others",
        "checkpoint good: 841 KiB, clean",
        f"jaxinf checkpoint restore {store} NAME",
    ):
        assert said in found.out
    assert run("verify", store, "--checkpoint", "good").status == 0
    document = json.loads(run("verify", store, "--json").out)
    assert [len(step["damages"]) for step in document["steps"]] == [3, 0]


def test_a_damaged_store_goes_on_from_a_checkpoint(store, run):
    assert run("checkpoint", "save", store).out.strip() == f"{store}/checkpoints/2"
    train(store, 3)
    flip(damaged := chunk(store, StoreDirectory.open(store).committed_slot()))
    assert f"\n    {damaged}\n" in run("verify", store).out
    words = ("checkpoint", "restore", store, "2")
    assert "step 5 is committed and in no checkpoint" in run(*words).err
    assert run(*words, "--discard-current").status == 0
    assert run("verify", store).status == 0
    assert train(store, 2) == 4


def test_listing_and_removing(store, run):
    def call(verb, *words):
        return run("checkpoint", verb, store, *words)

    def names():
        return [one["name"] for one in json.loads(call("list", "--json").out)]

    assert "no checkpoints; make one" in call("list").out
    assert call("save").status == call("save", "best").status == 0
    assert "a checkpoint 'best' already" in call("save", "best").err
    assert names() == ["2", "best"]
    assert "committed" in call("list").out
    assert "expected a checkpoint 'none'" in call("remove", "2", "none").err
    assert names() == ["2", "best"]
    assert call("remove", "2", "best").status == 0
    assert list((store / "checkpoints").iterdir()) == names() == []


# --- of several members ---------------------------------------------------------------


@pytest.fixture
def members(store, run):
    """The directories of two members, each with checkpoint `x` of step 2."""

    def make(num_steps=0):
        assert run("checkpoint", "save", store, "x").status == 0
        if num_steps:
            train(store, num_steps)
        copied(store, store.with_name("run"), processes=2, checkpoints=True)
        paths = find_members(store.with_name("run"))
        return store.with_name("run"), [StoreDirectory.open(path) for path in paths]

    return make


def test_a_step_that_one_member_is_still_to_flip_to_is_not_given_up(members, run):
    place, both = members(num_steps=1)
    said = run("inspect", place).out
    assert f"jaxinf checkpoint export {place} DEST" in said
    assert "; what other members hold reads as zeros there" in said
    for one in both:  # killed when all have met, and one has flipped and kept it
        for chunk in one.manifest.held_chunks():
            one.link_chunk("a", "b", chunk)
        record = one.read_record("a").replace(step=4, commit=f"{4:032}-4")
        one.write_record("b", record)
    both[0].flip("b")
    save_checkpoint(both[0], "four")
    said = run("checkpoint", "restore", place, "x").err
    assert "process-00001: step 4 is committed and in no" in said
    assert f"jaxinf checkpoint save {place} NAME" in said
    assert run("checkpoint", "save", place, "kept").status == 0
    assert run("checkpoint", "restore", place, "x").status == 0
    assert {one.read_commit().step for one in both} == {2}


def test_members_without_a_common_step_go_back_to_a_checkpoint(members, run):
    place, (_, one) = members()
    record = one.read_record("a")  # restored from a backup
    one.write_record("a", record.replace(step=9, commit=f"{9:032}-9"))
    words = ("checkpoint", "restore", place, "x")
    advice = f"jaxinf checkpoint restore {place} NAME --discard-current"
    assert run(*words).err.strip().endswith(advice)
    assert run(*words, "--discard-current").status == 0
    assert {n.name: n.step for n in list_checkpoints(*open_members(place))} == {"x": 2}
    assert run("verify", place).status == 0


def test_a_member_s_damaged_record_leaves_other_checkpoints_listed(
    members, run, caplog
):
    place, (_, one) = members()
    assert run("checkpoint", "save", place, "y").status == 0
    (one.path / "checkpoints" / "x" / "commit.json").write_text("{}")
    assert [info.name for info in list_checkpoints(*open_members(place))] == ["y"]
    assert "no checkpoint that can be read" in caplog.text


def test_a_copy_of_a_checkpoint_has_a_run_s_files(store, tmp_path, run):
    assert run("checkpoint", "save", store).status == 0
    (store / "tokenizer").mkdir()
    (store / "tokenizer/vocab.txt").write_text("words")
    assert "make a store of it" in run("inspect", store / "checkpoints/2").err
    assert run("store", "copy", store / "checkpoints/2", tmp_path / "new").status == 0
    assert (tmp_path / "new/tokenizer/vocab.txt").read_text() == "words"
    with jaxinf.open_store(tmp_path / "new") as opened:
        assert opened.step == 2


# --- records in pieces ----------------------------------------------------------------


def spoil(file):
    data = bytearray(file.read_bytes())
    data[40] ^= 1
    file.unlink()  # other names of the file keep its bytes
    file.write_bytes(data)


@pytest.mark.parametrize("by", ["command", "program"])
def test_a_checkpoint_takes_the_place_of_a_step_whose_record_is_damaged(
    golden_store, run, by
):
    store = golden_store()
    spoil(store / "current/commit.json")
    with pytest.raises(jaxinf.StoreFormatError, match="the record of a committed step"):
        jaxinf.open_store(store)
    if by == "command":
        refused = run("checkpoint", "restore", store, "2")
        assert refused.status == 1
        line = f"jaxinf checkpoint restore {store} 2 --discard-current"
        assert refused.err.strip().endswith(line)
        assert run(*line.split()[1:]).status == 0
    with jaxinf.open_store(store, restore="2" if by == "program" else None) as opened:
        assert opened.step == 2
    assert run("verify", store).status == 0


@pytest.mark.parametrize("damage", ["flipped", "gone", "no manifest"])
def test_a_damaged_checkpoint_is_removed_and_not_restored(golden_store, run, damage):
    store = golden_store()
    checkpoint = store / "checkpoints/2"
    if damage == "flipped":
        spoil(checkpoint / "commit.json")
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


def test_a_record_that_lacks_checksums_of_an_array_is_reported(golden_store, run):
    store = golden_store()
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
