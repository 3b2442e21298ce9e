"""Numbers, text and consoles, as the trainer and the commands show them.

Invariant: sizes are binary (MiB) and bandwidths decimal (MB/s), as drives are sold;
printed text is never taken for markup.
"""

import re
import sys
from operator import index
from typing import IO, Any, get_args

from rich.console import Console

_PIPE_WIDTH = 4096
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_FACTORS = {"": 1, "b": 1}
for _power, _unit in enumerate(("k", "m", "g", "t", "p"), 1):
    _FACTORS |= {_unit: 1024**_power, f"{_unit}ib": 1024**_power}
    _FACTORS[f"{_unit}b"] = 1000**_power


def format_bytes(num_bytes: int) -> str:
    """Formats a size to about three digits with a binary unit: ``1.39 GiB``."""
    value, unit = float(num_bytes), 0
    while value >= 1000 and unit < len(_BINARY) - 1:
        value, unit = value / 1024, unit + 1
    if unit == 0:
        return f"{num_bytes} B"
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {_BINARY[unit]}"


def exact_bytes(num_bytes: int) -> str:
    """Formats a size so that `parse_bytes` reads the same: ``1344MiB``, ``4097``."""
    for unit in reversed(range(1, len(_BINARY))):
        if num_bytes and num_bytes % 1024**unit == 0:
            return f"{num_bytes // 1024**unit}{_BINARY[unit]}"
    return str(num_bytes)


def format_count(count: float) -> str:
    """Formats a number of params as papers do: ``124 M``."""
    for factor, unit in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if count >= factor:
            value = count / factor
            return f"{value:.{0 if value >= 100 else 1}f}{unit}"
    return f"{count:.0f}"


def parse_bytes(text: str) -> int:
    """Reads ``1GiB``, ``512 MiB``, ``2G`` (binary), ``1GB`` (decimal), ``4096``.

    Raises:
      ValueError: `text` is not a size; the message gives examples.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)", text.strip())
    factor = _FACTORS.get(match[2].lower()) if match else None
    if match is None or factor is None or len(match[1]) > 40:
        raise ValueError(
            f"{text!r}: expected a number of bytes such as 1GiB, 512MiB or 1048576"
        )
    return int(float(match[1]) * factor)


def given_bytes(name: str, value: int | str) -> int:
    """Returns an argument in bytes: a number, or a text as for `parse_bytes`.

    Raises:
      ValueError: The argument of this name is not a size, or less than 1.
    """
    try:
        if isinstance(value, bool):
            raise TypeError("a bool is an index, but not a size")
        num_bytes = parse_bytes(value) if isinstance(value, str) else index(value)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f'{name}={value!r}: expected a number of bytes, or a size such as "4GiB"'
        ) from error
    if num_bytes < 1:
        raise ValueError(f"{name}={value!r}: expected at least 1")
    return num_bytes


def check_choice(name: str, value: object, kind: Any) -> None:
    """Refuses an argument that is none of the values of a ``Literal``: ValueError."""
    choices = get_args(kind)
    if value not in choices:
        listed = ", ".join(map(repr, choices))
        raise ValueError(f"{name}={value!r}: expected one of {listed}")


def make_console(file: IO[str] | None = None, *, soft_wrap: bool = False) -> Console:
    """Makes a console that prints text as it is, on standard output or on `file`.

    With `soft_wrap` the terminal wraps long lines; in a pipe lines are never wrapped.
    """
    stream = sys.stdout if file is None else file
    return Console(
        file=stream,
        width=None if stream.isatty() else _PIPE_WIDTH,
        highlight=False,
        markup=False,
        emoji=False,
        soft_wrap=soft_wrap,
    )
