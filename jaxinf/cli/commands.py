"""The commands of ``jaxinf``, and the reports of their failures.

Invariant: exit status 0 means success, 1 a failure with one line on standard error, 2
an error in the command line; no failure shows a traceback.
"""

import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Annotated, Any

import tyro

from jaxinf.cli.arguments import FLAG_FORMS
from jaxinf.cli.checkpoints import Checkpoint
from jaxinf.cli.doctor import Doctor
from jaxinf.cli.inspection import Inspect
from jaxinf.cli.plan import PlanCommand
from jaxinf.cli.plan import main as plan
from jaxinf.cli.report import Report
from jaxinf.cli.stores import StoreCommand
from jaxinf.cli.verification import Verify
from jaxinf.command_line import UsageError
from jaxinf.errors import JaxinfError, printable
from jaxinf.train.__main__ import main as train

_SUCCESS, _FAILURE, _USAGE, _INTERRUPTED = 0, 1, 2, 130
_NO_STRAY_WARNINGS = logging.NullHandler()  # while logging is not set up


@dataclass(frozen=True)
class Train:
    """Train a model: python -m jaxinf.train, whose --help shows its flags."""


_Store = Annotated[StoreCommand, tyro.conf.subcommand("store")]
_Plan = Annotated[PlanCommand, tyro.conf.subcommand("plan")]
COMMANDS: Any = Train | Inspect | Verify | Checkpoint | _Store | Doctor | _Plan | Report
"""What ``jaxinf`` can be told to do."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the words after ``jaxinf``, by default the process's.

    Returns the exit status; after ``--help``, and if they do not parse, it exits.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words == ["--version"]:
        print(f"jaxinf {version('jaxinf')}")
        return _SUCCESS
    if words[:1] == ["train"]:
        return train(words[1:])
    logging.getLogger("jaxinf").addHandler(_NO_STRAY_WARNINGS)
    try:
        if words[:1] == ["plan"]:
            status = plan(words[1:])
        else:
            command = tyro.cli(
                COMMANDS,
                prog="jaxinf",
                args=words or ["--help"],
                description="Storage-offloaded training for JAX: stores, drives, and "
                "plans. --version shows the version.",
                config=FLAG_FORMS,
            )
            status = command.run()
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
