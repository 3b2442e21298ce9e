"""The commands of ``jaxinf``, and the reports of their failures.

Invariant: exit status 0 means success, 1 a failure with one line on standard error, 2
an error in the command line; no failure shows a traceback.
"""

import contextlib
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import tyro

from jaxinf.cli import inspection, report, verification
from jaxinf.cli.checkpoints import Checkpoint
from jaxinf.cli.doctor import Doctor
from jaxinf.cli.members import over_members
from jaxinf.cli.options import FLAGS, StorePath, option
from jaxinf.cli.plan import Plan
from jaxinf.cli.plan import main as plan
from jaxinf.cli.stores import Store
from jaxinf.command_line import UsageError
from jaxinf.errors import JaxinfError
from jaxinf.store import left_by_copy
from jaxinf.terminal import make_console, printable
from jaxinf.train.__main__ import main as train

_SUCCESS, _FAILURE, _USAGE, _INTERRUPTED = 0, 1, 2, 130


@dataclass(frozen=True)
class Inspect:
    """Show a store's committed step, leaves, bytes, drives and checkpoints.

    This works during a run. The committed step is pinned with hard links while it is
    read, so the output is of a single step; no data is copied. Of a run in several
    processes each member is shown.
    """

    store: StorePath
    leaf: Annotated[
        str | None,
        option(
            "Read this leaf, e.g. h0/attn/qkv/kernel: a summary of the numbers of each "
            "of its states.",
            "NAME",
        ),
    ] = None
    json: Annotated[bool, option("Print one JSON document instead.")] = False

    def run(self) -> int:
        """Prints to standard output; returns the exit status."""
        show = partial(inspection.run, leaf=self.leaf, as_json=self.json)
        return over_members(self.store, show, as_json=self.json)


@dataclass(frozen=True)
class Train:
    """Train a model: python -m jaxinf.train, whose --help shows its flags."""


@dataclass(frozen=True)
class Report:
    """Make a page about a run, or several side by side, from their log directories.

    The page shows loss, speed, bytes, where the time and the memory of a step went
    (of --trace by phase), and settings. It opens offline. Needs plotly (pip install
    'jaxinf[report]').
    """

    logs: Annotated[
        tyro.conf.Positional[tuple[str, ...]],
        option("Log directories of runs.", "LOG_DIR [LOG_DIR ...]"),
    ]
    output: Annotated[
        Path | None,
        option("The page; by default report.html in the first LOG_DIR.", "FILE"),
    ] = None

    def run(self) -> int:
        """Prints the page's path to standard output; returns the exit status."""
        if not self.logs:
            raise UsageError("report: name the log directory of a run")
        folders = [Path(name).expanduser() for name in self.logs]
        output = self.output or folders[0] / "report.html"
        report.write_report(folders, output.expanduser())
        print(output)
        return _SUCCESS


@dataclass(frozen=True)
class Verify:
    """Read the whole store and compare it with its checksums.

    Includes the committed step and every checkpoint, and works during a run. Names each
    damaged leaf, state, chunk, file and CSD. The exit status is 1 if there is damage,
    and 2 if a member of a run in several processes cannot be seen.
    """

    store: StorePath
    checkpoint: Annotated[
        str | None, option("Verify this checkpoint alone.", "NAME")
    ] = None
    json: Annotated[bool, option("Print one JSON document instead.")] = False

    def run(self) -> int:
        """Prints to standard output; returns the exit status."""
        path = Path(self.store).expanduser().absolute()
        if left := left_by_copy(path):
            make_console(sys.stderr).print(
                f"warning: {left}: what a copy has made or replaced that was "
                "interrupted, or goes on; give its command again, which completes it"
            )
        verify = partial(verification.run, name=self.checkpoint, as_json=self.json)
        return over_members(self.store, verify, as_json=self.json)


COMMANDS: Any = (
    Annotated[Train, tyro.conf.subcommand("train")]
    | Annotated[Inspect, tyro.conf.subcommand("inspect")]
    | Annotated[Verify, tyro.conf.subcommand("verify")]
    | Annotated[Checkpoint, tyro.conf.subcommand("checkpoint")]
    | Annotated[Store, tyro.conf.subcommand("store")]
    | Annotated[Doctor, tyro.conf.subcommand("doctor")]
    | Annotated[Plan, tyro.conf.subcommand("plan")]
    | Annotated[Report, tyro.conf.subcommand("report")]
)
"""What ``jaxinf`` can be told to do."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the console script.

    Args:
      argv: the words after ``jaxinf``; by default those of this process.

    Returns:
      The exit status: 0, 1 for a failure, 2 for a wrong command line.

    Raises:
      SystemExit: after ``--help`` (0), and if the arguments do not parse (2).
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words == ["--version"]:
        print(f"jaxinf {version('jaxinf')}")
        return _SUCCESS
    if words[:1] == ["train"]:
        return train(words[1:])

    def run() -> int:
        if words[:1] == ["plan"]:
            return plan(words[1:])
        command = tyro.cli(
            COMMANDS,
            prog="jaxinf",
            args=words or ["--help"],
            description="Storage-offloaded training for JAX: stores, drives, and "
            "plans. --version shows the version.",
            config=FLAGS,
        )
        status: int = command.run()
        return status

    try:
        with _without_stray_warnings():
            status = run()
            sys.stdout.flush()
            return status
    except UsageError as error:
        return _report(error, _USAGE)
    except BrokenPipeError:
        # The reader of the pipe (head, less) has closed it. Nothing more may be
        # written, not even at the interpreter's exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _FAILURE
    except (JaxinfError, OSError, ValueError) as error:
        return _report(error, _FAILURE)
    except KeyboardInterrupt:
        return _report("interrupted", _INTERRUPTED)


def _report(error: object, status: int) -> int:
    text = printable(" ".join(str(error).split()))
    print(f"jaxinf: {text}", file=sys.stderr)
    return status


@contextlib.contextmanager
def _without_stray_warnings() -> Iterator[None]:
    """Hides the library's log messages while logging is not set up."""
    handler = logging.NullHandler()
    logger = logging.getLogger("jaxinf")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
