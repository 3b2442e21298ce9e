"""The manifest: refusals and differences."""

import json

import pytest
from msgspec import structs

from jaxinf.errors import StoreFormatError
from jaxinf.store import LeafRecord, Manifest, Member, StateRecord, place_chunks, seal
from jaxinf.store.manifest import FORMAT_VERSION

HEADER = {"format": "jaxinf", "format_version": FORMAT_VERSION}


@pytest.fixture
def read_changed(tmp_path, manifest):
    """Reads a manifest after a function has changed its JSON, or a text replaced it."""

    def read(change):
        document = manifest.to_json()
        path = tmp_path / "jaxinf.json"
        if callable(change):
            change(document)
            path.write_bytes(seal(document))
        else:
            path.write_text(change)
        return Manifest.read(path)

    return read


TEXTS = {
    "": "found none that can be read",
    "[1]": "format version None, expected 3",
    '{"format": "jaxinf"}': "format version None, expected 3",
    '{"format": "jaxinf", "format_version": 2}': "format version 2, expected 3",
    '{"format": "jaxinf", "format_version": 3.0}': "format version 3.0, expected 3",
    json.dumps(HEADER): "its CRC-32C at its end, found another or none; it was",
    seal(HEADER).decode(): "expected the key 'store_id'",
    seal(HEADER | {"format": "other"}).decode(): "format: Invalid",
    json.dumps(HEADER | {"format_version": 9}): "version 9, .* a newer jaxinf's",
}


@pytest.mark.parametrize("text", TEXTS)
def test_refuses_what_it_cannot_read(read_changed, text):
    with pytest.raises(StoreFormatError, match=TEXTS[text]):
        read_changed(text)


def test_a_members_chunks_have_owners(tmp_path):
    leaf = LeafRecord(
        path=("w",),
        shape=(8192,),
        dtype="float32",
        kernel="k0",
        states=(StateRecord("params", "float32"),),
        shard_counts=(1,),
        chunk_shape=(4096,),
        csds=(0, 0),
    )
    whole = Manifest.of_contents([leaf], {"k0": ("x",)})
    member = place_chunks(whole, (), member=Member("b" * 32, 1, 2), owners=[(0, 1)])
    path = tmp_path / "jaxinf.json"
    member.write(path)
    held = Manifest.read(path)
    assert held == member
    assert held.num_held_params == 4096
    assert list(held.leaves[0].held_numbers) == [1]
    for owners in (0, 2), (0,):
        leaf = structs.replace(member.leaves[0], owners=owners)
        structs.replace(member, leaves=(leaf,)).write(path)
        with pytest.raises(StoreFormatError, match="owners"):
            Manifest.read(path)


@pytest.mark.parametrize(
    ("place", "key", "value", "message"),
    [
        (None, "store_id", "../../home", "store_id: expected 32 hex digits"),
        (None, "csds", ["relative"], r"csds\[0\]: expected an absolute path, found 'r"),
        (None, "csds", ["/mnt/a"], "no such CSDs"),
        (None, "leaves", [{}], r"leaves\[0\]: expected the key 'path', found none"),
        (0, "shape", [13, 130, 1], "shard counts"),
        (0, "chunk_shape", [13, 10], "pads dimension 1 between real elements"),
        (0, "shape", [9700, 129], "9700 chunks, 13 CSDs"),
        (0, "csds", [], "chunks, 0 CSDs"),
        (0, "states", [["params", "floaty"]], r"\[0\]\[1\]: expected one of"),
        (0, "states", [["mu", "float32"]], "no float32 params first"),
        (0, "states", [["params", "float32"], ["../mu", "int8"]], "the name of a file"),
        (0, "path", ["embed/%", "0"], "would both be stored"),
    ],
)
def test_refuses_what_is_damaged(read_changed, place, key, value, message):
    def change(document):
        at = document if place is None else document["leaves"][place]
        at[key] = value

    with pytest.raises(StoreFormatError, match=f"none that can be read.*({message})"):
        read_changed(change)
