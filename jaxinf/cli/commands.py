"""The command line: what can be asked for, and how failures end.

Invariant: exit status 0 is success, 1 a failure told in one line on standard error, 2 a
command line that was not understood; a user never sees a traceback for either.
"""

import contextlib
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from jaxinf.cli import doctor, inspection
from jaxinf.cli.units import format_bytes, parse_bytes
from jaxinf.errors import JaxinfError

__all__ = ["Doctor", "Inspect", "main"]

_SUCCESS, _FAILURE, _USAGE, _INTERRUPTED = 0, 1, 2, 130

_ByteSize = tyro.constructors.PrimitiveConstructorSpec(
    nargs=1,
    metavar="BYTES",
    instance_from_str=lambda words: parse_bytes(words[0]),
    is_instance=lambda value: isinstance(value, int),
    str_from_instance=lambda value: [format_bytes(value).replace(" ", "")],
)


def _option(text: str, metavar: str | None = None) -> Any:
    """How an argument shows in ``--help``, where None and False are no defaults."""
    return tyro.conf.arg(help=text, metavar=metavar, help_behavior_hint="")


@dataclass(frozen=True)
class Inspect:
    """Show what a store holds: its committed step, leaves, states, bytes and drives.

    Works beside a running writer: the committed step is pinned with hard links while it
    is read, so that everything shown is of one step; no data is copied.
    """

    store: Annotated[
        tyro.conf.Positional[str], _option("The store's directory.", "STORE")
    ]
    leaf: Annotated[
        str | None,
        _option(
            "Read this leaf, e.g. h/0/attn/qkv/kernel: statistics and a histogram of "
            "each of its states.",
            "NAME",
        ),
    ] = None
    state: Annotated[
        str | None,
        _option("With --leaf: this state alone, e.g. params, mu or nu.", "NAME"),
    ] = None
    json: Annotated[bool, _option("Print one JSON document instead.")] = False
    live: Annotated[
        bool,
        _option(
            "Read the current step without pinning it: nothing is written to the "
            "store, but beside a running writer what is read may be of two "
            "neighbouring steps."
        ),
    ] = False

    def run(self) -> int:
        """Prints to standard output; returns the exit status."""
        if self.state is not None and self.leaf is None:
            raise _UsageError("--state names a state of one leaf; give --leaf too")
        inspection.run(
            self.store,
            leaf=self.leaf,
            state=self.state,
            as_json=self.json,
            is_live=self.live,
        )
        return _SUCCESS


@dataclass(frozen=True)
class Doctor:
    """Find out what this machine and its drives can do, and the remedy for what not.

    Measures the read, write and mixed bandwidth of each directory's file system with
    direct I/O in a temporary file. Exit status 1 if one cannot be used for a store.
    """

    paths: Annotated[
        tyro.conf.Positional[tuple[str, ...]],
        tyro.conf.arg(
            help="Directories where a store or a CSD root could be.",
            metavar="[PATH ...]",
        ),
    ] = (".",)
    size: Annotated[
        int,
        _ByteSize,
        tyro.conf.arg(
            help="Length of the temporary file; less is used where space is short, 0 "
            "measures nothing."
        ),
    ] = 1 << 30
    json: Annotated[bool, _option("Print one JSON document instead.")] = False

    def run(self) -> int:
        """Prints to standard output; returns the exit status."""
        usable = doctor.run(self.paths or (".",), self.size, as_json=self.json)
        return _SUCCESS if usable else _FAILURE


class _UsageError(Exception):
    """A command line that parses but makes no sense."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the console script.

    Args:
      argv: the words after ``jaxinf``; by default those of this process.

    Returns:
      The exit status: 0, 1 for a failure, 2 for a wrong command line.

    Raises:
      SystemExit: after ``--help`` (0), and for words that do not parse (2).
    """
    words = list(sys.argv[1:] if argv is None else argv)
    command: Any = tyro.cli(
        Annotated[Inspect, tyro.conf.subcommand("inspect")]
        | Annotated[Doctor, tyro.conf.subcommand("doctor")],
        prog="jaxinf",
        description="Storage-offloaded training for JAX: look at stores and drives.",
        args=words or ["--help"],
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    try:
        with _without_stray_warnings():
            status = command.run()
            sys.stdout.flush()
            return status
    except _UsageError as error:
        return _report(error, _USAGE)
    except BrokenPipeError:
        # The reader of a pipe (head, less) has what it wanted. Nothing more may be
        # written, not even by the interpreter's exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _FAILURE
    except (JaxinfError, OSError, ValueError) as error:
        return _report(error, _FAILURE)
    except KeyboardInterrupt:
        return _report("interrupted", _INTERRUPTED)


def _report(error: object, status: int) -> int:
    text = " ".join(str(error).split())
    print(f"jaxinf: {text}", file=sys.stderr)
    return status


@contextlib.contextmanager
def _without_stray_warnings() -> Iterator[None]:
    """Keeps what the library logs out of the output where logging is not set up."""
    handler = logging.NullHandler()
    logger = logging.getLogger("jaxinf")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
