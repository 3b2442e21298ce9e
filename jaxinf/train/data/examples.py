"""Turns records into examples, and names the fields that they come from.

    {"text": …}                              the text is learned
    {"prompt": …, "response": …}             the response is learned
    {"messages": [{"role", "content"}, …]}   the assistant's messages are learned
    {"text": …, "label": …}                  the label is learned
    {"text": …, "text_pair": …, "label": …}  the label of two texts is learned

Invariant: a record has exactly one of these forms, or is refused with file and line. A
class has the same number in all parts of the data.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from jaxinf.documents import shown
from jaxinf.train.data.errors import DataError, shown_names
from jaxinf.train.data.files import PLAIN_TEXT, Record

ExampleKind: TypeAlias = Literal["text", "dialogue", "labelled"]
Text: TypeAlias = str | bytes
Message: TypeAlias = Mapping[str, Any]
Label: TypeAlias = int | str

_FORMS = {  # by the fields that a record must have
    ("text",): ("text", "text_pair", "label"),
    ("messages",): ("messages", "tools"),
    ("prompt", "response"): ("prompt", "response"),
}
_NAMES = [name for form in _FORMS.values() for name in form]
_ROLES = ("system", "user", "assistant", "tool")
_MOST_LABELS = 1 << 31  # that an int32 can tell apart


class Example(NamedTuple):
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
    if len(found) < len(pairs) or not all(found.values()) or {*found} - {*_NAMES}:
        raise DataError(
            f"--fields {given}: expected our names, each once, with yours: "
            f"prompt=instruction,response=output; ours are {', '.join(_NAMES)}"
        )
    return found


def used_fields(mapping: Mapping[str, str]) -> set[str]:
    """Returns the names of all fields that a record may have a use for."""
    return {*_NAMES, *mapping.values()}


def example_of(record: Record, mapping: Mapping[str, str], unused: set[str]) -> Example:
    """Returns the example of a record.

    Args:
      mapping: fields of records by our names; a form with one of them comes first.
      unused: names of other fields, which are added.

    Raises:
      DataError: the record has no known form.
    """
    where, raw = record.where, record.fields
    if isinstance(raw.get(PLAIN_TEXT), bytes):  # JSON has no bytes
        return Example(where, "text", (raw[PLAIN_TEXT],))
    given = {name for name, value in raw.items() if value is not None}
    free = {*_NAMES} - {*mapping.values()}
    sources = {n: mapping.get(n, n) for n in _NAMES if n in mapping or n in free}
    found = {name: source for name, source in sources.items() if source in given}
    fitting = [form for needed, form in _FORMS.items() if {*needed} <= {*found}]
    form = next((f for f in fitting if not mapping or {*mapping} & {*f}), None)
    all_fields = given | {*record.unread}
    if form is None:
        raise DataError(
            f"{where}: expected {_wanted(mapping, found)} (--fields gives them other "
            f"names); found {shown_names(all_fields) or 'no fields'}"
        )
    used = {name: found[name] for name in form if name in found}
    unused |= all_fields - {*used.values()}
    values = {name: raw[source] for name, source in used.items()}
    said = ",".join(n if n == source else f"{n}={source}" for n, source in used.items())
    if "messages" in values:
        messages, tools = _messages(where, values["messages"]), values.get("tools")
        return Example(where, "dialogue", (), messages, tools, fields=said)
    own = {name: value for name, value in values.items() if name != "label"}
    texts = tuple(_text(where, used[n] or n, value) for n, value in own.items())
    if "prompt" in values:
        return Example(where, "dialogue", texts, fields=said)
    if "label" not in values and len(texts) == 1:
        return Example(where, "text", texts, fields=said)
    label = checked_label(values.get("label"), where)
    return Example(where, "labelled", texts, label=label, fields=said)


def _wanted(mapping: Mapping[str, str], found: Mapping[str, str]) -> str:
    wanted = "a field 'text', the fields 'prompt' and 'response', or 'messages'"
    if "text_pair" in found:
        wanted = f"a field 'text' beside {found['text_pair']!r}"
    if asked := [source for name, source in mapping.items() if name not in found]:
        wanted = f"a field {asked[0]!r}, as --fields names it"
    return wanted


def _text(where: str, name: str, value: Any) -> Text:
    if not isinstance(value, str | bytes) or not value:
        found = "an empty one" if value in ("", b"") else f"a {type(value).__name__}"
        raise DataError(f"{where}: expected text in field {name!r}, found {found}")
    return value


def _messages(where: str, turns: Any) -> list[Message]:
    if not isinstance(turns, list) or not turns:
        raise DataError(f"{where}: expected a list of messages, found {shown(turns)}")
    for number, turn in enumerate(turns, 1):
        if not isinstance(turn, dict) or not isinstance(turn.get("role"), str):
            raise DataError(
                f"{where}: message {number}: expected an object with a role of "
                f"{_ROLES} and its content, found {shown(turn)}"
            )
    roles = {message["role"] for message in turns}
    if "assistant" not in roles:
        raise DataError(
            f"{where}: expected a message of the assistant, from which the model "
            f"learns; found roles {shown_names(roles)}"
        )
    return turns


# --- classes -------------------------------------------------------------------------


def checked_label(label: Any, where: str) -> Label:
    """Returns a label that is a number or a name, or refuses it."""
    is_number = type(label) is int and 0 <= label < _MOST_LABELS
    if not is_number and not (isinstance(label, str) and label):
        raise DataError(
            f"{where}: expected an integer label from 0 to {_MOST_LABELS - 1}, or a "
            f"class's name, found {shown(label)}; number the classes from 0"
        )
    return label


def numbered(
    labels: Sequence[Label], classes: dict[Label, int], where: str
) -> list[int]:
    """Returns the numbers of labels: their own, or of names their places in order.

    Args:
      classes: numbers of the training data's classes; set if it is empty.

    Raises:
      DataError: some labels are names, some are numbers, or the training data lacks
        one.
    """
    names = sorted({label for label in labels if isinstance(label, str)})
    numbers = sorted({label for label in labels if isinstance(label, int)})
    if names and numbers:
        raise DataError(
            f"{where}: expected labels that are all names or all numbers, found "
            f"{shown_names(names)} and {numbers[0]}"
        )
    if not classes:
        is_digits = all(n.isdecimal() and len(n) < 10 for n in names)  # as CSV has them
        both = [(name, int(name) if is_digits else n) for n, name in enumerate(names)]
        classes |= {**dict(both), **{number: number for number in numbers}}
    if wrong := {str(label) for label in labels if label not in classes}:
        known = shown_names({str(label) for label in classes})
        raise DataError(
            f"{where}: expected the labels of --data, {known}, found "
            f"{shown_names(wrong)}, which it lacks; train on examples of them, too, or "
            "leave them out"
        )
    return [classes[label] for label in labels]


def num_classes(labels: Sequence[int]) -> int:
    """Returns the number of classes, up to the largest label; refuses far ones."""
    most, limit = max(labels), max(2, len(labels))
    if most >= limit:
        raise DataError(
            f"labels: expected labels of 0 to {limit - 1} ({len(labels)} examples), "
            f"found {most}; number the classes from 0"
        )
    return max(2, most + 1)
