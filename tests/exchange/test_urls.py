"""Exports to a URL: interrupted, torn, half removed, and imported again to the bit."""

import json
import os
import shutil
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest
from copies import chunks_of, copied
from families import family
from raw_stores import edit, read_array

from jaxinf.cli.commands import main
from jaxinf.errors import (
    ExchangeError,
    StoreCorruptError,
    StoreFormatError,
    StoreMismatchError,
)
from jaxinf.exchange import ExportOptions, export_url, url_export
from jaxinf.store import (
    CommitRecord,
    StoreDirectory,
    save_checkpoint,
    seal,
    verify_step,
)
from jaxinf.transfer import crc32c

KILLED = Path(__file__).parents[1] / "programs/killed_export.py"
# Written anew by each call, with the time.
TIMED = ("_CHECKPOINT_METADATA", "export.json")


def files_of(folder):
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file() and file.name not in TIMED
    }


@pytest.mark.parametrize("num_csds", family([0, 2], short=[2]))
def test_round_trip(make_step, place, num_csds):
    step, arrays = make_step(num_csds=num_csds)
    url, calls = f"file://{place}/out/6", []
    options = ExportOptions(1 << 20, progress=lambda *call: calls.append(call))
    assert export_url(step, url, options=options).num_kept == 0
    assert calls[-1][0] == calls[-1][1] > 0
    folder = place / "out/6"
    tree = ocp.PyTreeCheckpointer().restore(folder)
    for leaf in step.manifest.leaves:
        for state in leaf.states:
            values = read_array(folder, leaf, state.name)
            assert values.tobytes() == arrays[leaf.array_name(state.name)].tobytes()
    np.testing.assert_array_equal(
        np.asarray(tree["params"]["scale"]), arrays["params.scale"]
    )
    (place / "root").mkdir()
    made, old = place / "made", step.path.parent
    copied(url, made, roots=[place / "root"], memory_bytes=1 << 20)
    assert chunks_of(made) == chunks_of(old)
    assert verify_step(StoreDirectory.open(made), made / "current") == []
    found, expected = (
        CommitRecord.read(p / "current/commit.json") for p in (made, old)
    )
    assert found.payload == expected.payload
    assert found.scalar_state == expected.scalar_state
    again = export_url(step, url, options=ExportOptions(1 << 20))
    assert again.num_kept == len(chunks_of(old))


MANY = {("w",): ((24, 4096), (1, 1)), ("bias",): ((129,), (1,)), ("scale",): ((), ())}


@pytest.mark.long
def test_interrupted_at_random_bytes_it_goes_on(make_step, place, run_python):
    step, _ = make_step(num_csds=2, leaves=MANY)
    export_url(step, f"file://{place}/whole", options=ExportOptions(1 << 20))
    run_python(KILLED, step.path.parent, f"file://{place}/parts", 20)
    expected, found = files_of(place / "whole"), files_of(place / "parts")
    assert found == expected
    copied(f"file://{place}/parts", place / "made")
    assert chunks_of(place / "made") == chunks_of(step.path.parent)
    assert not (place / "never").exists()


def replace_chunk(folder, name="params.scale/c"):
    """Changes a bit of a chunk, and says so in the export's manifest."""
    raw = bytearray((folder / name).read_bytes())
    raw[0] ^= 1
    (folder / name).write_bytes(raw)
    listed = [len(raw), f"{crc32c(np.frombuffer(raw, np.uint8)):08x}"]
    edit(folder / "export.json", lambda d: d["objects"].update({name: listed}))


def written(name, raw):
    return lambda folder: (folder / name).write_bytes(raw)


def cut(name, length):
    return lambda folder: os.truncate(folder / name, length)


def gone(name):
    return lambda folder: (folder / name).unlink()


# Those of a chunk: another one than the record's, none, a torn one, a bit.
DAMAGES = {
    r"params\.scale/c: leaf scale, params, .* as written, found": replace_chunk,
    r"none of params\.scale/c": gone("params.scale/c"),
    r"nu\.h0\.attn\.bias/c/0: expected \d+ bytes": cut("nu.h0.attn.bias/c/0", 100),
    r"mu\.scale/c: expected 2 bytes": written("mu.scale/c", b"\x01\x7f"),
    "which completes an export, found none; check the": gone("export.json"),
    "if an export was interrupted, export to this": shutil.rmtree,
    r"export\.json: expected the manifest of an .*, found none": cut(
        "export.json", 300
    ),
    "use a newer jaxinf": lambda folder: edit(folder / "export.json", format_version=2),
    r"_METADATA: expected \d+ bytes": written("_METADATA", b"garbage"),
    r"commit\.json: expected": written("commit.json", b"{}"),
}


FEW = {("h0", "attn", "bias"): ((129,), (1,)), ("scale",): ((), ())}


@pytest.mark.parametrize("message", DAMAGES)
def test_damage_is_found_at_import_by_name(make_step, place, message):
    step, _ = make_step(leaves=FEW)
    url = f"file://{place}/out"
    export_url(step, url)
    DAMAGES[message](place / "out")
    refusals = ExchangeError, StoreFormatError, StoreCorruptError
    with pytest.raises(refusals, match=message):
        copied(url, place / "made")
    assert not (place / "made/jaxinf.json").exists()


def test_a_record_of_other_arrays_is_refused_before_it_begins(make_step, place):
    step, _ = make_step(leaves={("a",): ((5,), (1,)), ("b",): ((1 << 16,), (1,))})
    store = step.path.parent
    save_checkpoint(StoreDirectory.open(store), "kept")
    kept = store / "checkpoints" / "kept"
    manifest = (kept / "jaxinf.json").read_text().replace('"b"', '"c"')
    (kept / "jaxinf.json").write_bytes(seal(json.loads(manifest)))
    with pytest.raises(StoreMismatchError, match="holds other arrays than the store"):
        copied(kept, place / "again")
    shutil.move(kept, place / "alone")
    with pytest.raises(StoreFormatError, match="are not of one store"):
        copied(place / "alone", place / "again")
    assert not (place / "again").exists()


def test_what_an_export_lists_beside_is_not_held_in_memory(make_step, place):
    step, _ = make_step(leaves=FEW)
    export_url(step, f"file://{place}/out")
    more, raw = {}, bytes(1 << 20)
    stamp = [len(raw), f"{crc32c(np.frombuffer(raw, np.uint8)):08x}"]
    for number in range(32):
        (place / f"out/more{number}").write_bytes(raw)
        more[f"more{number}"] = stamp
    edit(place / "out/export.json", lambda d: d["objects"].update(more))
    tracemalloc.start()
    try:
        source = url_export.export_source(f"file://{place}/out")
        held_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held_bytes < 4 << 20, source.where


def test_places_that_are_refused_before_anything_is_written(make_step, place):
    step, _ = make_step(leaves=FEW)

    def refused(url, message, **options):
        with pytest.raises((ExchangeError, ValueError), match=message):
            export_url(options.pop("step", step), url, **options)

    for url, message in (
        ("ftp://host/a", "expected a URL of file://, gs://, s3://, found ftp://"),
        ("s3://key:secret@bucket/a", "^s3://…: expected s3://BUCKET/PATH alone"),
        ("s3://bucket/a?key=secret", "^s3://…: expected s3://BUCKET/PATH alone"),
        ("gs://b/a", "gs://b/a: not a URL"),
        ("file:///", "found the root"),
        ("file:///dev/null/a", "cannot "),
    ):
        refused(url, message)
    small = ExportOptions(1 << 10)
    refused(f"file://{place}/small", "expected at least", options=small)
    assert not (place / "small").exists()
    (place / "other").mkdir()
    (place / "other/file").write_text("a user's")
    refused(f"file://{place}/other", "found other objects, such as file")
    refused(f"file://{step.path.resolve()}", "found other objects")  # a store's own
    export_url(step, f"file://{place}/out")
    later = replace(step, commit=step.commit.replace(step=9))
    refused(f"file://{place}/out", "found step 7 of store", step=later)
    (place / "out/export.json").unlink()
    refused(f"file://{place}/out", "exporting step 9", step=later)


def test_commands(make_step, place, capsys):
    step, _ = make_step(num_csds=2, leaves=FEW)
    store = step.path.parent
    url = f"file://{place}/out"
    words = ["checkpoint", "export", str(store), url]
    assert main([*words, "--format", "safetensors"]) == 2
    assert "takes --format zarr" in capsys.readouterr().err
    (store / "stream").mkdir()
    plan = {"version": 1, "fingerprint": "f", "cuts": [0]}
    (store / "stream/0a.json").write_bytes(seal(plan))
    kept = "tokenizer/sentencepiece.bpe.model"
    (store / "tokenizer").mkdir()
    (store / kept).write_text("of a tokenizer")
    (store / "tokenizer/..hidden").write_text("no file of a run")
    assert main([*words, "--memory", "2MiB"]) == 0
    assert f"{url}: step 7, " in capsys.readouterr().out
    (place / "csd").mkdir()
    words = ["store", "copy", f"{place}/out", str(place / "made")]
    words += ["--csd-root", str(place / "csd")]
    assert main(words) == 0
    assert main(words) == 1
    assert "expected nothing there" in capsys.readouterr().err
    assert (place / "made/stream/0a.json").read_bytes() == seal(plan)
    assert (place / "made" / kept).read_text() == "of a tokenizer"
    assert os.listdir(place / "made/tokenizer") == [kept.partition("/")[2]]
    assert main(["verify", str(place / "made")]) == 0
