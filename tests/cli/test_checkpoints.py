"""``jaxinf verify`` and ``jaxinf checkpoint``."""

import json

import jax.numpy as jnp
import optax
import pytest
import safetensors.numpy
import small_stores
from copies import copied
from raw_stores import flip_bit as flip

import jaxinf
from jaxinf.cli import main
from jaxinf.store import (
    StoreDirectory,
    find_members,
    list_whole,
    save_checkpoint,
)

PARAMS = {"w": jnp.ones((70, 1025)), "b": jnp.ones(3)}


@pytest.fixture
def store(tmp_path):
    """A closed store at step 2."""
    path = tmp_path / "store"
    roots = [tmp_path / "csd0", tmp_path / "csd1"]
    for root in roots:
        root.mkdir()
    train(path, 2, csds=roots)
    return path


def train(path, num_steps, **options):
    with jaxinf.open_store(path, **options) as opened:
        given = [lambda params: params] * num_steps
        *_, state = small_stores.train(opened, optax.adam(0.1), PARAMS, given)
        opened.wait(state)
        return opened.step


def chunk(path, place, state="mu", leaf=1):
    return StoreDirectory.open(path).chunk_file(place, leaf, 0, state)


def test_verify_says_what_is_damaged(store, capsys):
    assert main(["verify", str(store)]) == 0
    assert "step 2, committed: 841 KiB, clean" in capsys.readouterr().out
    assert main(["checkpoint", "save", str(store), "good"]) == 0
    train(store, 3)
    slot = StoreDirectory.open(store).committed_slot()
    flip(chunk(store, slot))
    chunk(store, slot, "nu", 0).unlink()
    (store / "slots" / slot / "params.w" / "zarr.json").write_text("{}")
    capsys.readouterr()
    assert main(["verify", str(store)]) == 1
    out = capsys.readouterr().out
    assert "step 5, committed: 841 KiB, 3 damaged" in out
    assert "leaf w, mu, chunk 0 of 1, on CSD" in out
    assert "leaf b, nu, chunk 0 of 1, on CSD" in out
    assert "params.w/zarr.json: expected what jaxinf writes, found others" in out
    assert "checkpoint good: 841 KiB, clean" in out
    assert f"jaxinf checkpoint restore {store} NAME" in out
    assert main(["verify", str(store), "--checkpoint", "good"]) == 0
    capsys.readouterr()
    assert main(["verify", str(store), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert [len(step["damages"]) for step in document["steps"]] == [3, 0]


def test_a_damaged_store_goes_on_from_a_checkpoint(store, capsys):
    assert main(["checkpoint", "save", str(store)]) == 0
    assert capsys.readouterr().out.strip() == str(store / "checkpoints" / "2")
    train(store, 3)
    flip(chunk(store, StoreDirectory.open(store).committed_slot()))
    assert main(["checkpoint", "restore", str(store), "2"]) == 1
    assert "step 5 is committed and in no checkpoint" in capsys.readouterr().err
    words = ["checkpoint", "restore", str(store), "2", "--discard-current"]
    assert main(words) == 0
    assert main(["verify", str(store)]) == 0
    assert train(store, 2) == 4


def test_listing_and_removing(store, capsys):
    def call(verb, *words):
        return main(["checkpoint", verb, str(store), *words])

    assert call("list") == 0
    assert "no checkpoints; make one" in capsys.readouterr().out
    assert call("save") == call("save", "best") == 0
    assert call("save", "best") == 1
    assert "a checkpoint 'best' already" in capsys.readouterr().err
    assert call("list", "--json") == 0
    names = [c["name"] for c in json.loads(capsys.readouterr().out)]
    assert names == ["2", "best"]
    assert call("list") == 0
    assert "committed" in capsys.readouterr().out
    assert call("remove", "2", "none") == 1
    assert "expected a checkpoint 'none'" in capsys.readouterr().err
    assert sorted(p.name for p in (store / "checkpoints").iterdir()) == ["2", "best"]
    assert call("remove", "2", "best") == 0
    assert list((store / "checkpoints").iterdir()) == []


def test_a_step_that_one_member_is_still_to_flip_to_is_not_given_up(store, capsys):
    assert main(["checkpoint", "save", str(store), "x"]) == 0
    train(store, 1)
    run = store.with_name("run")
    copied(store, run, processes=2, checkpoints=True)
    members = [StoreDirectory.open(path) for path in find_members(run)]
    for one in members:  # killed when all have met, and one has flipped and kept it
        for leaf, _, state, number in one.manifest.held():
            one.link_chunk("a", "b", leaf, number, state.name)
        record = one.read_record("a").replace(step=4, commit=f"{4:032}-4")
        one.write_record("b", record)
    members[0].flip("b")
    save_checkpoint(members[0], "four")
    assert main(["checkpoint", "restore", str(run), "x"]) == 1
    said = capsys.readouterr().err
    assert "process-00001: step 4 is committed and in no" in said
    assert f"jaxinf checkpoint save {run} NAME" in said
    assert main(["checkpoint", "save", str(run), "kept"]) == 0
    assert main(["checkpoint", "restore", str(run), "x"]) == 0
    assert {one.read_commit().step for one in members} == {2}


def test_members_without_a_common_step_go_back_to_a_checkpoint(store, capsys):
    assert main(["checkpoint", "save", str(store), "x"]) == 0
    run = store.with_name("run")
    copied(store, run, processes=2, checkpoints=True)
    one = StoreDirectory.open(find_members(run)[1])  # restored from a backup
    record = one.read_record("a")
    one.write_record("a", record.replace(step=9, commit=f"{9:032}-9"))
    words = ["checkpoint", "restore", str(run), "x"]
    assert main(words) == 1
    advice = f"jaxinf {' '.join(words[:3])} NAME --discard-current"
    assert capsys.readouterr().err.strip().endswith(advice)
    assert main([*words, "--discard-current"]) == 0
    assert {n.name: n.step for n in list_whole(run)} == {"x": 2}
    assert main(["verify", str(run)]) == 0


def test_a_member_s_damaged_record_leaves_other_checkpoints_listed(store, caplog):
    run = store.with_name("run")
    copied(store, run, processes=2, checkpoints=True)
    for name in ("x", "y"):
        assert main(["checkpoint", "save", str(run), name]) == 0
    (find_members(run)[1] / "checkpoints" / "x" / "commit.json").write_text("{}")
    names = [info.name for info in list_whole(run)]
    assert "y" in names
    assert "x" not in names
    assert "no checkpoint that can be read" in caplog.text


def test_an_export_of_params(store, tmp_path, capsys):
    words = ["checkpoint", "export", str(store)]
    for url in (f"file://{tmp_path}/out", "s3://bucket/out"):
        assert main([*words, url, "--format", "safetensors"]) == 2
        assert "expected a directory, found a URL" in capsys.readouterr().err
    assert main([*words, str(tmp_path / "out"), "--average"]) == 2
    assert "--average goes with --format" in capsys.readouterr().err
    assert main([*words, str(tmp_path / "out"), "--format", "safetensors"]) == 0
    found = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
    with jaxinf.open_store(store) as opened:
        expected = opened.params(like=PARAMS)
    assert all((found[name] == expected[name]).all() for name in PARAMS)


def test_a_copy_of_a_checkpoint_has_a_run_s_files(store, tmp_path):
    assert main(["checkpoint", "save", str(store)]) == 0
    (store / "tokenizer").mkdir()
    (store / "tokenizer/vocab.txt").write_text("words")
    kept, new = store / "checkpoints" / "2", tmp_path / "new"
    assert main(["store", "copy", str(kept), str(new)]) == 0
    assert (new / "tokenizer/vocab.txt").read_text() == "words"
    with jaxinf.open_store(new) as opened:
        assert opened.step == 2
