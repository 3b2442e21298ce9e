"""A run's settings as a file in TOML.

    batch-size = 16
    data = ["corpus/**/*.txt"]
    memory = "4GiB"

A key is the name of a flag and a value its argument: both are read as the words of a
command line.

Invariant: a file that is written reads back as the same run from any directory, and no
value is taken for a flag.
"""

import contextlib
import glob
import io
import json
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import tyro

from jaxinf.command_line import UsageError, did_you_mean
from jaxinf.documents import shorten
from jaxinf.terminal import exact_bytes
from jaxinf.train.config import FLAGS, TrainConfig
from jaxinf.typing import JsonValue

NOT_IN_FILES = ("config", "trace")
"""Flags of one start of a run, not of the run."""

_IN_FILES = {name: field for name, field in FLAGS.items() if name not in NOT_IN_FILES}
_INSTEAD = {  # a flag takes the place of others
    "from": ("model", "preset"),
    "model": ("from", "preset"),
    "preset": ("from",),
}


def parse_config(
    words: Sequence[str], prog: str = "python -m jaxinf.train"
) -> TrainConfig:
    """Returns the run of a command line, whose flags win over a file of --config.

    Raises:
      UsageError: A file cannot be read, or has a wrong value.
      SystemExit: The words do not parse.
    """
    names = {w[2:].partition("=")[0] for w in words if w.startswith("--")}
    names = {name.replace("_", "-").removeprefix("no-") for name in names}
    config = _parse_words(words, prog)
    if config.run_file is None:
        return config
    replaced = names.union(*(_INSTEAD.get(name, ()) for name in names))
    if config.model_file is not None:
        replaced.add("model")
    defaults = {FLAGS[n].name: FLAGS[n].default for n in replaced if n in FLAGS}
    run = replace(read_run_file(config.run_file), **defaults)
    return _parse_words(words, prog, default=run)


def _parse_words(
    words: Sequence[str], prog: str | None = None, default: TrainConfig | None = None
) -> TrainConfig:
    """Parses a command line, in which ``none`` may stand for None."""
    words = [re.sub(r"(?i)^(--[\w-]+=)?none$", r"\1None", word) for word in words]
    default = default or TrainConfig()
    return tyro.cli(TrainConfig, prog=prog, args=words, default=default)


def read_run_file(path: Path) -> TrainConfig:
    """Reads a run's file, or says what is wrong with it; blocks."""
    try:
        values = tomllib.loads(path.expanduser().read_text("utf-8-sig"))
    except (OSError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"--config {path}: expected a file with a run's settings in TOML, such as "
            f"steps = 100 in a line, found: {error}"
        ) from error
    output = io.StringIO()
    try:
        words = _command_line(values)
        with contextlib.redirect_stderr(output):
            return _parse_words(words)
    except SystemExit:
        text = " ".join(re.sub("[│─╭╮╰╯]|---+", " ", output.getvalue()).split())
        text = re.split("Argument helptext|For full helptext", text)[0]
        raise UsageError(f"--config {path}: {text.strip()}") from None
    except ValueError as error:
        raise UsageError(f"--config {path}: {error}") from error


def _command_line(values: Mapping[str, Any]) -> list[str]:
    """Returns values as a command line in which none of them is taken for a flag."""
    words = list[str]()
    for name, value in values.items():
        if name not in _IN_FILES:
            near = did_you_mean(name, _IN_FILES) or "--help lists them"
            raise ValueError(f"{shorten(name)}: no setting of a run's file; {near}")
        default = _IN_FILES[name].default
        if isinstance(default, bool):
            if not isinstance(value, bool):
                raise ValueError(
                    f"{name}: expected true or false, found {shorten(value)}"
                )
            words.append(f"--{name}" if value else f"--no-{name}")
            continue
        if isinstance(value, list) and not isinstance(default, tuple):
            raise ValueError(f"{name}: expected one value, found {shorten(value)}")
        items = value if isinstance(value, list) else [value]
        for item in items:
            is_text = isinstance(item, str) and not item.startswith("-")
            if type(item) not in (int, float) and (not is_text or "\0" in item):
                raise ValueError(
                    f"{name}: expected a number, or a text without NUL that does not "
                    f"begin with -, found {shorten(item)}"
                )
        if isinstance(default, tuple) and name != "csd-root":
            words += [f"--{name}", *map(str, items)]
        else:
            words += [f"--{name}={item}" for item in items]
    return words


def format_run(config: TrainConfig) -> str:
    """Returns a run as TOML with absolute paths; lines with defaults are comments."""
    if config.store is None:
        config = replace(config, log_dir=config.logs)
    lines = [
        f"# A run of jaxinf {metadata.version('jaxinf')}. It starts, or goes on, with",
        "#   python -m jaxinf.train --config FILE",
        "# where flags win over the file. A line with # has the default.",
        "",
    ]
    for name, field in _IN_FILES.items():
        mark = "# " if getattr(config, field.name) == field.default else ""
        value = _to_json(config, name, field.name)
        text = "" if value is None else _format_toml(value)
        lines.append(f"{mark}{name} = {text}".rstrip())
    return "\n".join(lines) + "\n"


def _to_json(config: TrainConfig, name: str, field: str) -> JsonValue:
    value = getattr(config, field)
    if name == "validation" and config.held_out_share is not None:
        return [*value]  # a share
    if isinstance(value, Path):
        return _absolute(value)
    if isinstance(value, tuple):
        are_paths = name in ("data", "validation", "csd-root")
        return [_absolute(item) if are_paths else str(item) for item in value]
    if name == "preset" and config.model_file is not None:
        return _absolute(config.model_file)
    if name in ("memory", "device-memory") and value is not None:
        return exact_bytes(value)
    return value


def _absolute(path: str | Path) -> str:
    name, directory = os.path.expanduser(path), os.getcwd()
    is_pattern = isinstance(path, str) and {*name} & {*"*?["}
    if is_pattern and not os.path.exists(name):
        directory = glob.escape(directory)
    return os.path.join(directory, name)


def _format_toml(value: JsonValue) -> str:
    if isinstance(value, float):  # JSON has no infinity
        return repr(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
