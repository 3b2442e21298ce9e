"""Turns records into examples, and names the fields that they come from.

    {"text": …}                              the text is learned
    {"prompt": …, "response": …}             the response is learned
    {"messages": [{"role", "content"}, …]}   the assistant's messages are learned
    {"text": …, "label": …}                  the label is learned
    {"text": …, "text_pair": …, "label": …}  the label of two texts is learned
    {"instruction", "input", "output"}       Alpaca's: the output is learned
    {"conversations": [{"from", "value"}]}   ShareGPT's: as messages

Invariant: a record has exactly one of these forms, or is refused with file and line. A
class has the same number in all parts of the data.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

from jaxinf.documents import shown
from jaxinf.train.data.errors import DataError, shown_names
from jaxinf.train.data.records import PLAIN_TEXT, Record

ExampleKind: TypeAlias = Literal["text", "dialogue", "labelled"]
Text: TypeAlias = str | bytes
Message: TypeAlias = Mapping[str, Any]
Label: TypeAlias = int | str

_ALPACA = ("instruction", "input", "output")
_FORMS = {  # by the fields that a record must have
    ("text",): ("text", "text_pair", "label"),
    ("messages",): ("messages", "tools"),
    ("conversations",): ("conversations",),
    ("prompt", "response"): ("prompt", "response"),
}
_OWN = ("text", "text_pair", "label", "prompt", "response", "messages", "tools")
_SPEAKERS = {"human": "user", "gpt": "assistant", "observation": "tool"}
_ROLES = ("system", "user", "assistant", "tool")
_MOST_LABELS = 1 << 31  # that an int32 can tell apart


@dataclasses.dataclass(frozen=True)
class Example:
    """One example, as text.

    Attributes:
      where: file and line or row.
      kind: ``dialogue`` for prompts and messages.
      texts: the text, the text and its pair, or the prompt and its response; UTF-8 if
        it is bytes.
      messages: a conversation, in place of texts.
      label: the number or name of the class of a ``labelled`` example.
      fields: the record's fields that are used: ``text=body,label``.
    """

    where: str
    kind: ExampleKind
    texts: tuple[Text, ...] = ()
    messages: Sequence[Message] = ()
    tools: Any = None
    label: Label = -1
    fields: str = ""


def field_map(given: str) -> dict[str, str]:
    """Reads ``prompt=instruction,response=output``: fields of records by our names.

    Raises:
      DataError: it is not of this form.
    """
    pairs = [word.partition("=") for word in given.split(",") if given]
    found = {name.strip(): source.strip() for name, _, source in pairs}
    if len(found) < len(pairs) or not all(found.values()) or {*found} - {*_OWN}:
        raise DataError(
            f"--fields {given}: expected our names, each once, with yours: "
            f"prompt=instruction,response=output; ours are {', '.join(_OWN)}"
        )
    return found


def used_fields(mapping: Mapping[str, str]) -> set[str]:
    return {*_OWN, *_ALPACA, "conversations", *mapping.values()}


def example_of(
    record: Record,
    mapping: Mapping[str, str],
    unused: set[str],
    *,
    has_template: bool = False,
) -> Example:
    """Returns the example of a record.

    Args:
      mapping: fields of records by our names.
      unused: names of other fields, which are added.
      has_template: whether Alpaca's records become messages for a chat template.

    Raises:
      DataError: the record has no known form.
    """
    where, raw = record.where, record.fields
    if isinstance(raw.get(PLAIN_TEXT), bytes):  # JSON has no bytes
        return Example(where, "text", (raw[PLAIN_TEXT],))
    own = {name for name, value in raw.items() if value is not None}
    sources = {name: name for name in (*_ALPACA, "conversations")}
    taken = {*mapping.values()}
    sources |= {n: mapping.get(n, n) for n in _OWN if n in mapping or n not in taken}
    found = {name: source for name, source in sources.items() if source in own}
    form = _form_of({*found}, {*mapping})
    if form is None:
        asked = [source for source in mapping.values() if source not in own]
        wanted = "a field 'text', the fields 'prompt' and 'response', or 'messages'"
        if "text_pair" in found:
            wanted = f"a field 'text' beside {found['text_pair']!r}"
        if asked:
            wanted = f"a field {asked[0]!r}, as --fields names it"
        raise DataError(
            f"{where}: expected {wanted} (--fields gives them other names); found "
            f"{shown_names({*own, *record.unread}) or 'no fields'}"
        )
    used = {name: found[name] for name in form if name in found}
    unused |= {*own, *record.unread} - {*used.values()}
    values = {name: raw[source] for name, source in used.items()}
    said = ",".join(n if n == source else f"{n}={source}" for n, source in used.items())
    if "output" in form:
        return _alpaca(where, values, has_template, said)
    if "conversations" in form:
        said = "messages=conversations"
        values = {"messages": _share_gpt(where, values["conversations"])}
    if "messages" in values:
        messages, tools = _messages(where, values["messages"]), values.get("tools")
        return Example(where, "dialogue", (), messages, tools, fields=said)
    texts = tuple(
        _text(where, used[name], value)
        for name, value in values.items()
        if name != "label"
    )
    if "prompt" in form:
        return Example(where, "dialogue", texts, fields=said)
    if "label" not in values and len(texts) == 1:
        return Example(where, "text", texts, fields=said)
    label = checked_label(values.get("label"), where)
    return Example(where, "labelled", texts, label=label, fields=said)


def _form_of(found: set[str], mapped: set[str]) -> tuple[str, ...] | None:
    """Returns the names that a record's form may use: one with mapped names first."""
    fitting = [form for needed, form in _FORMS.items() if {*needed} <= found]
    if mapped:
        return next((form for form in fitting if mapped & {*form}), None)
    if {"instruction", "output"} <= found:  # their `text`, if any, is all of it
        return _ALPACA
    return next(iter(fitting), None)


def _alpaca(
    where: str, fields: Mapping[str, Any], has_template: bool, said: str
) -> Example:
    task = _text(where, "instruction", fields["instruction"])
    answer = _text(where, "output", fields["output"])
    given = fields.get("input") or ""
    if not isinstance(task, str) or not isinstance(given, str):
        raise DataError(f"{where}: expected text in 'instruction' and 'input'")
    if has_template:
        user = f"{task}\n\n{given}" if given else task
        roles = (("user", user), ("assistant", answer))
        messages = [{"role": role, "content": text} for role, text in roles]
        return Example(where, "dialogue", (), messages, fields=said)
    # The headings of Stanford's own training.
    given = f"### Input:\n{given}\n\n" if given else ""
    prompt = f"### Instruction:\n{task}\n\n{given}### Response:\n"
    return Example(where, "dialogue", (prompt, answer), fields=said)


def _share_gpt(where: str, turns: Any) -> Any:
    if not isinstance(turns, list):
        return turns
    found = []
    for number, turn in enumerate(turns, 1):
        if isinstance(turn, dict) and turn.get("role") is None:
            said = turn.get("from")
            if not isinstance(said, str) or "value" not in turn:
                raise DataError(
                    f"{where}: turn {number}: expected 'from' and 'value' in "
                    f"'conversations', found {shown_names(set(turn)) or 'neither'}"
                )
            turn = {"role": _SPEAKERS.get(said, said), "content": turn["value"]}
        found.append(turn)
    return found


def _text(where: str, name: str, value: Any) -> Text:
    if not isinstance(value, str | bytes) or not value:
        found = "an empty one" if value in ("", b"") else f"a {type(value).__name__}"
        raise DataError(f"{where}: expected text in field {name!r}, found {found}")
    return value


def _messages(where: str, messages: Any) -> list[Message]:
    if not isinstance(messages, list) or not messages:
        raise DataError(
            f"{where}: expected a list of messages, found {shown(messages)}"
        )
    roles = []
    for number, message in enumerate(messages, 1):
        roles.append(message.get("role") if isinstance(message, dict) else None)
        if not isinstance(roles[-1], str):
            raise DataError(
                f"{where}: message {number}: expected a role of {_ROLES}, found "
                f"{shown(roles[-1])}"
            )
    if "assistant" not in roles:
        raise DataError(
            f"{where}: expected a message of the assistant, from which the model "
            f"learns; found roles {shown_names(set(roles))}"
        )
    return messages


# --- classes -------------------------------------------------------------------------


def checked_label(label: Any, where: str) -> Label:
    """Returns a label that is a number or a name.

    Raises:
      DataError: it is something else.
    """
    is_number = type(label) is int and 0 <= label < _MOST_LABELS
    if not is_number and not (isinstance(label, str) and label):
        raise DataError(
            f"{where}: expected an integer label from 0 to {_MOST_LABELS - 1}, or a "
            f"class's name, found {shown(label)}; number the classes from 0"
        )
    return label


def classes_of(labels: Sequence[Label], where: str) -> dict[Label, int]:
    """Returns the numbers of classes: their own, or of names their places in order.

    Raises:
      DataError: some labels are names, some are numbers.
    """
    names = sorted({label for label in labels if isinstance(label, str)})
    numbers = sorted({label for label in labels if isinstance(label, int)})
    if names and numbers:
        raise DataError(
            f"{where}: expected labels that are all names or all numbers, found "
            f"{shown_names(names)} and {numbers[0]}"
        )
    if all(name.isdecimal() and len(name) < 10 for name in names):  # as CSV has them
        return {label: int(label) for label in (*names, *numbers)}
    return {name: number for number, name in enumerate(names)}


def numbered(
    labels: Sequence[Label], classes: Mapping[Label, int], where: str
) -> list[int]:
    """Returns the numbers of labels.

    Raises:
      DataError: a label is none of the training data.
    """
    if wrong := {str(label) for label in labels if label not in classes}:
        known = shown_names({str(label) for label in classes})
        raise DataError(
            f"{where}: expected the labels of --data, {known}, found "
            f"{shown_names(wrong)}, which it lacks; train on examples of them, too, or "
            "leave them out"
        )
    return [classes[label] for label in labels]


def num_classes(labels: Sequence[int], where: str, num_named: int = 0) -> int:
    """Returns the number of classes: those with names, or up to the largest label.

    Raises:
      DataError: a label is too large.
    """
    most, limit = max(labels), max(2, len(labels))
    if not num_named and most >= limit:
        raise DataError(
            f"{where}: expected labels of 0 to {limit - 1} ({len(labels)} examples), "
            f"found {most}; number the classes from 0"
        )
    return num_named or max(2, most + 1)
