"""A run's settings as a file in TOML.

    batch-size = 16
    data = ["corpus/**/*.txt"]
    memory = "4GiB"

A key is a flag's name and a value what the flag takes: both are read as the words of a
command line.

Invariant: what is written reads back as the same run from any directory, and no value
is taken for a flag.
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
from jaxinf.documents import shown
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


def config_of(
    words: Sequence[str], prog: str = "python -m jaxinf.train"
) -> TrainConfig:
    """Returns the run that a command line asks for; its flags change that of --config.

    Raises:
      UsageError: names the file, each wrong value, and what to do.
      SystemExit: the words are no command line; says why.
    """
    names = {w[2:].partition("=")[0] for w in words if w.startswith("--")}
    names = {name.replace("_", "-").removeprefix("no-") for name in names}
    given = _of_words(words, prog)
    if given.run_file is None:
        return given
    gone = names.union(*(_INSTEAD.get(name, ()) for name in names))
    if given.model_file is not None:
        gone.add("model")
    usual = {FLAGS[name].name: FLAGS[name].default for name in gone if name in FLAGS}
    return _of_words(words, prog, replace(read_run(given.run_file), **usual))


def _of_words(
    words: Sequence[str], prog: str | None = None, default: TrainConfig | None = None
) -> TrainConfig:
    """Reads a command line, in which ``none`` may stand for None."""
    words = [re.sub(r"(?i)^(--[\w-]+=)?none$", r"\1None", word) for word in words]
    usual = default or TrainConfig()
    return tyro.cli(TrainConfig, prog=prog, args=words, default=usual)


# --- reading -------------------------------------------------------------------------


def read_run(path: Path) -> TrainConfig:
    """Reads a run's file, or says what is wrong with it; blocks."""
    try:
        found = tomllib.loads(path.expanduser().read_text("utf-8-sig"))
    except (OSError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"--config {path}: expected a file with a run's settings in TOML, such as "
            f"steps = 100 in a line, found: {error}"
        ) from error
    said = io.StringIO()
    try:
        words = _words(found)
        with contextlib.redirect_stderr(said):
            return _of_words(words)
    except SystemExit:
        text = " ".join(re.sub("[│─╭╮╰╯]|---+", " ", said.getvalue()).split())
        text = re.split("Argument helptext|For full helptext", text)[0]
        raise UsageError(f"--config {path}: {text.strip()}") from None
    except ValueError as error:
        raise UsageError(f"--config {path}: {error}") from error


def _words(values: Mapping[str, Any]) -> list[str]:
    """Returns values as a command line in which none of them is taken for a flag."""
    words = list[str]()
    for name, value in values.items():
        if name not in _IN_FILES:
            near = did_you_mean(name, _IN_FILES) or "--help lists them"
            raise ValueError(f"{shown(name)}: no setting of a run's file; {near}")
        default = _IN_FILES[name].default
        if isinstance(default, bool):
            if not isinstance(value, bool):
                raise ValueError(
                    f"{name}: expected true or false, found {shown(value)}"
                )
            words.append(f"--{name}" if value else f"--no-{name}")
            continue
        if isinstance(value, list) and not isinstance(default, tuple):
            raise ValueError(f"{name}: expected one value, found {shown(value)}")
        given = value if isinstance(value, list) else [value]
        for one in given:
            is_text = isinstance(one, str) and not one.startswith("-")
            if type(one) not in (int, float) and (not is_text or "\0" in one):
                raise ValueError(
                    f"{name}: expected a number, or a text without NUL that does not "
                    f"begin with -, found {shown(one)}"
                )
        if isinstance(default, tuple) and name != "csd-root":
            words += [f"--{name}", *map(str, given)]
        else:
            words += [f"--{name}={one}" for one in given]
    return words


# --- writing -------------------------------------------------------------------------


def text_of_run(config: TrainConfig) -> str:
    """Returns a run as TOML: what differs from the defaults, and these as comments.

    Paths are absolute.
    """
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
        value = _plain(config, name, field.name)
        text = "" if value is None else _toml(value)
        lines.append(f"{mark}{name} = {text}".rstrip())
    return "\n".join(lines) + "\n"


def _plain(config: TrainConfig, name: str, field: str) -> JsonValue:
    value = getattr(config, field)
    if name == "validation" and config.held_out_share is not None:
        return [*value]  # a share
    if isinstance(value, Path):
        return _absolute(value)
    if isinstance(value, tuple):
        are_paths = name in ("data", "validation", "csd-root")
        return [_absolute(one) if are_paths else str(one) for one in value]
    if name == "preset" and config.model_file is not None:
        return _absolute(config.model_file)
    if name in ("memory", "device-memory") and value is not None:
        return exact_bytes(value)
    return value


def _absolute(path: str | Path) -> str:
    name, here = os.path.expanduser(path), os.getcwd()
    is_pattern = isinstance(path, str) and {*name} & {*"*?["}
    if is_pattern and not os.path.exists(name):
        here = glob.escape(here)
    return os.path.join(here, name)


def _toml(value: JsonValue) -> str:
    if isinstance(value, float):  # JSON has no infinity
        return repr(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
