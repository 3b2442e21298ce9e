"""A run as a file: the trainer's flags in TOML, read and written.

    batch-size = 16
    data = ["corpus/**/*.txt"]
    memory = "4GiB"

Invariant: a key is a flag's name and a value what the flag takes, of TOML's own type.
What is written reads back as the same run from any directory.
"""

import dataclasses
import glob
import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from jaxinf.command_line import Flag, UsageError, did_you_mean, flags_of
from jaxinf.documents import convert, shown
from jaxinf.train.config import TrainConfig
from jaxinf.typing import JsonValue

NOT_IN_FILES = ("config", "restore", "trace", "eval-only")
"""Flags of one start of a run, not of the run."""

_MOST_BYTES = 1 << 20
_OF_THE_RUN = ("data", "validation", "tokenizer", "model", "preset", "model_file")
_OF_THE_RUN += (
    "source",
    "task",
    "batch_size",
    "seq_len",
    "optimizer",
    "lora",
    "freeze",
)


def kept_run(config: TrainConfig) -> Path | None:
    """Returns the file that a store's run has kept, unless `config` says what it is."""
    default = TrainConfig()
    if any(getattr(config, name) != getattr(default, name) for name in _OF_THE_RUN):
        return None
    store = os.path.expanduser(config.store or os.devnull)
    if not os.path.exists(os.path.join(store, "current")):
        return None
    path = config.logs / "config.toml"
    return path if path.is_file() else None


def read_run(
    path: Path, *, given: TrainConfig | None = None, words: Sequence[str] = ()
) -> TrainConfig:
    """Reads a run's file; blocks.

    Args:
      given: what the command line says by itself. A list of it replaces the file's.
      words: the command line, of which --steps and --epochs replace each other.

    Raises:
      UsageError: names the file, and each key that is unknown or has a wrong value.
    """
    flags = {f.name: f for f in flags_of(TrainConfig) if f.name not in NOT_IN_FILES}
    values: dict[str, Any] = {}
    problems = []
    for key, value in _document(path).items():
        name = key.replace("_", "-")
        try:
            if name not in flags:
                near = did_you_mean(name, [*flags]) or "--help-all lists them"
                raise ValueError(f"{shown(key)}: no setting of a run's file; {near}")
            if flags[name].field.name in values:
                raise ValueError(f"{key}: set twice, once with - and once with _")
            values[flags[name].field.name] = _read(flags[name], value)
        except ValueError as error:
            problems.append(str(error))
    if problems:
        listed = "\n  ".join(problems)
        raise UsageError(
            f"--config {path}: expected a run's settings, found\n  {listed}"
        )
    if given is None:
        return TrainConfig(**values)
    for one, other in (("steps", "epochs"), ("epochs", "steps")):
        if any(word.partition("=")[0] == f"--{one}" for word in words):
            values.pop(other, None)
    # A repeated flag would be added to the default's list.
    lists = {name for name, value in values.items() if isinstance(value, tuple)}
    replaced = {name for name in lists if getattr(given, name)}
    return TrainConfig(**{n: v for n, v in values.items() if n not in replaced})


def _document(path: Path) -> Mapping[str, Any]:
    try:
        with open(os.path.expanduser(path), "rb") as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise UsageError(
                f"--config {path}: expected at most 1 MiB; is it the file?"
            )
        return tomllib.loads(content.decode("utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(
            f"--config {path}: expected a file with a run's settings in TOML, such as "
            f"steps = 100 in a line, found: {error}"
        ) from error


def _read(flag: Flag, value: Any) -> Any:
    """Returns a value of TOML as the flag's.

    Raises:
      ValueError: says what was expected, and what was found.
    """
    if type(value) is int and not -(1 << 63) <= value < 1 << 63:
        raise ValueError(f"{flag.name}: expected a number of at most 64 bits")
    for text in value if isinstance(value, list) else [value]:
        if isinstance(text, str) and "\0" in text:
            raise ValueError(f"{flag.name}: expected a text without NUL")
    if flag.choices and value not in flag.choices:
        raise ValueError(
            f"{flag.name}: expected one of {', '.join(flag.choices)}, found "
            f"{shown(value)} {did_you_mean(str(value), flag.choices)}".rstrip()
        )
    if flag.constructor is None:
        return convert(value, flag.type, flag.name, dec_hook=_path)
    if type(value) not in (str, int):
        form = flag.constructor.metavar
        raise ValueError(
            f"{flag.name}: expected {form} in quotes, or a number, found {shown(value)}"
        )
    try:
        return flag.constructor.instance_from_str([str(value)])
    except ValueError as error:
        raise ValueError(f"{flag.name}: {error}") from error


def _path(kind: type, value: Any) -> Any:
    if kind is not Path or not isinstance(value, str):
        raise ValueError("expected a path in quotes")
    return Path(value)


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
        plain = _plain(flag, value)
        if flag.name == "validation" and config.held_out_share is not None:
            plain = [*value]  # a share
        text = "" if value is None else _toml(plain)
        try:
            text.encode()
        except UnicodeEncodeError:
            mark, text = "# ", f"{text!a} is not UTF-8; give --{flag.name}"
        lines.append(f"{mark}{flag.name} = {text}".rstrip())
    return "\n".join(lines) + "\n"


def _plain(flag: Flag, value: Any) -> JsonValue:
    """Returns a flag's value as it stands in a file."""
    if isinstance(value, tuple):
        return [_plain(flag, one) for one in value]
    if isinstance(value, Path) or flag.name in ("data", "validation"):
        name, here = os.path.expanduser(value), os.getcwd()
        is_pattern = isinstance(value, str) and {*name} & {*"*?["}
        if is_pattern and not os.path.exists(name):
            here = glob.escape(here)
        return os.path.join(here, name)
    if value is None or flag.constructor is None or isinstance(value, str):
        return value
    return flag.constructor.str_from_instance(value)[0]


def _toml(value: JsonValue) -> str:
    if isinstance(value, float):  # JSON has no infinity
        return repr(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
