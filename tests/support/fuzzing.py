"""Hostile documents, and the code that reads them.

`hostile` draws a change to a document of a step, of an export, or of another tool's
checkpoint. `Victim.survives` makes it, and reads everything that the document affects.
`changes` has every small change of a document.
"""

import copy
import io
import json
import shutil
import struct
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from copies import copied
from golden_stores import golden
from hypothesis import strategies as st
from raw_stores import bytes_below
from small_tokenizers import byte_level

from jaxinf.cli import main
from jaxinf.errors import JaxinfError
from jaxinf.exchange.safetensors_files import read_safetensors
from jaxinf.store import (
    StepReader,
    StoreDirectory,
    list_checkpoints,
    read_step,
    remove_checkpoint,
    save_checkpoint,
    seal,
    verify_step,
)
from jaxinf.train.data.tokenizer import open_tokenizer

MEMORY_BYTES = 96 << 20
"""Limit of the memory for any of these documents, chunks and buffers."""

DOCUMENTS = [
    "store/jaxinf.json",
    "store/slots/b/commit.json",
    "store/checkpoints/2/jaxinf.json",
    "store/checkpoints/2/commit.json",
    "store/lock",
    "store/slots/b/_METADATA",
    "store/slots/b/params.a/zarr.json",
    "export/commit.json",
    "export/jaxinf.json",
    "tensors/model.safetensors.index.json",
    "tensors/model-1.safetensors",
    "hub/tokenizer.json",
    "hub/tokenizer_config.json",
]

TEXTS = [
    *("", ".", "..", "../../outside", "/", "/proc/self/mem", "a/b", "\0", "\x1b[2J"),
    *("\ud800", "\u202e", "NaN", "-1", "9" * 5000, "float128", "object", "V16", "U4"),
    *("params", "scale", "split", "int8", "a" * 300, "00" * 9, "[0].x", "['\\N{}']"),
]
NUMBERS = [
    *(-1, 0, 1, 2, 3, 7, 4096, 2**31 - 1, 2**31, 2**32, 2**62, 2**63, 2**64, 10**40),
    *(-(2**63), 1.5, -0.0, 1e308, True, False),
]
OTHERS = [None, [], {}, [[]], [{}], {"": {}}, [1] * 3000]


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


VALUES = st.one_of(
    st.sampled_from(TEXTS),
    st.sampled_from(NUMBERS),
    st.sampled_from(OTHERS),
    st.sampled_from([nested(90), nested(200)]),
    st.text(max_size=8),
    st.integers(),
    st.floats(),
)

EDITS = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "put", "drop", "twice", "swap", "add"]),
        st.lists(st.integers(0, 10**6), min_size=1, max_size=6),
        VALUES,
    ),
    min_size=1,
    max_size=3,
)

RAW = st.lists(
    st.tuples(
        st.sampled_from(["flip", "cut", "insert", "repeat"]),
        st.integers(0, 10**6),
        st.sampled_from([b"[" * 5000, b"\xff\xfe", b"\0", b'"', b"1e999", b"NaN"]),
    ),
    min_size=1,
    max_size=2,
)


@st.composite
def hostile(draw):
    """Draws a document, its changes, and whether it is sealed again."""
    return (
        draw(st.sampled_from(DOCUMENTS)),
        draw(st.one_of(EDITS, EDITS, RAW)),
        draw(st.booleans()) or draw(st.booleans()),
    )


class Victim:
    """Stores, exports, checkpoints below a folder, and files that must not change."""

    def __init__(self, place):
        self.place = place
        self.outside = place / "outside"
        self.outside.mkdir()
        (self.outside / "precious").write_bytes(b"precious")
        shutil.copytree(golden("store"), place / "store", symlinks=True)
        directory = StoreDirectory.open(place / "store")
        save_checkpoint(directory, "export")
        kept = place / "store/checkpoints/export"
        shutil.copytree(kept, place / "export", symlinks=True)
        remove_checkpoint(directory, "export")
        (place / "store/lock").write_text('{"pid": 1, "host": "h", "command": ["c"]}')
        self._add_tensors(place / "tensors")
        byte_level(place / "hub", "</s>", eos_token="</s>")
        self.whole = {name: (place / name).read_bytes() for name in DOCUMENTS}
        self.kept = bytes_below(self.place)

    def survives(self, name, edits, sealed):
        """Reads everything after a change; returns the errors of refusing readers."""
        file, refusals = self.place / name, []
        file.write_bytes(changed(self.whole[name], edits, sealed))
        try:
            for use in self.uses(name):
                Path("/proc/self/clear_refs").write_text("5")  # resets the peak
                before = _status_bytes("VmRSS")
                said = io.StringIO()
                try:
                    with redirect_stdout(said), redirect_stderr(said):
                        use()
                except JaxinfError as error:
                    refusals.append(error)
                    said.write(str(error))
                assert not set(said.getvalue()) & set("\x1b\x9b\u202e\0")
                taken = _status_bytes("VmHWM") - before
                assert taken < MEMORY_BYTES, f"{use}: {taken} bytes"
        finally:
            file.write_bytes(self.whole[name])
        assert bytes_below(self.place) == self.kept
        return refusals

    def uses(self, name):
        """Yields the readers of a document; none writes if it refuses the document."""
        if name.startswith("store"):
            store = self.place / "store"
            yield lambda: read_everything(store)
            yield lambda: [list_checkpoints(StoreDirectory.open(store))]
            yield lambda: command("inspect", str(store))
            yield lambda: command("verify", str(store))
        elif name.startswith("export"):
            yield lambda: self.imports()
        elif name.startswith("hub"):
            yield lambda: use_tokenizer(self.place / "hub")
        else:
            yield lambda: read_safetensors(self.place / name.split("/")[0])

    def imports(self):
        try:
            copied(self.place / "export", self.place / "new")
        finally:
            shutil.rmtree(self.place / "new", ignore_errors=True)

    def _add_tensors(self, folder):
        folder.mkdir()
        arrays = {"w": np.arange(6, dtype=np.float32), "s": np.ones((), np.float32)}
        safetensors.numpy.save_file(arrays, folder / "model-1.safetensors")
        index = {"weight_map": dict.fromkeys(arrays, "model-1.safetensors")}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def use_tokenizer(folder):
    """Reads texts with a tokenizer, to ids that it says it has."""
    tokenizer = open_tokenizer(folder)
    for text in ("one two</s>", ""):
        ids = tokenizer.encode("text", text, is_whole=True)
        assert not ids.size or ids.max() < tokenizer.vocab_size


def command(*words):
    """Runs a command of jaxinf; raises if it fails, as with fuzzed documents."""
    if main(words):
        raise JaxinfError(f"jaxinf {words[0]} failed")


def _status_bytes(name):
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition(f"{name}:")[2].split()[0])


def read_everything(path):
    directory = StoreDirectory.open(path)
    directory.read_commit()
    with StepReader(read_step(directory, path / "current")) as reader:
        for one in directory.manifest.held_chunks():
            for _ in reader.decoded_pieces(one) if not one.state.is_companion else ():
                pass
    for step in (path / "slots/b", path / "checkpoints/2"):
        verify_step(directory, step)


def changed(raw, edits, sealed):
    """Returns a document after edits of its values or of its bytes."""
    if isinstance(edits[0][1], int):
        return _with_bytes(raw, edits)
    header = b""
    if raw[:1] != b"{":  # a safetensors file
        length = struct.unpack("<Q", raw[:8])[0]
        header, rest, raw = raw[:8], raw[8 + length :], raw[8 : 8 + length]
    document = json.loads(raw)
    for kind, path, value in edits:
        document = _edited(document, kind, path, copy.deepcopy(value))
    if header:
        text = json.dumps(document).encode()
        return struct.pack("<Q", len(text)) + text + rest
    if sealed and isinstance(document, dict) and "crc32c" in document:
        with suppress(ValueError):  # NaN, which has no seal
            return seal(document)
    return json.dumps(document, indent=1).encode()


def _edited(document, kind, path, value):
    parent: Any = None
    key, node = None, document
    for number in path:
        if not isinstance(node, dict | list) or not node:
            break
        parent, keys = node, list(node) if isinstance(node, dict) else range(len(node))
        key = keys[number % len(keys)]
        node = parent[key]
    if parent is None:
        return value
    if kind == "drop":
        del parent[key]
    elif kind == "twice" and isinstance(parent, list):
        parent.insert(key, copy.deepcopy(node))
    elif kind == "swap" and isinstance(parent, list):
        parent.reverse()
    elif kind == "add" and isinstance(parent, dict):
        parent[str(value)[:40]] = copy.deepcopy(node)
    else:
        parent[key] = value
    return document


def _with_bytes(raw, edits):
    for kind, place, extra in edits:
        place %= max(1, len(raw))
        if kind == "flip" and raw:
            raw = raw[:place] + bytes([raw[place] ^ 1 << place % 8]) + raw[place + 1 :]
        elif kind == "cut":
            raw = raw[:place]
        elif kind == "repeat":
            raw = raw[:place] + raw
        else:
            raw = raw[:place] + extra + raw[place:]
    return raw


SAMPLES = (None, True, 1.5, 7, "x", [], {})
OUT_OF_RANGE = (-1, 1 << 63)


def changes(document):
    """Yields pairs of what was changed, as a path and a word, and the new document."""
    for path, value in nodes(document):
        for kind, new in replacements(value):
            yield (path, kind), _replaced(document, path, new)
        if isinstance(value, dict):
            yield (path, "unknown key"), _replaced(document, path, {**value, "?": 1})
            for key in value:
                left = {k: v for k, v in value.items() if k != key}
                yield ((*path, key), "dropped"), _replaced(document, path, left)
        if isinstance(value, list) and value:
            yield (path, "item dropped"), _replaced(document, path, value[1:])
            yield (path, "item twice"), _replaced(document, path, [*value, value[0]])


def nodes(value, path=()):
    yield path, value
    if isinstance(value, dict):
        for key, item in value.items():
            yield from nodes(item, (*path, key))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from nodes(item, (*path, number))


def replacements(value):
    """Yields values of every other type, and numbers out of any range."""
    for sample in SAMPLES:
        if type(sample) is not type(value):
            yield f"made {type(sample).__name__}", sample
    if type(value) is str:
        yield "other text", "1" + value
    if type(value) is int:
        yield "one more", value + 1
        for number in OUT_OF_RANGE:
            yield f"made {number}", number


def _replaced(document, path, new):
    if not path:
        return new
    changed = copy.deepcopy(document)
    node = changed
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = new
    return changed
