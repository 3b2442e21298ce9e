"""Other numbers of processes: chunks change owners, and every bit stays."""

import contextlib
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import killed_division
import numpy as np
import optax
import pytest
import small_stores
from families import family
from killed_division import contents, damages, grids_of, leftovers, make

import jaxinf
from jaxinf.cli.commands import main
from jaxinf.errors import (
    ProcessError,
    StoreCorruptError,
    StoreFormatError,
    StoreLockedError,
    StoreMismatchError,
    StoreSpaceError,
)
from jaxinf.store import (
    Shards,
    StoreDirectory,
    StoreLock,
    find_members,
    in_line,
    list_whole,
    rebalance,
    redivide,
    save_checkpoint,
    save_whole,
)


@pytest.mark.parametrize(
    ("num_csds", "counts"),
    family([(0, (2, 1)), (0, (4, 2, 3, 1)), (2, (4, 2, 3, 1))], short=[(0, (2, 1))]),
)
def test_every_bit_stays(place, num_csds, counts):
    path = make(place, num_csds)
    expected = {name: contents(path, name) for name in (None, "kept")}
    roots = [f"{place}/csd{number}/{{process}}" for number in range(num_csds)]
    calls = []
    for count in counts:
        done = redivide(path, count, roots, lambda *call: calls.append(call))
        assert calls[-1][0] == calls[-1][1] > 0
        assert done.num_chunks > 0
        assert done.idle == ()
        assert set(done.regridded) == ({"cut", "across"} if count == 3 else set())
        parts = find_members(path) or [path]
        assert len(parts) == count
        assert not leftovers(path)
        assert not damages(path)
        for name, arrays in expected.items():
            assert contents(path, name) == arrays, count
        held = [StoreDirectory.open(part).manifest.num_held_params for part in parts]
        assert max(held) - min(held) <= (4096 if count != 3 else 40_000)
        if count == 4:
            assert [info.name for info in list_whole(path)] == ["kept"]
            save_whole(path, "whole")
            expected["whole"] = contents(path, "whole")
        if count in (2, 3) and counts[0] == 4:
            assert (path / "checkpoints/whole/_METADATA").is_file()
    for root in place.glob("csd*/[123]"):
        assert list(root.iterdir()) == []
    assert redivide(path, 1).num_chunks == 0


def test_few_chunks_get_another_owner_and_no_byte_is_copied(place, monkeypatch):
    path = make(place)
    monkeypatch.setattr("jaxinf.store.rebalancing._copy", None)
    redivide(path, 4)
    owners = StoreDirectory.open(path / "process-00000").manifest.leaves
    done = redivide(path, 3)
    now = StoreDirectory.open(path / "process-00000").manifest.leaves
    replicated = [
        (a, b)
        for old, new in zip(owners, now, strict=True)
        if max(old.shard_counts, default=1) == 1
        for a, b in zip(old.owners, new.owners, strict=True)
    ]
    assert all(a == b for a, b in replicated if a < 3)
    assert done.num_chunks >= sum(a != b for a, b in replicated)


def test_a_checkpoint_that_is_not_of_all_is_named(place, capsys):
    path = make(place)
    redivide(path, 2)
    save_checkpoint(StoreDirectory.open(path / "process-00001"), "half")
    assert main(["store", "rebalance", str(path), "--processes", "1"]) == 0
    assert "dropped, as not all members had them" in capsys.readouterr().out
    assert [file.name for file in (path / "checkpoints").iterdir()] == ["kept"]


def raw(path):
    """The bytes of every chunk of the committed step, codes and scales as they are."""
    found = {}
    for part in find_members(path) or [path]:
        directory = StoreDirectory.open(part)
        slot = directory.committed_slot()
        for leaf, record, _ in directory.leaves():
            for state in record.states:
                for chunk in record.held:
                    file = directory.chunk_file(slot, leaf, chunk, state.name)
                    name = record.array_name(state.name)
                    found[name, chunk] = file.read_bytes()
    return found


@pytest.mark.parametrize("average", ["fp32", "bf16"])
def test_an_average_and_codes_stay(place, average):
    roots = [place / f"csd{number}" for number in range(3)]
    for root in roots:
        root.mkdir()
    path = place / "run"
    options = {"csds": roots[:2], "chunk_elements": 4096, "state": "int8"}
    with small_stores.open_store(path, **options) as store:
        tx = jaxinf.smart_update(
            optax.adam(1e-3), store, average=jaxinf.ema(0.99, form=average)
        )
        params = {"w": jnp.ones((10, 4096)), "b": jnp.zeros(70)}
        state = tx.init(params)
        for _ in range(2):
            updates, state = tx.update(jax.tree.map(jnp.cos, params), state, params)
            params = optax.apply_updates(params, updates)
    states = StoreDirectory.open(path).manifest.leaves[1].states
    assert {state.codec for state in states} >= {"int8", "scale"}
    assert [state.name for state in states if "average" in state.name]
    expected = raw(path)
    rebalance(path, roots)
    assert raw(path) == expected
    for count in (3, 2, 1):
        given = [f"{root}" for root in roots[:2]] if count == 3 else ()
        redivide(path, count, given)
        assert raw(path) == expected
        assert not damages(path)


@contextlib.contextmanager
def flipped_bit(file):
    """Has one bit of a file other than it was."""

    def flip():
        with file.open("r+b") as stream:
            byte = stream.read(1)[0]
            stream.seek(0)
            stream.write(bytes([byte ^ 1]))

    flip()
    yield
    flip()


@pytest.mark.long
def test_codes_go_with_their_scales_or_not_at_all(place):
    path = place / "run"
    with small_stores.open_store(path, chunk_elements=4096, state="int8") as store:
        tx = jaxinf.smart_update(optax.adam(1e-1), store)
        draw = np.random.default_rng(0).standard_normal
        params = {"w": jnp.asarray(draw((6, 8192)), jnp.float32)}
        state = tx.init(params)
        tx.update(jax.tree.map(jnp.cos, params), state, params)
    expected, before = contents(path), raw(path)
    [[_, width]] = grids_of(path)
    assert 1024 % width
    with pytest.raises(StoreMismatchError, match=r"leaf w: .* whole blocks of 256"):
        redivide(path, 1, shards_of=lambda _: Shards((1, 64)))
    assert raw(path) == before
    assert not leftovers(path)
    assert redivide(path, 2, shards_of=lambda _: Shards((1, 8))).regridded == ("w",)
    assert contents(path) == expected
    assert not damages(path)
    [[_, width]] = grids_of(path)
    assert 1024 % width == 0


def test_too_little_room_or_damage_leaves_what_is_there(place, monkeypatch):
    path = make(place)
    expected, grids = contents(path), grids_of(path)
    full = os.statvfs_result((4096, 4096, 100, 0, 0, 10, 10, 10, 0, 255))
    with monkeypatch.context() as patched:
        patched.setattr("os.statvfs", lambda _: full)
        with pytest.raises(StoreSpaceError, match=r"to come need 294,912 bytes"):
            redivide(path, 1, shards_of=partial(in_line, count=1, num_devices=3))
    assert not leftovers(path)
    directory = StoreDirectory.open(path)
    number = [leaf.name for leaf in directory.manifest.leaves].index("cut")
    file = directory.chunk_file("b", number, 2, "params")
    with flipped_bit(file), pytest.raises(StoreCorruptError, match="leaf cut, params"):
        redivide(path, 1, shards_of=partial(in_line, count=1, num_devices=3))
    assert not leftovers(path)
    assert (contents(path), grids_of(path)) == (expected, grids)


def test_a_grid_for_devices_of_one_process(place, capsys):
    path = make(place)
    expected = {name: contents(path, name) for name in (None, "kept")}
    words = ["store", "rebalance", str(path), "--processes", "1", "--devices"]
    assert main([*words, "3"]) == 0
    assert "with a new grid: cut, across" in capsys.readouterr().out
    assert {name: contents(path, name) for name in expected} == expected
    grids = grids_of(path)
    assert main([*words, "3"]) == 0
    assert "with a new grid" not in capsys.readouterr().out
    assert grids_of(path) == grids
    words_of_restore = ["checkpoint", "restore", str(path), "kept"]
    assert main([*words_of_restore, "--discard-current"]) == 0
    assert contents(path) == expected["kept"]
    assert main([*words[:-2], "2", "--devices", "3"]) == 2
    assert "expected as many for each" in capsys.readouterr().err
    assert main(["store", "rebalance", str(path), "--devices", "3"]) == 2


@pytest.mark.long
def test_more_processes_than_chunks(place, capsys):
    path = make(place)
    assert main(["store", "rebalance", str(path), "--processes", "40"]) == 0
    assert "nothing is owned by process" in capsys.readouterr().out
    assert main(["verify", str(path)]) == 0
    assert main(["store", "rebalance", str(path), "--processes", "1"]) == 0
    assert main(["verify", str(path)]) == 0


def test_refusals(place):
    path = make(place)
    with pytest.raises(ValueError, match="processes=0: expected from 1"):
        redivide(path, 0)
    with pytest.raises(ValueError, match="CSD root /none/1: expected a directory"):
        redivide(path, 2, ["/none/1"])
    with pytest.raises(StoreFormatError, match="found none"):
        redivide(place / "none", 2)
    lock = StoreLock(path)
    with pytest.raises(StoreLockedError):
        redivide(path, 2)
    lock.release()
    redivide(path, 2)
    with pytest.raises(StoreFormatError, match=r"store rebalance .* --processes 1"):
        jaxinf.open_store(path)
    shutil.move(path / "process-00001", place / "away")
    with pytest.raises(ProcessError, match="found none of process 1"):
        redivide(path, 1)
    shutil.move(place / "away", path / "process-00001")
    with jaxinf.open_store(path, processes="rebalance") as store:
        assert store.step == 1
    (path / "divide.json").write_text("{}")
    for action in (jaxinf.open_store, partial(redivide, count=1)):
        with pytest.raises(StoreFormatError, match=r"divide\.json|being divided"):
            action(path)


def test_members_at_different_steps_go_to_the_common_one(place):
    path = make(place)
    redivide(path, 2)
    expected = contents(path)
    parts = [StoreDirectory.open(part) for part in find_members(path)]
    for part in parts:  # as if a commit had met, and only one had flipped
        shutil.rmtree(part.step_path("b"))
        shutil.copytree(part.step_path("a"), part.step_path("b"))
        record = part.read_record("b")
        part.write_record("b", replace(record, step=2, commit=f"{'0' * 32}-7"))
    parts[1].flip("b")
    redivide(path, 3)
    for part in find_members(path):
        assert StoreDirectory.open(part).read_commit().step == 2
    assert contents(path) == expected
    assert not damages(path)


@pytest.mark.long
@pytest.mark.parametrize("num_csds", [0, 2])
def test_killed_at_random_calls(place, num_csds):
    path = make(place, num_csds)
    words = [sys.executable, killed_division.__file__, path, "40"]
    done = subprocess.run(
        list(map(str, words)), check=True, capture_output=True, text=True
    )
    print(done.stdout)
    assert "'old'" in done.stdout
    assert "'new" in done.stdout
