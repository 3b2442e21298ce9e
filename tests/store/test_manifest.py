"""The manifest: refusals and differences."""

import pytest
from msgspec import structs

from jaxinf.errors import StoreFormatError
from jaxinf.store import (
    LeafRecord,
    Manifest,
    Member,
    StateRecord,
    seal,
)
from jaxinf.store.creation import member_of
from jaxinf.store.manifest import FORMAT_VERSION

HEADER = {"format": "jaxinf", "format_version": FORMAT_VERSION}


@pytest.fixture
def read_changed(tmp_path, manifest_of):
    """Reads a manifest after a function has changed its JSON, or a text replaced it."""

    def read(change):
        document = manifest_of(csds=("/mnt/a", "/mnt/b")).to_json()
        path = tmp_path / "jaxinf.json"
        if callable(change):
            change(document)
            path.write_bytes(seal(document))
        else:
            path.write_text(change)
        return Manifest.read(path)

    return read


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "found none that can be read"),
        ('{"format": "jax', "found none that can be read"),
        ("[1]", 'expected "format": "jaxinf", found another document'),
        ('{"format": "jaxinf"}', "has None; the manifest is damaged"),
        (
            '{"format": "jaxinf", "format_version": 2}',
            f"reads format version {FORMAT_VERSION}, the store has 2; it is older than "
            "any release: export its params with the checkout of jaxinf that wrote it",
        ),
        (
            f'{{"format": "jaxinf", "format_version": {FORMAT_VERSION}}}',
            "with its checksum last, found none; the file was edited",
        ),
        (seal(HEADER).decode(), "expected the key 'store_id'"),
        (
            f'{{"format": "jaxinf", "format_version": {FORMAT_VERSION + 2}}}',
            rf"reads format version {FORMAT_VERSION}, the store has "
            rf"{FORMAT_VERSION + 2}; open it with a newer jaxinf",
        ),
    ],
)
def test_refuses_what_it_cannot_read(read_changed, text, message):
    with pytest.raises(StoreFormatError, match=message):
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
    whole = Manifest.of_contents([leaf], {"k0": ("x",)}, {})
    whole = structs.replace(whole, store_id="a" * 32)
    member = member_of(whole, Member("b" * 32, 1, 2), [(0, 1)])
    path = tmp_path / "jaxinf.json"
    member.write(path)
    held = Manifest.read(path)
    assert held == member
    assert held.num_held_params == 4096
    assert list(held.leaves[0].held) == [1]
    for owners in (0, 2), (0,):
        leaf = structs.replace(member.leaves[0], owners=owners)
        structs.replace(member, leaves=(leaf,)).write(path)
        with pytest.raises(StoreFormatError, match="owners"):
            Manifest.read(path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("store_id", "../../home", "store_id: expected 32 hex digits"),
        ("store_id", None, "store_id: expected a text, found None"),
        (
            "csds",
            ["relative"],
            r"csds\[0\]: expected an absolute path, found 'relative'",
        ),
        ("csds", ["/mnt/a"], "no such CSDs"),
        ("kernels", {}, "no kernel 'k0'"),
        ("leaves", [{}], r"leaves\[0\]: expected the key 'path', found none"),
    ],
)
def test_refuses_a_damaged_document(read_changed, key, value, message):
    with pytest.raises(StoreFormatError, match=f"none that can be read.*{message}"):
        read_changed(lambda document: document.update({key: value}))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("shape", [13, 130, 1], "shard counts"),
        ("shape", [9700, 129], "9700 chunks, 13 CSDs"),
        ("chunk_shape", [0, 129], "a whole number >= 1"),
        ("csds", [], "chunks, 0 CSDs"),
        ("kernel", "k9", "no kernel 'k9'"),
        ("states", [["params", "floaty"]], r"\[0\]\[1\]: expected one of"),
        ("states", [["mu", "float32"]], "no float32 params first"),
        (
            "states",
            [["params", "float32"], ["../mu", "int8"]],
            "expected the name of a file",
        ),
        ("path", ["embed/%", "0"], "would both be stored"),
    ],
)
def test_refuses_a_damaged_leaf(read_changed, key, value, message):
    with pytest.raises(StoreFormatError, match=f"none that can be read.*({message})"):
        read_changed(lambda document: document["leaves"][0].update({key: value}))


def test_tree_difference_says_what_differs(manifest_of):
    ours = manifest_of()
    kernel, bias, *rest = ours.leaves
    theirs = structs.replace(
        ours,
        leaves=(
            structs.replace(kernel, shape=(13, 128), dtype="bfloat16"),
            structs.replace(bias, states=bias.states[:2]),
            *rest[1:],
            structs.replace(rest[0], path=("new", "one")),
        ),
    )
    assert ours.tree_difference(theirs) == [
        "- leaf embed%2F%25/0: in the store only",
        "+ leaf new/one: not in the store",
        "leaf h0/attn/kernel: shape (13, 129) in the store, (13, 128) given",
        "leaf h0/attn/kernel: params float32 in the store, bfloat16 given",
        "leaf h0/attn/bias: states (params float32, mu bfloat16, count int32) in the "
        "store, (params float32, mu bfloat16) given",
    ]


def test_kernel_difference_shows_the_equations(manifest_of):
    ours = manifest_of()
    renamed = structs.replace(
        ours,
        kernels={"other": ours.kernels["k0"]},
        leaves=tuple(structs.replace(x, kernel="other") for x in ours.leaves),
    )
    assert ours.kernel_difference(renamed) == []
    theirs = structs.replace(ours, kernels={"k0": ("%0 = neg x", "update = %0")})
    assert ours.kernel_difference(theirs) == [
        "the update of leaf h0/attn/kernel has other equations:",
        "--- store",
        "+++ optimizer",
        "@@ -1,2 +1,2 @@",
        "-%0 = mul #, gradient",
        "+%0 = neg x",
        " update = %0",
    ]
