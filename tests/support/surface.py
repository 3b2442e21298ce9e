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
from collections.abc import Iterator
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


def lines() -> Iterator[str]:
    """Yields the surface, a name a line."""
    public = [getattr(jaxinf, name) for name in sorted(jaxinf.__all__)]
    classes = [item for item in public if inspect.isclass(item)]
    records: dict[str, type] = {}
    for item in public:
        if not inspect.isclass(item):
            yield from _wrapped(f"jaxinf.{item.__name__}{_signature(item)}")
    for kind in classes:
        if issubclass(kind, Exception):
            yield from _class_lines(kind, records)
    for kind in classes:
        if not issubclass(kind, Exception):
            yield ""
            yield from _class_lines(kind, records)
    for name in sorted(records.keys() - set(jaxinf.__all__) - UNSTABLE):
        yield ""
        yield from _class_lines(records[name], {}, of="returned")
    yield from _command_lines("jaxinf", COMMANDS)
    yield from _command_lines("python -m jaxinf.train", TrainConfig)
    yield ""
    yield "metrics.jsonl of jaxinf.train"
    for field in dataclasses.fields(StepLine):
        yield f"  {field.name}: {_type(field.type)}"


def _class_lines(
    kind: type, records: dict[str, type], of: str = "jaxinf"
) -> Iterator[str]:
    """Yields a class and its members; adds the records that these return."""
    bases = [base.__name__ for base in kind.__bases__ if base.__name__ in dir(jaxinf)]
    yield f"{of}.{kind.__name__}" + (f"({', '.join(bases)})" if bases else "")
    for name, member in members_of(kind):
        getter = getattr(member, "fget", None) or getattr(member, "func", None)
        if getter is not None:
            result = inspect.signature(getter).return_annotation
            yield from _wrapped(f"  .{name}: {_type(result)}")
        else:
            function = getattr(kind, name)
            result = inspect.signature(function).return_annotation
            yield from _wrapped(f"  .{name}{_signature(function)}")
        records |= {one.__name__: one for one in _own_classes(result)}
    hints = typing.get_type_hints(kind) if _is_record(kind) else {}
    for name, hint in hints.items():
        if not name.startswith("_"):
            yield from _wrapped(f"  .{name}: {_type(hint)}")
            records |= {one.__name__: one for one in _own_classes(hint)}


def _is_record(kind: type) -> bool:
    return dataclasses.is_dataclass(kind) or hasattr(kind, "_fields")


def members_of(kind: type) -> Iterator[tuple[str, Any]]:
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


def _own_classes(annotation: Any) -> Iterator[type]:
    if inspect.isclass(annotation) and annotation.__module__.startswith("jaxinf"):
        yield annotation
    for one in typing.get_args(annotation):
        yield from _own_classes(one)


def _signature(function: Any) -> str:
    found = inspect.signature(function)
    parts, is_keyword = [], False
    for one in found.parameters.values():
        if one.kind is one.KEYWORD_ONLY and not is_keyword:
            parts.append("*")
            is_keyword = True
        text = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
        is_keyword |= one.kind is one.VAR_POSITIONAL
        text += one.name
        if one.annotation is not one.empty:
            text += f": {_type(one.annotation)}"
        if one.default is not one.empty:
            text += f" = {one.default!r}"
        parts.append(text)
    if parts[:1] == ["self"]:
        del parts[0]
    return f"({', '.join(parts)}) -> {_type(found.return_annotation)}"


def _type(annotation: Any) -> str:
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


def _commands_of(command: Any) -> dict[str, Any]:
    """Returns commands by their words: those of a union, or of a command's action."""
    union = command
    if dataclasses.is_dataclass(command):
        hints = typing.get_type_hints(command, include_extras=True)
        union = hints.get("action")
    members = typing.get_args(union)
    return {member.__name__.lower(): member for member in members}


def _command_lines(program: str, command: Any) -> Iterator[str]:
    below = _commands_of(command)
    if not below:
        yield ""
        flags = list(flags_of(command))
        words = [_positional(flag) for flag in flags if flag.is_positional]
        yield " ".join([program, *words])
        for flag in flags:
            if not flag.is_positional:
                yield from _wrapped(f"  --{flag.name}: {_flag(flag)}")
    for name, one in below.items():
        yield from _command_lines(f"{program} {name}", one)


@dataclasses.dataclass(frozen=True)
class Flag:
    """A field; `constructor` makes its value of a text, if the type does not."""

    field: dataclasses.Field[Any]
    type: Any
    name: str
    constructor: Any
    is_positional: bool


def flags_of(command: Any) -> Iterator[Flag]:
    """Yields the fields that a command line can set, in their order."""
    hints = typing.get_type_hints(command, include_extras=True)
    for field in dataclasses.fields(command):
        hint = hints[field.name]
        is_marked = typing.get_origin(hint) is typing.Annotated
        kind, *marks = typing.get_args(hint) if is_marked else (hint,)
        words = [getattr(mark, "__name__", "") or repr(mark) for mark in marks]
        names = [name for mark in marks if (name := getattr(mark, "name", None))]
        specs = [mark for mark in marks if hasattr(mark, "instance_from_str")]
        if "Suppress" not in words:
            yield Flag(
                *(field, kind, (names or [field.name.replace("_", "-")])[0]),
                *((specs or [None])[0], "Positional" in words),
            )


def _positional(flag: Flag) -> str:
    name = flag.name.upper()
    if typing.get_origin(flag.type) is tuple:
        name += "..."
    return name if _default(flag) is dataclasses.MISSING else f"[{name}]"


def _flag(flag: Flag) -> str:
    kind = getattr(flag.constructor, "metavar", None) or _type(flag.type)
    value = _default(flag)
    return kind if value is dataclasses.MISSING else f"{kind} = {value!r}"


def _default(flag: Flag) -> Any:
    if flag.field.default_factory is not dataclasses.MISSING:
        return flag.field.default_factory()
    return flag.field.default


def _wrapped(line: str) -> Iterator[str]:
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
