"""``jaxinf verify`` and ``jaxinf checkpoint``."""

import json
import shutil
import subprocess

import jax.numpy as jnp
import optax
import pytest
from copies import copied

import jaxinf
from jaxinf.cli import main, verification
from jaxinf.store import (
    StoreDirectory,
    find_members,
    list_whole,
    remove_checkpoint,
    save_checkpoint,
    verify_step,
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


def train(path, num_steps, params=PARAMS, **options):
    with jaxinf.open_store(path, **options) as opened:
        tx = jaxinf.smart_update(optax.adam(0.1), opened)
        params = opened.params(params) if opened.exists else params
        state = tx.init(params)
        for _ in range(num_steps):
            updates, state = tx.update(params, state, params)
            params = optax.apply_updates(params, updates)
        return opened.step


def chunk(path, place, state="mu", leaf=1):
    return StoreDirectory.open(path).chunk_file(place, leaf, 0, state)


def flip(file):
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(data)


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


def test_verify_beside_a_run_that_removes_a_checkpoint(store, capsys, monkeypatch):
    assert main(["checkpoint", "save", str(store), "old"]) == 0

    def verify_late(directory, place, progress, **options):
        if place.name == "old":
            remove_checkpoint(directory, "old")
        return verify_step(directory, place, progress, **options)

    monkeypatch.setattr(verification, "verify_step", verify_late)
    assert main(["verify", str(store)]) == 0
    assert "old" not in capsys.readouterr().out.split("clean", 1)[1]


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
    assert "own bytes" in capsys.readouterr().out
    assert call("remove", "2", "none") == 1
    assert "expected a checkpoint 'none'" in capsys.readouterr().err
    assert sorted(p.name for p in (store / "checkpoints").iterdir()) == ["2", "best"]
    assert call("remove", "2", "best") == 0
    assert list((store / "checkpoints").iterdir()) == []


def test_restoring_needs_the_lock(store, capsys):
    main(["checkpoint", "save", str(store)])
    with jaxinf.open_store(store):
        assert main(["checkpoint", "restore", str(store), "2"]) == 1
        assert "this very process" in capsys.readouterr().err
        assert main(["checkpoint", "save", str(store), "beside"]) == 0


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


@pytest.mark.parametrize("num_csds", [0, 1])
def test_a_checkpoint_of_other_arrays_becomes_a_store(tmp_path, run, num_csds):
    """By the commands that its refusals name."""
    checkpoints = []
    for name, leaf in ("one", "w"), ("two", "v"):
        roots = [tmp_path / f"drive-{name}{number}" for number in range(num_csds)]
        for root in roots:
            root.mkdir()
        train(tmp_path / name, 1, params={leaf: jnp.ones(3)}, csds=roots)
        assert run("checkpoint", "save", tmp_path / name, name).status == 0
        data = [*tmp_path.glob(f"drive-{name}0/*/checkpoints"), None][0]
        checkpoints.append((tmp_path / name / "checkpoints", data))
    (_, data), (other, other_data) = checkpoints
    shutil.copytree(other, tmp_path / "one/checkpoints", True, dirs_exist_ok=True)
    if data is not None:
        shutil.copytree(other_data, data, dirs_exist_ok=True)
    place = tmp_path / "one/checkpoints/two"
    for words in (
        ["checkpoint", "restore", tmp_path / "one", "two", "--discard-current"],
        ["store", "copy", place, tmp_path / "new"],
    ):
        said = run(*words).err
        assert f'cp -rL "{place}" COPY, then jaxinf store copy COPY NEW' in said
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-rL", place, copy], check=True)
    assert run("store", "copy", copy, tmp_path / "new").status == 0
    assert run("verify", tmp_path / "new").status == 0
