"""Documents: flipped bits are refused, records keep their bits, names are unique."""

from itertools import product

import ml_dtypes
import numpy as np
import pytest
from golden_stores import golden
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jaxinf.documents import decode, encode
from jaxinf.errors import StoreFormatError
from jaxinf.store import (
    CommitRecord,
    Manifest,
    ScalarState,
    StoreDirectory,
    check_leaf_paths,
    encode_path,
    leaf_name,
    seal,
    verify_step,
)
from jaxinf.store.names import array_name, encode_key


@pytest.mark.long
@pytest.mark.parametrize("name", ["jaxinf.json", "commit.json"])
def test_any_flipped_bit_is_refused(tmp_path, name):
    kind = Manifest if name == "jaxinf.json" else CommitRecord
    file = tmp_path / name
    kind.read(golden("scalars") / "checkpoints/2" / name).write(file)
    whole = file.read_bytes()
    kind.read(file)
    for place in range(len(whole)):
        file.write_bytes(
            whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :]
        )
        with pytest.raises(StoreFormatError, match=name):
            kind.read(file)


def test_an_edited_document_says_how_to_restore_it(tmp_path):
    file = tmp_path / "commit.json"
    record = (golden("scalars") / "slots/b/commit.json").read_text()
    file.write_text(record.replace('"skipped_steps": 0', '"skipped_steps": 1'))
    said = r"edited or damaged\); undo the edit.* checkpoint restore STORE NAME"
    with pytest.raises(StoreFormatError, match=said):
        CommitRecord.read(file)


def test_a_seal_is_the_last_key_and_stays_what_it_is():
    raw = seal({"crc32c": "00000000", "a": 1})
    assert raw.endswith(b"\n}\n")
    assert raw == seal({"a": 1})


OTHERS = ["zarr.json", "_METADATA", "_CHECKPOINT_METADATA", "commit_success.txt"]


@pytest.mark.parametrize(
    ("step", "name"),
    [
        *product(["slots/b", "checkpoints/2"], OTHERS),
        ("checkpoints/2", "orbax.checkpoint"),
    ],
)
@pytest.mark.parametrize("is_gone", [False, True])
def test_verify_sees_what_other_tools_read(golden_store, step, name, is_gone):
    path = golden_store()
    directory = StoreDirectory.open(path)
    assert verify_step(directory, path / step) == []
    file = path / step / name
    content = file.read_bytes()
    file.unlink() if is_gone else file.write_bytes(b"[" + content[1:])
    [damage] = verify_step(directory, path / step)
    assert damage.what == name
    assert ("ENOENT" if is_gone else "found others") in damage.problem


# --- the commit record: bits in, the same bits out -----------------------------------

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
    assert (back.value.dtype, back.value.shape) == (dtype, shape)
    assert back.value.tobytes() == value.tobytes()


def test_record(tmp_path):
    fields = {
        "step": 2**31 - 1,
        "scalar_state": (),
        "skipped_steps": 3,
        "payload": {"position": [1, 2], "text": "ü", "none": None},
        "inexact": {"a/b": np.float32(0), "ü": np.float32(2.0**-30)},
        "device_updates": 2,
        "committed_at": "then",
    }
    CommitRecord(**fields).write(tmp_path / "commit.json")
    found = CommitRecord.read(tmp_path / "commit.json")
    assert found == CommitRecord(**fields)
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
        path.write_bytes(seal(document | {key: value}))
        with pytest.raises(StoreFormatError, match=key.replace("_v", " v")):
            CommitRecord.read(path)


# --- names on disk, and paths of places in the optimizer's state ---------------------

KEYS = st.text(st.characters(blacklist_categories=("Cs",)))


@given(KEYS, KEYS)
def test_encoding_is_one_path_component_and_injective(one, other):
    name = encode_key(one)
    assert "/" not in name
    assert "\0" not in name
    assert (encode_key(other) == name) == (one == other)


def test_names():
    path = ("h/0", "50%", "a\n")
    assert leaf_name(path) == "h%2F0/50%25/a%0A"
    assert array_name("mu", path) == "mu.h%2F0.50%25.a%0A"
    assert array_name("params", ()) == "params"


def test_refuses_names_that_collide_or_are_too_long():
    check_leaf_paths([("x" * 248,)], ["params"])
    for paths, states, message in (
        ([("a", "b.c"), ("a.b", "c")], ["params"], r"'b.c'\] and \['a.b', 'c'\]"),
        ([("x" * 249,)], ["params"], "takes 256 bytes, a file name has at most 255"),
        ([("é" * 130,)], ["mu"], "shorten the keys"),
    ):
        with pytest.raises(ValueError, match=message):
            check_leaf_paths(paths, states)


@pytest.mark.parametrize(
    ("keys", "path"),
    [
        ((), ""),
        ((("field", "count"),), ".count"),
        ((("key", 3), ("key", "a/b")), "#3/a%2Fb"),
        ((("key", ".count"),), "%2Ecount"),
        ((("key", "#3"), ("key", "=x")), "%233/%3Dx"),
        ((("key", ""), ("key", True), ("key", None)), "=/=True/=None"),
        ((("key", -1), ("other", "x[0]")), "#-1/=x[0]"),
    ],
)
def test_spelling(keys, path):
    assert encode_path(keys) == path
