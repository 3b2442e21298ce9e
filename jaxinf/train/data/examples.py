"""Turns records into examples, and marks the parts that the model learns.

    {"text": …}                              the text is learned
    {"prompt": …, "response": …}             the response is learned
    {"messages": [{"role", "content"}, …]}   the assistant's messages are learned
    {"text": …, "label": n}                  the label is learned
    {"text": …, "text_pair": …, "label": n}  the label of two texts is learned

A model's own chat template, where there is one, decides the text of messages.

Invariant: a record has exactly one of these forms, or is refused with file and line.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from jaxinf.documents import shown
from jaxinf.train.data.errors import DataError, shown_names
from jaxinf.train.data.records import PLAIN_TEXT, Record

ExampleKind: TypeAlias = Literal["text", "dialogue", "labelled"]

MOST_LABELS = 1 << 31
"""Classes that an int32 label can tell apart."""

_PAIR = "text_pair"
_DIALOGUE_FIELDS = ("prompt", "response", "messages")
MessageForm: TypeAlias = Callable[
    [str, Sequence[Mapping[str, str]]], list[tuple[str, bool]]
]
"""Takes the place of a record and its messages; returns texts, which joined are the
whole, and whether each is learned."""

_ROLES = ("system", "user", "assistant", "tool")


@dataclasses.dataclass(frozen=True)
class Part:
    """A run of text.

    Attributes:
      text: the text; UTF-8 if it is bytes.
    """

    text: str | bytes
    is_learned: bool = True
    has_end: bool = False


@dataclasses.dataclass(frozen=True)
class Example:
    """One example, as text.

    Attributes:
      where: file and line or row.
      kind: ``dialogue`` for prompts and messages.
      label: the label of a ``labelled`` example.
      has_text_field: whether the text is from a record's field.
      is_joined: whether the parts are one text for the tokenizer.
    """

    where: str
    kind: ExampleKind
    parts: tuple[Part, ...]
    label: int | None = None
    has_text_field: bool = False
    is_joined: bool = False


def used_fields(text_field: str) -> set[str]:
    return {text_field, _PAIR, "label", *_DIALOGUE_FIELDS}


def read_examples(
    records: Iterable[Record],
    *,
    text_field: str,
    unused: set[str],
    message_form: MessageForm | None = None,
) -> Iterator[Example]:
    """Yields the examples of records.

    Args:
      records: records of one or more files.
      message_form: the model's own form of messages; by default `_plain_form`.

    Raises:
      DataError: a record has no known form, or another one than the record before, or
        `message_form` refuses its messages.
    """
    first: Example | None = None
    for record in records:
        example = _example_of(record, text_field, unused, message_form)
        first = first or example
        if example.kind != first.kind:
            raise DataError(
                f"{example.where}: expected records of one kind, found one with "
                f"fields {record.names} after those of {first.where}, which "
                f"are {first.kind}; train on them one after the other"
            )
        if example.kind == "labelled" and len(example.parts) != len(first.parts):
            has, lacks = first, example
            if len(first.parts) < len(example.parts):
                has, lacks = example, first
            raise DataError(
                f"{lacks.where}: expected a field {_PAIR!r}, as {has.where} has, found "
                "none; give it in all records, or in none"
            )
        yield example


def _example_of(
    record: Record, text_field: str, unused: set[str], form: MessageForm | None
) -> Example:
    fields = {name: v for name, v in record.fields.items() if v is not None}
    if isinstance(fields.get(PLAIN_TEXT), bytes):  # JSON has no bytes
        return Example(record.where, "text", (Part(fields[PLAIN_TEXT], has_end=True),))
    known = (
        {text_field, _PAIR, "label"}
        if text_field in fields
        else _dialogue_fields(fields)
    )
    if not known:
        beside = f" beside {_PAIR!r}" if _PAIR in fields else ""
        raise DataError(
            f"{record.where}: expected a field {text_field!r}{beside} "
            "(--text-field), the fields 'prompt' and 'response', or 'messages'; found "
            f"{shown_names({*fields, *record.unread}) or 'no fields'}"
        )
    unused |= {*fields, *record.unread} - known
    if "messages" in known:
        messages = _messages(record.where, fields["messages"])
        if form is None:
            return Example(record.where, "dialogue", tuple(_plain_form(messages)))
        parts = tuple(Part(*part) for part in form(record.where, messages))
        return Example(record.where, "dialogue", parts, is_joined=True)
    if "prompt" in known:
        prompt, response = (_text(record, fields, n) for n in ("prompt", "response"))
        parts = (Part(prompt, is_learned=False), Part(response, has_end=True))
        return Example(record.where, "dialogue", parts)
    if _PAIR in fields:
        parts = tuple(Part(_text(record, fields, n)) for n in (text_field, _PAIR))
        label = _label(record.where, {"label": None, **fields})
        return Example(record.where, "labelled", parts, label, has_text_field=True)
    text = _text(record, fields, text_field)
    if "label" not in fields:
        parts = (Part(text, has_end=True),)
        return Example(record.where, "text", parts, has_text_field=True)
    label = _label(record.where, fields)
    return Example(record.where, "labelled", (Part(text),), label, has_text_field=True)


def _dialogue_fields(fields: Mapping[str, Any]) -> set[str]:
    if "messages" in fields:
        return {"messages"}
    return {"prompt", "response"} if {"prompt", "response"} <= set(fields) else set()


def _text(record: Record, fields: Mapping[str, Any], name: str) -> str | bytes:
    value = fields[name]
    if not isinstance(value, str | bytes) or not value:
        found = "an empty one" if value in ("", b"") else f"a {type(value).__name__}"
        raise DataError(
            f"{record.where}: expected text in field {name!r}, found {found}"
        )
    return value


def _label(where: str, fields: Mapping[str, Any]) -> int:
    label = fields["label"]
    if type(label) is not int or not 0 <= label < MOST_LABELS:
        raise DataError(
            f"{where}: expected a label of 0 or more, found {shown(label)}; number the "
            f"classes from 0, all below {MOST_LABELS}"
        )
    return label


def _messages(where: str, messages: Any) -> list[dict[str, str]]:
    if not isinstance(messages, list) or not messages:
        raise DataError(
            f"{where}: expected a list of messages, found {shown(messages)}"
        )
    found = [_message(f"{where}: message {n}", m) for n, m in enumerate(messages, 1)]
    roles = {message["role"] for message in found}
    if "assistant" not in roles:
        raise DataError(
            f"{where}: expected a message of the assistant, from which the model "
            f"learns; found roles {sorted(roles)}"
        )
    return found


def _plain_form(messages: Sequence[Mapping[str, str]]) -> Iterator[Part]:
    """Joins ``<|role|>``, newline, content; an end follows the assistant's messages."""
    for message in messages:
        is_learned = message["role"] == "assistant"
        yield Part(f"<|{message['role']}|>\n", is_learned=False)
        yield Part(message["content"], is_learned=is_learned, has_end=is_learned)
        yield Part("\n", is_learned=False)


def _message(where: str, message: Any) -> dict[str, str]:
    fields = message if isinstance(message, dict) else {}
    role, content = fields.get("role"), fields.get("content")
    if not isinstance(role, str) or role not in _ROLES:
        raise DataError(f"{where}: expected a role of {_ROLES}, found {shown(role)}")
    if not isinstance(content, str) or not content:
        raise DataError(f"{where}: expected text as content, found {shown(content)}")
    return {"role": role, "content": content}
