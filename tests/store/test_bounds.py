"""A store's claims cost no more than its files: a mere claim allocates nothing."""

import os
import socket
from typing import Annotated

import pytest
from inject import at_each_call
from msgspec import Meta
from raw_stores import edit
from store_driver import Driver

import jaxinf
from jaxinf.documents import MOST_BYTES, MOST_NESTING, DocumentError, decode
from jaxinf.errors import StoreError, StoreFormatError
from jaxinf.store import StoreDirectory


@pytest.mark.parametrize("length", [2**33, 2**36, 2**45, 2**57])
def test_a_small_manifest_of_a_giant_takes_no_memory(golden_store, length):
    store = golden_store()
    giant = {"shape": [1, length], "chunk_shape": [1, length]}
    edit(store / "jaxinf.json", lambda document: document["leaves"][0].update(giant))
    with pytest.raises(StoreError, match=r"truncated: expected|more elements than"):
        jaxinf.open_store(store)


@pytest.mark.parametrize("name", ["jaxinf.json", "slots/b/commit.json"])
@pytest.mark.parametrize("kind", ["pipe", "socket", "sparse", "link", "folder"])
def test_only_files_of_some_size_are_read(golden_store, name, kind, monkeypatch):
    file = (store := golden_store()) / name
    file.unlink()
    match kind:
        case "pipe":
            os.mkfifo(file)
        case "socket":
            with monkeypatch.context() as patch:
                patch.chdir(file.parent)  # names of sockets are short
                with socket.socket(socket.AF_UNIX) as end:
                    end.bind(file.name)
        case "sparse":
            file.touch()
            os.truncate(file, 1 << 40)
        case "link":
            file.symlink_to("/dev/zero")
        case "folder":
            file.mkdir()
    with pytest.raises(StoreFormatError, match=name.split("/")[-1]):
        StoreDirectory.open(store).read_commit()


def test_opening_a_store_looks_at_no_chunk(place, monkeypatch):
    leaves = {"w": ((64, 4096), "float32")}
    driver = Driver(place / "store", leaves=leaves, chunk_elements=4096)
    driver.init().close()
    opened = []
    for name in ("open", "stat", "lstat", "unlink"):
        at_each_call(
            monkeypatch,
            os,
            name,
            lambda path, *_, **__: opened.append(os.fsdecode(path)),
        )
    jaxinf.open_store(place / "store").close()
    assert 10 < len(opened) < 2 * 64
    assert not [path for path in opened if "/c/" in path]


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        pytest.param(
            b"[" * (MOST_NESTING + 1) + b"]" * (MOST_NESTING + 1), "nesting", id="deep"
        ),
        pytest.param(b"[" * 10**6, "nesting", id="deeper"),
        pytest.param(b" " * (MOST_BYTES + 1), "bytes", id="long"),
        pytest.param(b"[" + b"0," * (5 << 20) + b"0]", "values", id="many values"),
        (b'{"a": 1, "a": 2}', "twice"),
        (b"[NaN]", "no JSON"),
        (b"[1e999]", "no JSON"),
        (b'["\\ud800"]', "no JSON"),
        (b'[{"a": "\\"}", "a": 2}]', "twice"),
        pytest.param(b"9" * 5000, "no JSON: Integer value out of range$", id="digits"),
        (b"\xff\xfe[\0]\0", "no JSON"),
        (b"[-1]", r"\[0\]: expected a whole number"),
        (b"[true]", r"\[0\]: expected a whole number"),
        (b"[1.0]", r"\[0\]: expected a whole number"),
    ],
)
def test_bounds_of_documents(raw, problem):
    with pytest.raises(DocumentError, match=problem):
        decode(raw, tuple[Annotated[int, Meta(ge=0)], ...])
