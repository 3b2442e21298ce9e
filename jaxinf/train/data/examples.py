"""Turns records into examples.

    {"text": …}                              the text is learned
    {"prompt": …, "response": …}             the response is learned
    {"messages": [{"role", "content"}, …]}   the assistant's messages are learned
    {"text": …, "label": …}                  the label is learned
    {"text": …, "text_pair": …, "label": …}  the label of two texts is learned

Invariant: a record has exactly one of these forms, or is refused with file and line.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from jaxinf.documents import shorten
from jaxinf.train.data.errors import DataError, list_names
from jaxinf.train.data.files import PLAIN_TEXT, Record

ExampleKind: TypeAlias = Literal["text", "dialogue", "labelled"]
Text: TypeAlias = str | bytes
Message: TypeAlias = Mapping[str, Any]

_FORMS = {  # by the fields that a record must have
    ("text",): ("text", "text_pair", "label"),
    ("messages",): ("messages", "tools"),
    ("prompt", "response"): ("prompt", "response"),
}
FIELDS = frozenset(name for form in _FORMS.values() for name in form)
"""Names of all fields that a record may have a use for."""

_ROLES = ("system", "user", "assistant", "tool")
_MAX_LABELS = 1 << 31  # that an int32 can tell apart


class Example(NamedTuple):
    """One example; prompts and messages are a ``dialogue``.

    Attributes:
      texts: The text, the text and its pair, or the prompt and its response; bytes are
        UTF-8.
      messages: A conversation, in place of texts.
    """

    where: str
    kind: ExampleKind
    texts: tuple[Text, ...] = ()
    messages: Sequence[Message] = ()
    tools: Any = None
    label: int = -1


def parse_example(record: Record, unused: set[str]) -> Example:
    """Returns the example of a record; `unused` gets the names of other fields."""
    where = record.where
    if isinstance(text := record.fields.get(PLAIN_TEXT), bytes):  # JSON has no bytes
        return Example(where, "text", (text,))
    fields = {name: x for name, x in record.fields.items() if x is not None}
    form = next((form for needed, form in _FORMS.items() if {*needed} <= {*fields}), ())
    values = {name: fields[name] for name in form if name in fields}
    others = {*fields, *record.unread} - {*values}
    if not values:
        raise DataError(
            f"{where}: expected a field 'text', the fields 'prompt' and 'response', or "
            f"'messages', a list of objects with 'role' and 'content'; found "
            f"{list_names(others)}; rename them in the data"
        )
    unused |= others
    if "messages" in values:
        messages = _check_messages(where, values["messages"])
        return Example(where, "dialogue", (), messages, values.get("tools"))
    text_fields = [name for name in values if name != "label"]
    texts = tuple(_check_text(where, name, values[name]) for name in text_fields)
    if "prompt" in values:
        return Example(where, "dialogue", texts)
    if values.keys() == {"text"}:
        return Example(where, "text", texts)
    return Example(
        where, "labelled", texts, label=_check_label(where, values.get("label"))
    )


def _check_text(where: str, name: str, value: Any) -> Text:
    if not isinstance(value, str | bytes) or not value:
        found = "an empty one" if value in ("", b"") else f"a {type(value).__name__}"
        raise DataError(f"{where}: expected text in field {name!r}, found {found}")
    return value


def _check_messages(where: str, messages: Any) -> list[Message]:
    items = messages if isinstance(messages, list) else []
    wrong = [
        (number, item)
        for number, item in enumerate(items, 1)
        if not (isinstance(item, dict) and isinstance(item.get("role"), str))
        or not item.keys() & {"content", "tool_calls"}
    ]
    if wrong or not items:
        number, item = wrong[0] if wrong else (0, messages)
        has = list_names(item) if isinstance(item, dict) else shorten(item)
        found = f"message {number} with {has}" if number else has
        raise DataError(
            f"{where}: expected a list of messages, each an object with a 'role' of "
            f"{_ROLES} and its 'content', found {found}"
        )
    if "assistant" not in (roles := {item["role"] for item in items}):
        raise DataError(
            f"{where}: expected a message of the assistant, from which the model "
            f"learns; found roles {list_names(roles)}"
        )
    return messages


def _check_label(where: str, label: Any) -> int:
    if type(label) is not int or not 0 <= label < _MAX_LABELS:
        raise DataError(
            f"{where}: expected an integer label from 0 to {_MAX_LABELS - 1}, found "
            f"{shorten(label)}; number the classes from 0 in the data"
        )
    return label


def count_classes(labels: Sequence[int]) -> int:
    """Returns the number of classes, up to the largest label; refuses large labels."""
    largest, limit = max(labels), max(2, len(labels))
    if largest >= limit:
        raise DataError(
            f"labels: expected labels of 0 to {limit - 1} ({len(labels)} examples), "
            f"found {largest}; number the classes from 0"
        )
    return max(2, largest + 1)
