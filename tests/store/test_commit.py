"""The commit record: bits in, the same bits out."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jaxinf.documents import decode, encode
from jaxinf.errors import StoreFormatError
from jaxinf.store import CommitRecord, ScalarState
from jaxinf.store.documents import write_document

DTYPES = [
    np.dtype(f"{kind}{num_bytes}")
    for kind, sizes in {
        "b": "1",
        "i": "1248",
        "u": "1248",
        "f": "248",
        "c": "8",
    }.items()
    for num_bytes in sizes
] + [np.dtype(ml_dtypes.bfloat16)]


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def round_trip(tmp_path, **fields):
    path = tmp_path / "commit.json"
    CommitRecord(**fields).write(path)
    return CommitRecord.read(path)


@given(st.data())
def test_scalars_keep_their_bits(data):
    dtype = data.draw(st.sampled_from(DTYPES))
    shape = data.draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
    size = int(np.prod(shape)) * dtype.itemsize
    raw = data.draw(st.binary(min_size=size, max_size=size))
    if dtype.kind == "b":
        raw = bytes(byte & 1 for byte in raw)
    value = np.frombuffer(raw, dtype).reshape(shape)
    raw = encode(ScalarState.of("#0/.x", value))
    back = decode(raw, ScalarState)
    assert back.path == "#0/.x"
    assert same_bits(back.value, value)


def test_record(tmp_path):
    fields = {
        "step": 2**31 - 1,
        "scalar_state": (),
        "skipped_steps": 3,
        "payload": {"position": [1, 2], "text": "ü", "none": None},
        "inexact": {"a/b": 0.0, "ü": 2.0**-30},
        "device_updates": 2,
        "committed_at": "then",
    }
    assert round_trip(tmp_path, **fields) == CommitRecord(**fields)
    assert CommitRecord(step=0, scalar_state=()).committed_at.endswith("+00:00")


def test_numbers_of_a_record(tmp_path):
    path = tmp_path / "commit.json"
    document = CommitRecord(step=1, scalar_state=()).to_json()
    inexact = ("bf800000", "7f800000", "7fc00000", "3f8", 1.0)
    for key, value in (
        *(("device_updates", number) for number in (0, -2, 2.0, "2", True)),
        *(("inexact", {"a": x}) for x in inexact),
        *(("format_version", version) for version in (2, 3.0, True, "3", None)),
    ):
        write_document(path, document | {key: value})
        with pytest.raises(StoreFormatError, match=key.replace("_v", " v")):
            CommitRecord.read(path)
