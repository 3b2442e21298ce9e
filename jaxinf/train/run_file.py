"""A run as a file: the trainer's flags in TOML, read and written.

    batch-size = 16
    data = ["corpus/**/*.txt"]
    memory = "4GiB"

Invariant: a key is a flag's name and a value what the flag takes, of TOML's own type.
What is written reads back as the same run from any directory.
"""

import dataclasses
import datetime
import glob
import json
import os
import tomllib
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin

from jaxinf.command_line import Flag, UsageError, did_you_mean, flags_of
from jaxinf.terminal import exact_bytes
from jaxinf.train.config import TrainConfig
from jaxinf.typing import JsonValue

NOT_IN_FILES = (*("config", "write-config", "restore", "dry-run", "machine", "trace"),)
"""Flags of one start of a run, not of the run."""

_MOST_BYTES = 1 << 20
_WORDS = {bool: "true or false", int: "a whole number", float: "a number"}
_WORDS |= {str: "a text in quotes", Path: "a path in quotes"}
_GLOB = frozenset("*?[")


def read_run(path: Path, *, given: TrainConfig | None = None) -> TrainConfig:
    """Reads a run's file; blocks.

    Args:
      given: what the command line says by itself. A list of it replaces the file's.

    Raises:
      UsageError: names the file, and each key that is unknown or has a wrong value.
    """
    flags = {flag.name: flag for flag in flags_of(TrainConfig)}
    values: dict[str, Any] = {}
    problems = []
    for key, value in _document(path).items():
        try:
            flag = _flag(flags, key, value)
            if flag.field.name in values:
                raise ValueError("set twice, once with - and once with _")
            values[flag.field.name] = _read(flag, value)
        except ValueError as error:
            problems.append(f"{_quoted(key)}: {error}")
    if problems:
        listed = "\n  ".join(problems)
        raise UsageError(f"--config {path}: expected a run's settings, got\n  {listed}")
    if given is not None:
        # A repeated flag would be added to the default's list.
        values = {
            name: value
            for name, value in values.items()
            if not (isinstance(value, tuple) and getattr(given, name))
        }
    return TrainConfig(**values)


def _document(path: Path) -> Mapping[str, Any]:
    try:
        with open(os.path.expanduser(path), "rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        found = error.strerror if isinstance(error, OSError) else error
        raise UsageError(
            f"--config {path}: expected a file with a run's settings, found: {found}"
        ) from error
    if len(content) > _MOST_BYTES:
        raise UsageError(f"--config {path}: expected at most 1 MiB; is it the file?")
    try:
        return tomllib.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"--config {path}: expected TOML, such as steps = 100 in a line, found: "
            f"{error}"
        ) from error


def _flag(flags: Mapping[str, Flag], key: str, value: Any) -> Flag:
    """Returns the flag of a key.

    Raises:
      ValueError: no run has it.
    """
    name = key.replace("_", "-")
    if name in NOT_IN_FILES:
        raise ValueError(f"belongs to one start, not to the run; give --{name} instead")
    if name in flags:
        return flags[name]
    if isinstance(value, dict):
        raise ValueError("a table; settings of a run are not in tables")
    near = did_you_mean(name, [*flags]) or "--help lists them"
    raise ValueError(f"no setting of a run; {near}")


# --- one value -----------------------------------------------------------------------


def _read(flag: Flag, value: Any) -> Any:
    """Returns a value of TOML as the flag's.

    Raises:
      ValueError: says what was expected, and what was found.
    """
    if flag.constructor is not None:
        return _constructed(flag, value)
    kind = _kind(flag)
    if kind is not tuple:
        return _one(flag, kind, value)
    if not isinstance(value, list):
        raise ValueError(f'expected a list, such as ["a", "b"], got {_shown(value)}')
    (element, *_) = get_args(flag.type)
    return tuple(_one(flag, element, item) for item in value)


def _kind(flag: Flag) -> Any:
    """Returns the Python type of a flag's value, None aside."""
    if flag.choices:
        return str
    if get_origin(flag.type) is tuple:
        return tuple
    return next((t for t in get_args(flag.type) if t is not NoneType), flag.type)


def _one(flag: Flag, kind: Any, value: Any) -> Any:
    if kind is float and _is_int(value):
        value = float(_bounded(value))
    accepted = str if kind is Path else kind
    if type(value) is not accepted:
        expected = f"one of {', '.join(flag.choices)}" if flag.choices else _WORDS[kind]
        raise ValueError(f"expected {expected}, got {_shown(value)}")
    if accepted is int:
        return _bounded(value)
    if accepted is not str:
        return value
    if "\0" in value:
        raise ValueError("expected a text without NUL, got one with it")
    if flag.choices and value not in flag.choices:
        near = did_you_mean(value, flag.choices)
        raise ValueError(
            f"expected one of {', '.join(flag.choices)}, got {_shown(value)}"
            f"{near and '; '}{near}"
        )
    return kind(value)


def _constructed(flag: Flag, value: Any) -> Any:
    """Reads what the command line reads from a text of a form of its own."""
    if not isinstance(value, str) and not _is_int(value):
        form = flag.constructor.metavar
        raise ValueError(f"expected {form} in quotes, or a number, got {_shown(value)}")
    text = value if isinstance(value, str) else str(_bounded(value))
    return flag.constructor.instance_from_str([text])


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _bounded(value: int) -> int:
    """Refuses what is no integer of TOML; Python would not even print some of them."""
    if not -(1 << 63) <= value < 1 << 63:
        raise ValueError("expected a number of at most 64 bits, got a larger one")
    return value


def _shown(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case str():
            return f"the text {json.dumps(_short(value), ensure_ascii=False)}"
        case int():
            return f"the whole number {_bounded(value)}"
        case float():
            return f"the number {value!r}"
        case dict():
            return "a table"
        case list():
            return "a list"
        case datetime.date() | datetime.time():
            return f"the date or time {value}"
    raise AssertionError(type(value))


def _quoted(key: str) -> str:
    is_bare = key.isascii() and key.replace("-", "").replace("_", "").isalnum()
    return _short(key) if is_bare else json.dumps(_short(key), ensure_ascii=False)


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:59] + "…"


# --- writing -------------------------------------------------------------------------


def text_of_run(config: TrainConfig) -> str:
    """Returns a run as TOML: what differs from the defaults, and these as comments.

    Paths are absolute. `restore` is left out, so that the file resumes the run.
    """
    if config.store is None:
        config = dataclasses.replace(config, log_dir=config.logs)
    lines = [
        f"# A run of jaxinf {metadata.version('jaxinf')}. It starts, or goes on, with",
        "#   python -m jaxinf.train --config FILE",
        "# where flags win over the file. A line with # has the default.",
        "",
    ]
    for flag in flags_of(TrainConfig):
        value = getattr(config, flag.field.name)
        if flag.name in NOT_IN_FILES:
            continue
        mark = "# " if value == flag.field.default else ""
        text = "" if value is None else _toml(_plain(flag, value))
        try:
            text.encode()
        except UnicodeEncodeError:
            mark, text = "# ", f"{text!a} is not UTF-8; give --{flag.name}"
        lines.append(f"{mark}{flag.name} = {text}".rstrip())
    return "\n".join(lines) + "\n"


def write_run(config: TrainConfig, path: Path) -> None:
    """Writes a run to a new file.

    Raises:
      UsageError: there is something at the path, or it cannot be written.
    """
    try:
        with open(os.path.expanduser(path), "x", encoding="utf-8") as file:
            file.write(text_of_run(config))
    except OSError as error:
        raise UsageError(
            f"--write-config {path}: expected a place for a new file, found: "
            f"{error.strerror}; name another"
        ) from error


def words_of_run(config: TrainConfig, base: TrainConfig | None = None) -> list[str]:
    """Returns a run as the words of a command line: what differs from another's.

    A start's own flags are left out, but for ``--machine``.

    Args:
      base: the other; by default one without flags.
    """
    words: list[str] = []
    base = base or TrainConfig()
    for flag in flags_of(TrainConfig):
        value, name = getattr(config, flag.field.name), f"--{flag.name}"
        is_of_run = flag.name == "machine" or flag.name not in NOT_IN_FILES
        if value == getattr(base, flag.field.name) or not is_of_run:
            continue
        if isinstance(value, bool):
            words.append(name if value else f"--no-{flag.name}")
        elif flag.name == "csd-root":  # one drive each time
            words += [word for root in value for word in (name, str(root))]
        else:
            values = value if isinstance(value, tuple) else (value,)
            words += [name, *(str(_formed(flag, one)) for one in values)]
    return words


def _plain(flag: Flag, value: Any) -> JsonValue:
    """Returns a flag's value as it stands in a file."""
    if isinstance(value, Path):
        return str(Path(os.path.expanduser(value)).absolute())
    if isinstance(value, tuple):
        is_data = flag.name in ("data", "validation")
        return [_absolute(v) if is_data else _plain(flag, v) for v in value]
    return _formed(flag, value)


def _formed(flag: Flag, value: Any) -> Any:
    if flag.constructor is None or isinstance(value, str | None):
        return value
    if flag.constructor.metavar == "BYTES":
        return exact_bytes(value)
    return flag.constructor.str_from_instance(value)[0]


def _absolute(pattern: str) -> str:
    """Returns a name, or a pattern, of files that means the same from anywhere."""
    pattern = os.path.expanduser(pattern)
    here = os.getcwd()
    if _GLOB & {*pattern} and not os.path.exists(pattern):
        here = glob.escape(here)
    return os.path.join(here, pattern)


def _toml(value: JsonValue) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
