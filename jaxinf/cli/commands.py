"""The commands of ``jaxinf``, and the reports of their failures.

Invariant: exit status 0 means success, 1 a failure with one line on standard error, 2
an error in the command line; no failure shows a traceback.
"""

import contextlib
import dataclasses
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import tyro

from jaxinf.cli import (
    checkpoints,
    doctor,
    inspection,
    members,
    report,
    verification,
)
from jaxinf.cli.exchange import Export, Import, Memory
from jaxinf.cli.options import StorePath, option
from jaxinf.cli.processes import TogetherOptions, over_processes
from jaxinf.cli.stores import Store
from jaxinf.command_line import ByteSize, UsageError, parse
from jaxinf.errors import JaxinfError
from jaxinf.exchange import DEFAULT_MEMORY_BYTES
from jaxinf.terminal import make_console, printable
from jaxinf.train.__main__ import main as train
from jaxinf.train.config import TrainConfig
from jaxinf.train.forecast import RunPlan
from jaxinf.train.help import check_names
from jaxinf.train.limits import Fit, LossyFlag
from jaxinf.train.loop import fit_run, plan_processes, plan_run
from jaxinf.train.progress import Say, planning
from jaxinf.train.run_file import read_run
from jaxinf.train.several import SeveralPlan

_SUCCESS, _FAILURE, _USAGE, _INTERRUPTED = 0, 1, 2, 130


@dataclass(frozen=True)
class _OfProcesses(TogetherOptions):
    """A command that processes make together where each sees its own member alone."""

    def over(self, store: str, action: Callable[[str], bool], *, as_json: bool) -> int:
        """Does something for a store, or for each member; returns the exit status."""
        self.check_together()
        if self.distributed:
            limit_s = self.timeout
            return over_processes(
                Path(store), action, self, as_json=as_json, timeout_s=limit_s
            )
        if members.is_run(Path(store)):
            return members.over_members(Path(store), action, as_json=as_json)
        return _SUCCESS if action(store) else _FAILURE


@dataclass(frozen=True, kw_only=True)
class Inspect(_OfProcesses):
    """Show a store's committed step, leaves, bytes, drives and checkpoints.

    This works during a run. The committed step is pinned with hard links while it is
    read, so the output is of a single step; no data is copied. With --distributed, all
    processes of a run look at their own members, and process 0 prints what they see.
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

        def show(store: str) -> bool:
            inspection.run(store, leaf=self.leaf, as_json=self.json)
            return True

        return self.over(self.store, show, as_json=self.json)


@dataclass(frozen=True)
class Doctor:
    """Test this machine and its drives, and give a remedy for each problem.

    Measures the read, write and mixed bandwidth of each directory's file system with
    direct I/O in a temporary file. The exit status is 1 if a directory cannot hold a
    store.
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
        ByteSize,
        tyro.conf.arg(
            help="Length of the temporary file; shorter if space is short. 0 measures "
            "nothing."
        ),
    ] = 1 << 30
    json: Annotated[bool, option("Print one JSON document instead.")] = False
    machine: Annotated[
        Path | None,
        option(
            "Also measure copies, matrix products and updates, and write this "
            "machine's rates to FILE, each with its unit and source.",
            "FILE",
        ),
    ] = None

    def run(self) -> int:
        """Prints to standard output; returns the exit status."""
        usable = doctor.run(
            self.paths or (".",),
            self.size,
            as_json=self.json,
            machine_file=self.machine,
        )
        return _SUCCESS if usable else _FAILURE


@dataclass(frozen=True)
class Train:
    """Train a model: python -m jaxinf.train, whose --help shows its flags."""


@dataclass(frozen=True)
class Plan(TrainConfig):
    """Say what a training run would take: memory, disk, bytes, and time.

    Takes the trainer's flags. Nothing is trained or written. The time is that of a
    simulated step on a machine, and without --machine unknown. The exit status is 1 if
    the run does not fit, which --processes does not look at.
    """

    # Find the settings that are fastest on --machine, and print them as a command line.
    # Flags that are given stay as they are; --memory and --device-memory are limits, by
    # default nine tenths of what the machine has.
    fit: bool = False

    # Compile each program and run it some times, and use its time in place of its count
    # of operations. That takes as long as in the run, and some seconds.
    measure: bool = False

    # For --fit: years that the drives have to last, if it trains without a pause.
    years: Annotated[
        float | None,
        tyro.conf.arg(metavar="YEARS", help_behavior_hint="(default: none)"),
    ] = None

    # For --fit: flags that may be chosen though they may lose bits.
    allow: tuple[LossyFlag, ...] = ()

    # Plan a run in so many processes, one on each host: bytes of its drives and links,
    # with --machine, which is each host, times.
    processes: Annotated[
        int | None, tyro.conf.arg(metavar="N", help_behavior_hint="(default: none)")
    ] = None

    # For --processes: failures of one host in a year; says what they take.
    failures: Annotated[
        float | None,
        tyro.conf.arg(metavar="PER_YEAR", help_behavior_hint="(default: none)"),
    ] = None

    # For --failures: time from a failure to the next step.
    restart: Annotated[float, tyro.conf.arg(metavar="SECONDS")] = 60.0

    # Print one JSON document instead.
    json: bool = False

    def with_file(self, words: Sequence[str]) -> "Plan":
        """Returns the plan with the settings of --config, of which flags win.

        Args:
          words: the command line that this was parsed from.

        Raises:
          UsageError: The file cannot be read, or has what no run has.
        """
        if self.run_file is None:
            return self
        held = Plan(**vars(read_run(self.run_file, given=self)))
        plan: Plan = parse(Plan, words, prog="jaxinf plan", default=held, config=_FLAGS)
        return plan

    def run(self) -> int:
        """Prints to standard output; returns the exit status."""
        with planning(make_console(sys.stderr)) as say:
            plan = self._plan(say)
        if self.json:
            print(json.dumps(plan.to_json(), indent=1, allow_nan=False))
        else:
            plan.print(make_console(soft_wrap=True))
        if isinstance(plan, Fit):
            fits = plan.best is not None
        else:
            fits = not (isinstance(plan, RunPlan) and plan.misfits)
        return _SUCCESS if fits else _FAILURE

    def _plan(self, say: Say) -> Fit | RunPlan | SeveralPlan:
        names = [one.name for one in dataclasses.fields(TrainConfig)]
        config = TrainConfig(**{name: getattr(self, name) for name in names})
        if self.processes is None and self.failures is not None:
            raise UsageError("--failures: expected with --processes; add it")
        if self.processes is not None:
            if self.fit or self.measure:
                raise UsageError("--fit, --measure: not supported yet with --processes")
            store = self.store or Path("STORE")
            config = dataclasses.replace(config, store=store)
            return plan_processes(config, self.processes, self.failures, self.restart)
        if self.fit:
            return fit_run(
                config, self.years, self.allow, measures=self.measure, say=say
            )
        if self.years is not None or self.allow:
            raise UsageError("--years, --allow: expected with --fit; add it")
        # A run needs the name of a store, which a plan does not.
        store = self.store or (None if self.mode == "memory" else Path("STORE"))
        config = dataclasses.replace(self, store=store)
        return plan_run(config, measures=self.measure, say=say)


@dataclass(frozen=True)
class Report:
    """Make a page about a run, or several side by side, from their log directories.

    The page shows loss, speed, bytes, where the time and the memory of a step went, a
    timeline (of --trace), and settings. It opens offline. Needs plotly (pip install
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


@dataclass(frozen=True, kw_only=True)
class Verify(_OfProcesses):
    """Read the whole store and compare it with its checksums.

    Includes the committed step and every checkpoint, and works during a run. Names each
    damaged leaf, state, chunk, file and CSD. The exit status is 1 if there is damage.
    With --distributed, all processes of a run verify their own members, process 0
    prints one report, and all end with the same status.
    """

    store: StorePath
    checkpoint: Annotated[
        str | None, option("Verify this checkpoint alone.", "NAME")
    ] = None
    json: Annotated[bool, option("Print one JSON document instead.")] = False

    def run(self) -> int:
        """Prints to standard output; returns the exit status."""

        def verify(store: str) -> bool:
            return verification.run(store, name=self.checkpoint, as_json=self.json)

        return self.over(self.store, verify, as_json=self.json)


@dataclass(frozen=True)
class _Save:
    """Keep the committed step by hard links, without copying data; print its path."""

    store: StorePath
    name: Annotated[
        tyro.conf.Positional[str | None],
        option("The checkpoint's name; by default the step's number.", "[NAME]"),
    ] = None

    def run(self, store: Path) -> None:
        checkpoints.save(store, self.name)


@dataclass(frozen=True)
class _List:
    """Show the checkpoints: step, time, and the bytes that removing each would free."""

    store: StorePath
    json: Annotated[bool, option("Print one JSON document instead.")] = False

    def run(self, store: Path) -> None:
        checkpoints.list_all(store, as_json=self.json)


@dataclass(frozen=True)
class _Remove:
    """Remove checkpoints and free their space."""

    store: StorePath
    names: Annotated[
        tyro.conf.Positional[tuple[str, ...]], option("Their names.", "NAME [NAME ...]")
    ]

    def run(self, store: Path) -> None:
        if not self.names:
            raise UsageError("remove: name the checkpoints to remove")
        checkpoints.remove(store, self.names)


@dataclass(frozen=True)
class _Restore:
    """Make the next run continue from a checkpoint, which stays as it is.

    A run of several processes may also go to an exported step, from which members are
    made again whose drives are lost; those of the others that are at this step stay.
    """

    store: StorePath
    name: Annotated[
        tyro.conf.Positional[str],
        option("Its name; or an export, a path with a slash or a URL.", "NAME"),
    ]
    discard_current: Annotated[
        bool, option("Discard the committed step, even if no checkpoint keeps it.")
    ] = False
    process: Annotated[
        tyro.conf.UseAppendAction[tuple[int, ...]],
        option("With an export: a lost member, which is made again; repeatable.", "N"),
    ] = ()
    csd_root: Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]],
        option("A CSD root of it, in which {process} is its number.", "DIR"),
    ] = ()
    memory: Memory = DEFAULT_MEMORY_BYTES

    def run(self, store: Path) -> None:
        if "/" in self.name:
            checkpoints.restore_export(
                store,
                self.name,
                self.process,
                csd_roots=self.csd_root,
                discard_current=self.discard_current,
                memory_bytes=self.memory,
            )
            return
        if self.process or self.csd_root:
            raise UsageError(
                f"--process, --csd-root: expected with an export, got the checkpoint "
                f"{self.name}, whose chunks of a lost member were on its drives"
            )
        checkpoints.restore(store, self.name, discard_current=self.discard_current)


@dataclass(frozen=True)
class Checkpoint:
    """Keep, list, remove and restore committed steps; export and import them."""

    action: (
        Annotated[_Save, tyro.conf.subcommand("save")]
        | Annotated[_List, tyro.conf.subcommand("list")]
        | Annotated[_Remove, tyro.conf.subcommand("remove")]
        | Annotated[_Restore, tyro.conf.subcommand("restore")]
        | Annotated[Export, tyro.conf.subcommand("export")]
        | Annotated[Import, tyro.conf.subcommand("import")]
    )

    def run(self) -> int:
        """Prints to standard output; returns the exit status."""
        self.action.run(Path(self.action.store).expanduser().absolute())
        return _SUCCESS


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


_FLAGS = (tyro.conf.FlagCreatePairsOff, tyro.conf.OmitSubcommandPrefixes)


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
    try:
        check_names(words if words[:1] == ["plan"] else ())
    except UsageError as error:
        return _report(error, _USAGE)
    command = parse(
        COMMANDS,
        words or ["--help"],
        prog="jaxinf",
        description="Storage-offloaded training for JAX: stores, drives, and plans. "
        "--version shows the version.",
        config=_FLAGS,
    )
    try:
        if isinstance(command, Plan):
            command = command.with_file(words[1:])
        with _without_stray_warnings():
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
