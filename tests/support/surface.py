"""The public surface as text; run as a program, this file writes ``tests/surface.txt``.

It has each name of `jaxinf` with its signature, the public members of classes, the
records that these return, the commands of ``jaxinf`` with their arguments, and the
trainer's flags and metrics. No class has a constructor here: functions make objects.
"""

import dataclasses
import functools
import inspect
import sys
import types
import typing
from pathlib import Path
from typing import Any

import jaxinf
from jaxinf.cli.commands import COMMANDS
from jaxinf.train.config import TrainConfig
from jaxinf.train.metrics import StepLine
from jaxinf.typing import JsonValue

SURFACE = Path(__file__).parents[1] / "surface.txt"
REMEDY = (
    "if the public surface is meant to change, keep to docs/stability.md, say so in "
    f"CHANGELOG.md, and write the list anew: python tests/support/{Path(__file__).name}"
)
WIDTH = 88

# Descriptions of a plan, for people; docs/stability.md says that they may change.
UNSTABLE = {"Plan"}


def lines():
    """Yields the surface, a name a line."""
    public = [getattr(jaxinf, name) for name in sorted(jaxinf.__all__)]
    classes = [item for item in public if inspect.isclass(item)]
    records: dict[str, type] = {}
    for item in public:
        if not inspect.isclass(item):
            yield from _wrapped(f"jaxinf.{item.__name__}{_signature(item)}")
    for kind in sorted(classes, key=lambda kind: not issubclass(kind, Exception)):
        yield from [""] * (not issubclass(kind, Exception))
        yield from _class_lines(kind, records)
    for name in sorted(records.keys() - set(jaxinf.__all__) - UNSTABLE):
        yield ""
        yield from _class_lines(records[name], {}, of="returned")
    yield from _command_lines("jaxinf", COMMANDS)
    yield from _command_lines("python -m jaxinf.train", TrainConfig)
    yield from ("", "metrics.jsonl of jaxinf.train")
    for field in dataclasses.fields(StepLine):
        yield f"  {field.name}: {_type(field.type)}"


def _class_lines(kind, records, of="jaxinf"):
    """Yields a class and its members; adds the records that these return."""
    bases = [base.__name__ for base in kind.__bases__ if base.__name__ in dir(jaxinf)]
    yield f"{of}.{kind.__name__}" + (f"({', '.join(bases)})" if bases else "")
    for name, member in members_of(kind):
        getter = getattr(member, "fget", None) or getattr(member, "func", None)
        result = inspect.signature(getter or member).return_annotation
        records |= {one.__name__: one for one in _own_classes(result)}
        if getter is not None:
            yield from _wrapped(f"  .{name}: {_type(result)}")
        else:
            yield from _wrapped(f"  .{name}{_signature(member)}")
    is_record = dataclasses.is_dataclass(kind) or hasattr(kind, "_fields")
    for name, hint in (typing.get_type_hints(kind) if is_record else {}).items():
        if not name.startswith("_"):
            yield from _wrapped(f"  .{name}: {_type(hint)}")
            records |= {one.__name__: one for one in _own_classes(hint)}


def members_of(kind):
    """Yields public methods and properties, those of private bases included."""
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.partition(".")[0] == "jaxinf":
            found |= vars(base)
    for name in sorted(found):
        member = found[name]
        is_public = name in ("__call__", "__enter__") or not name.startswith("_")
        kinds = (property, functools.cached_property, types.FunctionType)
        if is_public and isinstance(member, kinds):
            yield name, member


def _own_classes(annotation):
    if inspect.isclass(annotation) and annotation.__module__.startswith("jaxinf"):
        yield annotation
    for one in typing.get_args(annotation):
        yield from _own_classes(one)


class _Text(str):
    """A text that a signature shows as it is."""

    __repr__ = str.__str__


def _signature(function):
    found = inspect.signature(function)
    parts = [
        one.replace(annotation=_Text(_type(one.annotation)))
        for one in found.parameters.values()
        if one.name != "self"
    ]
    result = _Text(_type(found.return_annotation))
    return str(found.replace(parameters=parts, return_annotation=result))


def _type(annotation):
    """Returns a type as it is written, the same in every Python, without modules."""
    if annotation is None or annotation is types.NoneType:
        return "None"
    if annotation is Ellipsis:
        return "..."
    if annotation == JsonValue:
        return "JsonValue"
    if isinstance(annotation, str | typing.ForwardRef):
        return str(getattr(annotation, "__forward_arg__", annotation))
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return " | ".join(map(repr, parts))
    if origin in (typing.Union, types.UnionType):
        return " | ".join(map(_type, parts))
    if origin is typing.Annotated:
        return _type(parts[0])
    if isinstance(annotation, list):
        return f"[{', '.join(map(_type, annotation))}]"
    name = getattr(origin or annotation, "__name__", None) or str(annotation)
    name = name.rpartition(".")[2]
    return f"{name}[{', '.join(map(_type, parts))}]" if parts else name


def _command_lines(program, command):
    """Yields a command's arguments, or those of the commands below it.

    These are the members of a union, or of its action.
    """
    union, hints = command, {}
    if dataclasses.is_dataclass(command):
        hints = typing.get_type_hints(command, include_extras=True)
        union = hints.get("action")
    for one in typing.get_args(union):
        kind, *_ = typing.get_args(one) or [one]
        word = kind.__name__.removesuffix("Command").lower()
        yield from _command_lines(f"{program} {word}", kind)
    if not typing.get_args(union):
        arguments, flags = [program], []
        for field in dataclasses.fields(command):
            text, is_positional = _argument(field, hints[field.name])
            (arguments if is_positional else flags).append(text)
        yield from ("", " ".join(arguments))
        for text in filter(None, flags):
            yield from _wrapped(text)


def _argument(field, hint):
    """Returns a field's text, empty if none can set it, and whether it has no name."""
    is_marked = typing.get_origin(hint) is typing.Annotated
    kind, *marks = typing.get_args(hint) if is_marked else (hint,)
    words = [getattr(mark, "__name__", "") or repr(mark) for mark in marks]
    if "Suppress" in words:
        return "", False
    names = [name for mark in marks if (name := getattr(mark, "name", None))]
    name, value = (names or [field.name.replace("_", "-")])[0], field.default
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    is_set = value is not dataclasses.MISSING
    if "Positional" in words:
        text = name.upper() + "..." * (typing.get_origin(kind) is tuple)
        return f"[{text}]" if is_set else text, True
    makers = [mark for mark in marks if hasattr(mark, "instance_from_str")]
    shown = getattr((makers or [None])[0], "metavar", None) or _type(kind)
    return f"  --{name}: {shown}" + (f" = {value!r}" if is_set else ""), False


def _wrapped(line):
    """Divides a long line after commas, so that a change is seen in one of them."""
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    while len(line) > WIDTH:
        at = line.rfind(", ", len(indent), WIDTH)
        if at < 0:
            break
        yield line[: at + 1]
        line = indent + line[at + 2 :]
    yield line


if __name__ == "__main__":
    SURFACE.write_text("\n".join(lines()) + "\n")
    print(f"written: {SURFACE}", file=sys.stderr)
