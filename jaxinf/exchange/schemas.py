"""Schemas of exports, and of other tools' documents for the keys that are read.

Invariant: keys that are not read may have any value; a name that becomes part of a path
is a single component of it.
"""

from collections.abc import Sequence

from jaxinf.schema import (
    ANYTHING,
    Const,
    Either,
    Flag,
    Listed,
    Mapped,
    OneOf,
    Record,
    Row,
    Text,
    Whole,
)

_WHOLE = Whole(0, 2**62)

INDEX = Record(
    {
        "weight_map": Mapped(
            Text(
                r"[^./\0][^/\0]*\.safetensors",
                "the name of a safetensors file in the same folder; nothing outside it "
                "is read",
                most_bytes=255,
            )
        )
    },
    others=ANYTHING,
)
"""``model.safetensors.index.json``."""

_KEY = Either(Text(r"[^\0]*", "a key"), _WHOLE)

ORBAX_TREE = Record(
    {
        "tree_metadata": Mapped(
            Record(
                {
                    "key_metadata": Listed(
                        Record({"key": _KEY}, others=ANYTHING), most=255
                    ),
                    "value_metadata": Record(
                        {"value_type": Text()},
                        {"skip_deserialize": Flag()},
                        others=ANYTHING,
                    ),
                },
                others=ANYTHING,
            )
        )
    },
    {"use_zarr3": Flag(), "use_ocdbt": Flag()},
    others=ANYTHING,
)
"""Orbax's ``_METADATA``."""

_SUM = Text("[0-9a-f]{8}", "8 hex digits")

EXPORT = Record(
    {
        "format": Const("jaxinf export"),
        "format_version": Const(1),
        "store_id": Text("[0-9a-f]{32}", "32 hex digits"),
        "step": _WHOLE,
        "commit": _SUM,
        "objects": Mapped(Row((_WHOLE, _SUM)), Text(most_bytes=4096)),
        "crc32c": _SUM,
    }
)
"""``export.json``."""

ANY_OBJECT = Mapped(ANYTHING)
"""A document whose keys its reader looks up and checks."""


def tensors_header(dtypes: Sequence[str]) -> Record:
    """Returns the schema of a safetensors header with tensors of these dtypes."""
    tensor = Record(
        {
            "dtype": OneOf(dtypes),
            "shape": Listed(_WHOLE, most=64),
            "data_offsets": Listed(_WHOLE, least=2, most=2),
        },
        others=ANYTHING,
    )
    return Record({}, {"__metadata__": Mapped(Text())}, others=tensor)
