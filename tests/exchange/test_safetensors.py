"""Stock safetensors reads exports; damaged files are refused."""

import json
import struct

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from jaxinf.errors import (
    ExchangeError,
    StoreCorruptError,
    StoreIOError,
    StoreSpaceError,
)
from jaxinf.exchange import destination, export_safetensors
from jaxinf.exchange.safetensors_format import encode_header, read_header


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
    export_safetensors(step, place / "export", memory_bytes=1 << 20)
    check_bits(read_all(place / "export"), params_of(arrays))
    assert [p.name for p in (place / "export").iterdir()] == ["model.safetensors"]


@pytest.mark.long
def test_several_files_and_their_index(make_step, place, check_bits):
    leaves = {(f"h{i}",): ((300, 300), (1, 1)) for i in range(8)}
    step, arrays = make_step(leaves=leaves)
    export_safetensors(step, place / "export", max_file_bytes=1 << 20)
    files = sorted(p.name for p in (place / "export").glob("*.safetensors"))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert len(files) > 2
    assert all((place / "export" / f).stat().st_size < 1.1 * 2**20 for f in files)
    arrays = params_of(arrays)
    check_bits(read_all(place / "export"), arrays)
    index = json.loads((place / "export/model.safetensors.index.json").read_text())
    total_bytes = sum(a.nbytes for a in arrays.values())
    assert index["metadata"] == {"total_size": total_bytes}
    for name, file in index["weight_map"].items():
        with safetensors.safe_open(place / "export" / file, "numpy") as opened:
            assert name in opened.keys()  # noqa: SIM118
    assert sorted(index["weight_map"]) == sorted(arrays)


def test_progress(make_step, place):
    step, arrays = make_step()
    calls = []
    export_safetensors(
        step, place / "export", progress=lambda *call: calls.append(call)
    )
    total_bytes = sum(a.nbytes for a in params_of(arrays).values())
    assert calls[-1] == (total_bytes, total_bytes)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


def test_a_destination_that_exists_is_refused(make_step, place):
    step, _ = make_step()
    (place / "export").mkdir()
    with pytest.raises(FileExistsError, match=r"export: expected a name that is free"):
        export_safetensors(step, place / "export")


def test_no_space(make_step, place, monkeypatch):
    step, _ = make_step()
    monkeypatch.setattr(destination, "_SLACK_BYTES", 1 << 60)
    with pytest.raises(StoreSpaceError, match=r"takes up to .* free some"):
        export_safetensors(step, place / "export")
    assert not list(place.glob("*export*"))


def test_a_damaged_step_leaves_nothing(make_step, place):
    step, _ = make_step()
    (step.path / "params.h0.attn.bias" / "c" / "0").resolve().write_bytes(b"short")
    with pytest.raises(StoreIOError, match=r"params.h0.attn.bias/c/0: truncated"):
        export_safetensors(step, place / "export")
    assert not list(place.glob("*export*"))


def test_a_flipped_bit_is_not_exported(make_step, place):
    step, _ = make_step()
    file = (step.path / "params.sharded.rows" / "c" / "1" / "0").resolve()
    content = bytearray(file.read_bytes())
    content[1000] ^= 1
    file.write_bytes(content)
    with pytest.raises(
        StoreCorruptError,
        match=r"sharded/rows, params, chunk \d+ of \d+, on CSD 0: .* CRC",
    ):
        export_safetensors(step, place / "export")
    assert not list(place.glob("*export*"))


def test_limits(make_step, place):
    step, _ = make_step()
    with pytest.raises(ValueError, match=r"max_file_bytes=10, .* at least"):
        export_safetensors(step, place / "export", max_file_bytes=10)


def test_headers_are_those_of_stock_safetensors(tmp_path):
    tensors = {
        "b": np.arange(6, dtype=np.float32).reshape(2, 3),
        "a": np.zeros((0, 4), np.int32),
        "c": np.asarray(3.0, np.float16),
    }
    safetensors.numpy.save_file(tensors, tmp_path / "f", {"key": "text"})
    header = read_header(tmp_path / "f")
    assert header.metadata == {"key": "text"}
    found = {n: (i.shape, i.dtype) for n, i in header.tensors.items()}
    assert found == {n: (t.shape, t.dtype) for n, t in tensors.items()}


def test_a_header_is_aligned_and_comes_back(tmp_path):
    dtypes = [np.dtype(d) for d in (np.float32, ml_dtypes.bfloat16, bool, np.int32)]
    entries = [(f"t{i}", (i, 3), dtype) for i, dtype in enumerate(dtypes)]
    first, header = encode_header(entries, {"step": "7"})
    assert len(first) % 8 == 0
    data_bytes = sum(info.num_bytes for info in header.tensors.values())
    (tmp_path / "f").write_bytes(first + bytes(data_bytes))
    assert read_header(tmp_path / "f") == header


def damaged(document, data=b"", length=None):
    text = document if isinstance(document, bytes) else json.dumps(document).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


TENSOR = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "at least 8 bytes, found 0"),
        (damaged({}, length=1 << 62), "does not fit"),
        (damaged(b"{"), "no JSON"),
        (damaged({"t": TENSOR}), "0 bytes of data, the header describes 8"),
        (damaged({"t": TENSOR}, bytes(12)), "12 bytes of data"),
        (
            damaged({"t": {**TENSOR, "dtype": "F3"}}, bytes(8)),
            "found 'F3'",
        ),
        (damaged({"t": {**TENSOR, "shape": [3]}}, bytes(8)), r"8 bytes for shape"),
        (damaged({"t": TENSOR, "u": TENSOR}, bytes(8)), "is at byte 0"),
        (
            damaged({"t": {**TENSOR, "shape": [-2]}}, bytes(8)),
            "whole number >= 0",
        ),
        (damaged([1]), "expected an object, found a list of 1"),
        (damaged({"t": 3}), "t: expected an object, found 3"),
    ],
)
def test_damage_is_refused(tmp_path, content, reason):
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(ExchangeError, match=reason) as caught:
        read_header(tmp_path / "f")
    assert "expected a safetensors file" in str(caught.value)
