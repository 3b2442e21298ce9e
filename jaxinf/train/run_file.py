"""A run's settings: as a file in TOML, and as its store keeps them.

    batch-size = 16
    data = ["corpus/**/*.txt"]
    memory = "4GiB"

A key is a flag's name and a value what the flag takes, of TOML's own type. Each commit
has them in its payload, so they are those of its step, wherever it is copied to.

Invariant: what is written reads back as the same run from any directory. What a store
says is a stranger's word: it sets `_KEPT` alone, which leads to no place to write to,
to no program and to no other process.
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
from jaxinf.documents import convert, encode, shown
from jaxinf.errors import JaxinfError
from jaxinf.store import find_members, is_run, look_at_store
from jaxinf.train.checks import ONLY_IN
from jaxinf.train.config import TrainConfig
from jaxinf.train.resume import MADE_BY
from jaxinf.typing import JsonValue

NOT_IN_FILES = ("config", "trace", "eval-only")
"""Flags of one start of a run, not of the run."""

_KEPT = {
    *"data validation tokenizer fields loss-on batch-size seq-len model preset".split(),
    *"from task freeze lora dtype param-dtype optimizer optimizer-args".split(),
    *"learning-rate schedule warmup-steps clip-norm compress ema seed steps".split(),
    *"epochs mode nonfinite memory device-memory policy micro-batches".split(),
    *"durability checkpoint-every eval-every".split(),
}
_ASKED_AGAIN = ("log-dir", "export-to", "track", "csd", "fsdp")
_INSTEAD = {  # a flag takes the place of others
    "steps": ("epochs",),
    "epochs": ("steps",),
    "from": ("model", "preset"),
    "model": ("from", "preset"),
    "preset": ("from",),
}
_THE_RUN = {  # who gives one of these says what the run is
    *"data validation tokenizer model preset from task".split(),
    *"batch-size seq-len optimizer lora freeze".split(),
}
_PLACES = ("data", "validation", "tokenizer", "from")  # that are read
_MOST_NAMES = 8
_MOST_BYTES = 1 << 20
_MOST_CHARS = 4096  # of a text
_MOST_KEPT_BYTES = 16 << 10  # of a setting, as each commit writes it


def base_of(
    given: TrainConfig, words: Sequence[str]
) -> tuple[TrainConfig | None, str | None]:
    """Returns the run that flags change: that of --config, or of the store.

    Args:
      given: what the command line says by itself.
      words: the command line. A list that it has replaces the run's.

    Returns:
      The run, and what to say of it; None if there is none.

    Raises:
      UsageError: names the file or the store, each wrong value, and what to do.
    """
    names = {w[2:].partition("=")[0] for w in words if w.startswith("--")}
    names = {name.replace("_", "-").removeprefix("no-") for name in names}
    if given.run_file is not None:
        values = _values_of_file(given.run_file)
        return _config(_left(values, names, given)), None
    if given.store is None:
        return None, None
    store = os.path.expanduser(given.store)
    payload, problem = _payload_in(Path(store))
    held = payload.get("run")
    if isinstance(held, Mapping):
        return _of_store(store, payload.get("run_had"), held, names, given)
    if payload.get("made_by") != MADE_BY or names & _THE_RUN:
        return None, problem
    raise UsageError(
        f"{store}: expected the settings of its run in its last commit, found none; "
        "give --config FILE, or its own --data, --model and all others"
    )


def _of_store(
    store: str,
    asked: Any,
    held: Mapping[str, Any],
    names: set[str],
    given: TrainConfig,
) -> tuple[TrainConfig, str | None]:
    document = {key.replace("_", "-"): value for key, value in held.items()}
    had = asked if isinstance(asked, list) else []
    lost = {n: f"--{n}" for n in sorted(_KEPT - {*document}) if n in had}
    if listed := [*_left(lost, names, given).values()]:
        raise UsageError(
            f"{store}: the run had {_briefly(listed)}, which no commit keeps: it is "
            "too long, or JSON has no form for it; give it again. A pattern in quotes, "
            "as --data 'corpus/*.txt', is kept"
        )
    values: dict[str, Any] = {}
    for name, flag in _flags().items():
        if name in document and name in _KEPT and name not in names:
            try:
                values[name] = _read(flag, document[name])
            except ValueError as error:
                raise UsageError(
                    f"{store}: settings of the run: {error}; give --{name} to replace "
                    "it"
                ) from error
    left = _left(values, names, given)
    modes = {n: _modes(n, v) for n, v in left.items() if "mode" in names}
    no_mode = [name for name, these in modes.items() if given.mode not in these]
    left = {name: value for name, value in left.items() if name not in no_mode}
    config, own = _config(left), _settings(given)
    read = {n: left.get(n) for n in _PLACES} | {"preset": config.model_file}
    found = {
        "flags change": [
            f"--{n}" for n in sorted(names & _KEPT) if own.get(n) != document.get(n)
        ],
        f"--mode {given.mode} has no": [f"--{name}" for name in no_mode],
        "it reads": [f"--{n} {_briefly(value)}" for n, value in read.items() if value],
        "give again, if you want them": [
            f"--{n}" for n in _ASKED_AGAIN if n in had and n not in names
        ],
        "ignored, for this version has no such flags": [
            shown(name) for name in sorted({*document} - _KEPT)
        ],
    }
    if not left and not any(found.values()):
        return config, None
    parts = [f"{what} {_briefly(which)}" for what, which in found.items() if which]
    return config, "; ".join([f"settings of the run in {store}", *parts])


def _briefly(value: Any) -> str:
    """Names some of many texts."""
    texts = [str(x) for x in (value if isinstance(value, tuple | list) else [value])]
    more = f" and {len(texts) - _MOST_NAMES} more" if len(texts) > _MOST_NAMES else ""
    return ", ".join(texts[:_MOST_NAMES]) + more


def _payload_in(store: Path) -> tuple[Mapping[str, Any], str | None]:
    """Returns the payload of a store's last commit, and why it cannot be read."""
    try:
        place = find_members(store)[0] if is_run(store) else store
        if not (place / "jaxinf.json").exists():
            return {}, None
        record = look_at_store(place).read_commit()
    except (JaxinfError, OSError) as error:
        return {}, f"settings of the run are not known: {error}"
    payload = record.payload if record else None
    return payload if isinstance(payload, Mapping) else {}, None


def _left(
    values: Mapping[str, Any], names: set[str], given: TrainConfig
) -> dict[str, Any]:
    """Returns the values that flags leave in place."""
    gone = names.union(*(_INSTEAD.get(name, ()) for name in names))
    if given.model_file is not None:
        gone.add("model")
    return {name: value for name, value in values.items() if name not in gone}


def _modes(name: str, value: Any) -> Sequence[str]:
    """Returns the modes that have a flag with a value."""
    if name == "policy" and value not in ("recompute", "keep"):
        return ("stream",)
    return ONLY_IN.get(name, ("update", "stream", "memory"))


def _config(values: Mapping[str, Any]) -> TrainConfig:
    flags = _flags()
    return TrainConfig(**{flags[n].field.name: value for n, value in values.items()})


def _flags() -> dict[str, Flag]:
    flags = flags_of(TrainConfig)
    return {flag.name: flag for flag in flags if flag.name not in NOT_IN_FILES}


# --- reading -------------------------------------------------------------------------


def read_run(path: Path) -> TrainConfig:
    """Reads a run's file; blocks.

    Raises:
      UsageError: names the file, and each key that is unknown or has a wrong value.
    """
    return _config(_values_of_file(path))


def _values_of_file(path: Path) -> dict[str, Any]:
    flags, problems = _flags(), list[str]()
    values: dict[str, Any] = {}
    for key, value in _document(path).items():
        name = key.replace("_", "-")
        try:
            if name not in flags:
                near = did_you_mean(name, flags) or "--help-all lists them"
                raise ValueError(f"{shown(key)}: no setting of a run's file; {near}")
            if name in values:
                raise ValueError(f"{key}: set twice, once with - and once with _")
            values[name] = _read(flags[name], value)
        except ValueError as error:
            problems.append(str(error))
    if problems:
        listed = "\n  ".join(problems)
        raise UsageError(
            f"--config {path}: expected a run's settings, found\n  {listed}"
        )
    return values


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
    """Returns a value of TOML or JSON as the flag's.

    Raises:
      ValueError: says what was expected, and what was found.
    """
    if type(value) is int and not -(1 << 63) <= value < 1 << 63:
        raise ValueError(f"{flag.name}: expected a number of at most 64 bits")
    for text in value if isinstance(value, list) else [value]:
        if isinstance(text, str) and ("\0" in text or len(text) > _MOST_CHARS):
            raise ValueError(
                f"{flag.name}: expected a text without NUL, of at most {_MOST_CHARS:,} "
                f"characters, found {shown(text)}"
            )
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


def kept_in_store(config: TrainConfig) -> dict[str, JsonValue]:
    """Returns what the payload of a commit has of a run's settings.

    Also the names of flags that it had and that are asked for again.
    """
    found = _settings(config)
    if not config.steps:  # an import is no run of 0 steps
        found.pop("steps", None)
    kept = {
        name: value
        for name, value in found.items()
        if name in _KEPT and _is_json(value) and len(encode(value)) <= _MOST_KEPT_BYTES
    }
    had = [n for n in found if n in (*_ASKED_AGAIN, *_KEPT) and n not in kept]
    return {"run": kept, "run_had": had}


def text_of_run(config: TrainConfig) -> str:
    """Returns a run as TOML: what differs from the defaults, and these as comments.

    Paths are absolute.
    """
    if config.store is None:
        config = dataclasses.replace(config, log_dir=config.logs)
    lines = [
        f"# A run of jaxinf {metadata.version('jaxinf')}. It starts, or goes on, with",
        "#   python -m jaxinf.train --config FILE",
        "# where flags win over the file. A line with # has the default.",
        "",
    ]
    changed = _settings(config)
    for name, flag in _flags().items():
        mark = "" if name in changed else "# "
        value = changed.get(name, _plain(config, flag))
        text = "" if value is None else _toml(value)
        if not _is_json(text):
            mark, text = "# ", f"{text!a} is not UTF-8; give --{name}"
        lines.append(f"{mark}{name} = {text}".rstrip())
    return "\n".join(lines) + "\n"


def _settings(config: TrainConfig) -> dict[str, JsonValue]:
    """Returns what differs from the defaults, as it stands in a file."""
    return {
        name: _plain(config, flag)
        for name, flag in _flags().items()
        if getattr(config, flag.field.name) != flag.field.default
    }


def _plain(config: TrainConfig, flag: Flag) -> JsonValue:
    value = getattr(config, flag.field.name)
    if flag.name == "validation" and config.held_out_share is not None:
        return [*value]  # a share
    if isinstance(value, Path):
        return _absolute(value)
    if isinstance(value, tuple):
        are_paths = flag.name in ("data", "validation", "csd-root")
        return [_absolute(one) if are_paths else str(one) for one in value]
    if flag.name == "preset" and config.model_file is not None:
        return _absolute(config.model_file)
    if value is None or flag.constructor is None or isinstance(value, str):
        return value
    return flag.constructor.str_from_instance(value)[0]


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


def _is_json(value: JsonValue) -> bool:
    """Whether JSON has a form for it: for no infinity, nor for any name of a file."""
    try:
        encode(value)
    except ValueError:
        return False
    return True
