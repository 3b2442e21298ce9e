"""Schemas of JSON documents, and their check.

Invariant: nothing here reads a file or knows the purpose of a document. For any bytes
the outcome is a checked value or a `SchemaError`.
"""

from jaxinf.schema.kinds import (
    ANYTHING,
    Const,
    Either,
    Flag,
    Json,
    Kind,
    Listed,
    Mapped,
    Number,
    OneOf,
    Record,
    Row,
    SchemaError,
    Text,
    Whole,
    shown,
)
from jaxinf.schema.parsing import (
    MOST_BYTES,
    MOST_NESTING,
    check_json,
    json_problem,
    parse_json,
)

__all__ = [
    "ANYTHING",
    "MOST_BYTES",
    "MOST_NESTING",
    "Const",
    "Either",
    "Flag",
    "Json",
    "Kind",
    "Listed",
    "Mapped",
    "Number",
    "OneOf",
    "Record",
    "Row",
    "SchemaError",
    "Text",
    "Whole",
    "check_json",
    "json_problem",
    "parse_json",
    "shown",
]
