"""Stock safetensors reads exports; damaged files are refused; memory has its limit."""

import json
import struct

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from jaxinf.errors import ExchangeError, StoreIOError, StoreSpaceError
from jaxinf.exchange import (
    ExportOptions,
    export_safetensors,
    safetensors_files,
    sources,
)
from jaxinf.exchange.safetensors_files import read_safetensors


def params_of(arrays):
    """The params of a step, named as leaves."""
    return {
        name.removeprefix("params."): value
        for name, value in arrays.items()
        if name.startswith("params.")
    }


@pytest.mark.parametrize("num_csds", [0, 3])
def test_stock_safetensors_reads_it(make_step, place, check_bits, num_csds):
    step, arrays = make_step(num_csds=num_csds)
    calls = []
    options = ExportOptions(1 << 20, progress=lambda *call: calls.append(call))
    export_safetensors(step, place / "export", options)
    found = safetensors.numpy.load_file(place / "export/model.safetensors")
    check_bits(found, params_of(arrays))
    total_bytes = sum(a.nbytes for a in params_of(arrays).values())
    assert calls[-1] == (total_bytes, total_bytes)
    assert calls == sorted(calls)
    with pytest.raises(FileExistsError, match=r"export: expected a name that is free"):
        export_safetensors(step, place / "export")
    assert [p.name for p in (place / "export").iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize("how", ["no space", "short"])
def test_a_failed_export_leaves_nothing(make_step, place, monkeypatch, how):
    step, _ = make_step()
    error, message = StoreSpaceError, r"takes up to .* free some"
    if how == "no space":
        monkeypatch.setattr(safetensors_files, "_SLACK_BYTES", 1 << 60)
    else:
        error, message = StoreIOError, r"params.h0.attn.bias/c/0: truncated"
        (step.path / "params.h0.attn.bias/c/0").resolve().write_bytes(b"short")
    with pytest.raises(error, match=message):
        export_safetensors(step, place / "export")
    assert not list(place.glob("*export*"))


def test_arrays_are_those_of_stock_safetensors(tmp_path, check_bits, monkeypatch):
    monkeypatch.setattr(sources, "_PIECE_BYTES", 8)
    tensors = {
        "b": np.arange(6, dtype=np.float32).reshape(2, 3),
        "empty/a": np.zeros((0, 4), np.int32),
        "c": np.asarray(3.0, np.float16),
        "d": np.arange(7, dtype=ml_dtypes.bfloat16),
        "e": np.arange(3) > 1,
    }
    safetensors.numpy.save_file(tensors, tmp_path / "f", {"key": "text"})
    found = {
        name: sources.TensorLeaf(array, (), array.dtype).read()
        for name, array in read_safetensors(tmp_path / "f").items()
    }
    check_bits(found, {n.replace("/", "."): t for n, t in tensors.items()})


def damaged(document, data=b"", length=None):
    text = document if isinstance(document, bytes) else json.dumps(document).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


TENSOR = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        damaged({}, length=1 << 62),
        damaged(b"{"),
        damaged({"t": TENSOR}),
        damaged({"t": TENSOR}, bytes(12)),
        damaged({"t": {**TENSOR, "dtype": "F3"}}, bytes(8)),
        damaged({"t": {**TENSOR, "dtype": "F8_E4M3", "shape": [8]}}, bytes(8)),
        damaged({"t": {**TENSOR, "shape": [3]}}, bytes(8)),
        damaged({"t": TENSOR, "u": TENSOR}, bytes(8)),
        damaged({"t": {**TENSOR, "shape": [-2]}}, bytes(8)),
        damaged([1]),
        damaged({"t": 3}),
    ],
)
def test_damage_is_refused(tmp_path, content):
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(ExchangeError, match="f: expected a safetensors file, found no"):
        read_safetensors(tmp_path / "f")


PROGRAM = """
import resource, sys
from pathlib import Path
import jaxinf.exchange as exchange
from jaxinf.store import CopyLayout, StoreDirectory, copy_step, read_step
way, store, export, again = sys.argv[1], *map(Path, sys.argv[2:])
url = f"file://{export}"
step = read_step(StoreDirectory.open(store), store / "current")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
if way == "copy_step":
    copy_step(exchange.export_source(url, 16 << 20), again, CopyLayout())
elif way == "export_url":
    exchange.export_url(step, url, options=exchange.ExportOptions(16 << 20))
else:
    exchange.export_safetensors(step, export, exchange.ExportOptions(8 << 20))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("shape", "chunk_elements", "ways"),
    [
        ((1600, 9999), 1 << 26, ["export_safetensors"]),  # 61 MiB, one chunk
        ((1 << 14, 1 << 10), 1 << 18, ["export_url", "copy_step"]),  # 240 MiB in all
    ],
)
def test_memory_does_not_grow_with_a_leaf(
    make_step, run_python, tmp_path, shape, chunk_elements, ways
):
    leaves = {("wide",): (shape, (1, 1))}
    step, _ = make_step(leaves=leaves, chunk_elements=chunk_elements)
    for way in ways:
        places = [step.path.parent, tmp_path / "export", tmp_path / "again"]
        done = run_python(PROGRAM, way, *places)
        assert int(done.stdout) << 10 < 40 << 20, way
