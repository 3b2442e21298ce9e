"""Stock safetensors reads exports; damaged files are refused."""

import json
import struct

import ml_dtypes
import numpy as np
import pytest
import safetensors
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


def read_all(directory):
    found = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safetensors.safe_open(path, "numpy") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


@pytest.mark.parametrize("num_csds", [0, 3])
def test_stock_safetensors_reads_it(make_step, place, check_bits, num_csds):
    step, arrays = make_step(num_csds=num_csds)
    calls = []
    options = ExportOptions(1 << 20, progress=lambda *call: calls.append(call))
    export_safetensors(step, place / "export", options)
    check_bits(read_all(place / "export"), params_of(arrays))
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


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_values_are_rounded_to_the_params_dtype(tmp_path, dtype):
    wide = np.random.default_rng(0).standard_normal(99)

    def leaf(values):
        safetensors.numpy.save_file({"w": values}, tmp_path / "f")
        return sources.TensorLeaf(read_safetensors(tmp_path / "f")["w"], (), dtype)

    expected = wide.astype(np.float32).astype(dtype)
    np.testing.assert_array_equal(np.asarray(leaf(wide)), expected)


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
