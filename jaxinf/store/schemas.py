"""Schemas of a store's documents.

Invariant: a document that fits its schema has all keys, and values of the right type
and range. Its reader checks whether the values fit each other.
"""

from jaxinf.schema import (
    ANYTHING,
    Const,
    Either,
    Flag,
    Kind,
    Listed,
    Mapped,
    OneOf,
    Record,
    Row,
    Text,
    Whole,
)

MOST_STEP = 2**31 - 1
"""The largest step: the state's step is an int32."""

_MOST_BYTES = 2**63 - 1

_DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32"),
    *("uint64", "float16", "bfloat16", "float32", "float64"),
    *("complex64", "complex128"),
)

_SEAL = Text("[0-9a-f]{8}", "8 hex digits")
_ROOT = Text(r"/[^\0]*", "an absolute path", most_bytes=4096)
_NAME = Text(r"[^./\0-\x1f\x7f][^/\0-\x1f\x7f]*", "the name of a file", most_bytes=255)
_KEY = Text(most_bytes=255)
_CODEC = OneOf(("", "bf16", "int8", "scale", "split", "remainder"))
_LENGTHS = Listed(Whole(0), most=64)
_PARTS = Listed(Whole(1), most=64)
_CSDS = Listed(Whole(0, 65535))
_DTYPE = OneOf(_DTYPES)

_LEAF_ENTRIES: dict[str, Kind] = {
    "path": Listed(_KEY, most=255),
    "shape": _LENGTHS,
    "dtype": _DTYPE,
    "kernel": Text(),
    "states": Listed(Row((_NAME, _DTYPE, _CODEC), num_needed=2), least=1),
    "chunk_shape": _PARTS,
    "shard_counts": _PARTS,
    "csds": _CSDS,
}
_LEAF = Record(_LEAF_ENTRIES)
_PROCESS = Whole(0, 2**20 - 1)
_MEMBERS_LEAF = Record({**_LEAF_ENTRIES, "owners": Listed(_PROCESS)})

_MANIFEST: dict[str, Kind] = {
    "format": Const("jaxinf"),
    "store_id": Text("[0-9a-f]{32}", "32 hex digits"),
    "created_by": Mapped(Text()),
    "csds": Listed(_ROOT, most=65536),
    "kernels": Mapped(Listed(Text())),
    "leaves": Listed(_LEAF),
}

_SCALAR = Record(
    {
        "path": Text(),
        "dtype": _DTYPE,
        "shape": _LENGTHS,
        "data": Text("(?:[0-9a-f]{2})*+", "bytes in hex digits"),
    },
    {"value": Text()},
)

_DOCUMENTS = ("zarr.json", "_METADATA", "_CHECKPOINT_METADATA", "commit_success.txt")

_MAYBE: dict[str, Kind] = {
    "device_tier": Whole(1, _MOST_BYTES),
    "device_updates": Whole(1, MOST_STEP),
    "inexact": Mapped(Text("[0-9a-f]{8}", "a float32 as 8 hex digits")),
}

_RECORD: dict[str, Kind] = {
    "step": Whole(0, MOST_STEP),
    "skipped_steps": Whole(0, MOST_STEP),
    "scalar_state": Listed(_SCALAR),
    "payload": ANYTHING,
    "committed_at": Text(most_bytes=64),
    "checksums": Mapped(
        Text("(?:[0-9a-f]{8}(?: [0-9a-f]{8})*+)?", "checksums of 8 hex digits"), _NAME
    ),
    "documents": Mapped(_SEAL, OneOf((*_DOCUMENTS, "*/zarr.json"))),
    "crc32c": _SEAL,
}

_PLACES = Record({"csds": Listed(_ROOT, most=65536), "chunks": Listed(_CSDS)})
_NEW_PLACES = Record({**_PLACES.needed, "csds": Listed(_ROOT, least=1, most=65536)})
MANIFEST: dict[int, Record] = {
    3: Record({"format_version": Const(3), **_MANIFEST, "crc32c": _SEAL}),
    4: Record(
        {
            "format_version": Const(4),
            **_MANIFEST,
            "leaves": Listed(_MEMBERS_LEAF),
            "member": Record(
                {
                    "run": Text("[0-9a-f]{32}", "32 hex digits"),
                    "number": _PROCESS,
                    "count": Whole(2, 2**20),
                }
            ),
            "crc32c": _SEAL,
        }
    ),
}
"""``jaxinf.json``, by format version."""

_COMMIT = Text("[0-9a-f]{32}-[0-9]{1,16}", "an id of a session and a number")

RECORD: dict[int, Record] = {
    3: Record({"format_version": Const(3), **_RECORD}, _MAYBE),
    4: Record({"format_version": Const(4), **_RECORD, "commit": _COMMIT}, _MAYBE),
}
"""``commit.json``, by format version."""

JOURNAL = Record({"from": _PLACES, "to": _NEW_PLACES, "crc32c": _SEAL})
"""``rebalance.json``."""

DIVISION = Record(
    {
        "old": Listed(_NAME, most=2**20),
        "new": Listed(_NAME, most=2**20),
        "checkpoints": Listed(_NAME),
        "is_whole": Flag(),
        "is_moved": Flag(),
        "crc32c": _SEAL,
    }
)
"""``divide.json``."""

LOCK = Record(
    {
        "pid": Whole(1, 2**32),
        "host": Text(most_bytes=256),
        "command": Either(Listed(Text()), Text()),
    },
    others=ANYTHING,
)
"""``lock``, which is read for messages only."""

PLAN = Record(
    {
        "version": Whole(0),
        "fingerprint": Text(most_bytes=256),
        "cuts": Listed(Whole(0)),
        "crc32c": _SEAL,
    },
    optional={"mesh": Mapped(Whole(1)), "rows": Mapped(Whole(1))},
)
"""``stream/<digest>.json``."""
