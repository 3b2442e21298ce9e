"""``jaxinf doctor``: examines this machine and its drives.

Invariant: no file made for a measurement is left behind.

``--json FILE`` also writes the numbers that ``jaxinf plan --machine FILE`` takes.
"""

import contextlib
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.text import Text

from jaxinf.cli.host import Problem, look_at_host
from jaxinf.cli.options import option
from jaxinf.cli.place import Place, look_at_place
from jaxinf.cli.probe import measure_machine
from jaxinf.cli.terminal import facts_table, heading, show_progress
from jaxinf.command_line import ByteSize, UsageError, expand_home
from jaxinf.csd.cards.runtime import has_runtime
from jaxinf.csd.cards.sysfs import card_of, list_cards
from jaxinf.errors import CsdError
from jaxinf.terminal import make_console, printable
from jaxinf.train.machine import write_machine


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
    json: Annotated[
        Path | None,
        option(
            "Also measure programs, updates and commits, for some ten seconds, and "
            "write the eight numbers that jaxinf plan --machine FILE takes.",
            "FILE",
        ),
    ] = None

    def run(self) -> int:
        """Examines, and prints the findings; returns the exit status.

        Raises:
          UsageError: the rates cannot be measured, or the file cannot be written.
        """
        file = self.json and expand_home(self.json, "--json")
        if file is not None:
            _check_parent(file)
        given, places = map(Path, self.paths or (".",)), []
        for path in [expand_home(one, "doctor").absolute() for one in given]:
            with show_progress(f"measuring {printable(str(path))}") as progress:
                places.append(look_at_place(path, self.size, progress))
        rows, problems = look_at_host()
        cards = _look_at_cards([place.path for place in places])
        bad = ", ".join(str(place.path) for place in places if not place.is_usable)
        verdict = f"cannot hold a store: {printable(bad)}" if bad else ""
        if not bad and any(problem.is_fatal for problem in problems):
            verdict = "JAX cannot run here"
        console = make_console()
        for place in places:
            _print(console, str(place.path), place.to_rows(), place.problems)
        _print(console, "this machine", rows, problems)
        for card in cards:
            rows = {
                "firmware": card["firmware"] or "unknown",
                "P2P": card["p2p"],
                "beside": ", ".join(card["paths"]) or "none of these directories",
            }
            _print(console, f"card {card['address']}", rows, card["problems"])
        style = "bold red" if verdict else "bold green"
        console.print(Text(f"\n{verdict or 'ready'}", style=style))
        if file is not None and not verdict:
            _write_machine(file, places)
        return 1 if verdict else 0


def _check_parent(file: Path) -> None:
    """Refuses a place for the file before seconds are spent on measuring."""
    try:
        found = "" if file.parent.is_dir() else "none"
    except OSError as error:
        found = str(error.strerror)
    if found:
        raise UsageError(
            f"--json {file}: expected a file in a directory that exists, found: "
            f"{found}; mkdir -p {file.parent}"
        )


def _write_machine(file: Path, places: Sequence[Place]) -> None:
    drives = {p.path: p.bandwidth for p in places if p.bandwidth is not None}
    if not drives:
        raise UsageError(
            f"--json {file}: expected a directory whose bandwidth was measured, found "
            "none: give one that can be written, and a --size above 0"
        )
    try:
        write_machine(measure_machine(next(iter(drives)), [*drives.values()]), file)
    except OSError as error:
        raise UsageError(f"--json {file}: {error.strerror}") from None
    make_console(sys.stderr).print(f"wrote {printable(str(file))}")


def _look_at_cards(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Finds this machine's cards without opening them."""
    infos, beside = list_cards(), defaultdict(list)
    for path in paths:
        # Without a card beside it, or missing: the directory's own rows say so.
        with contextlib.suppress(CsdError, OSError):
            beside[card_of(path, infos).address].append(str(path))
    cards = []
    for info in infos:
        problems = []
        if info.p2p_remedy and info.p2p != "unknown":
            problems.append(Problem(f"P2P is {info.p2p}", info.p2p_remedy))
        if not has_runtime():
            what = "XILINX_XRT is not set, or names no directory of XRT's"
            remedy = "install XRT, and `source /opt/xilinx/xrt/setup.sh` before Python"
            problems.append(Problem(what, remedy))
        card = {"address": info.address, "firmware": info.firmware, "p2p": info.p2p}
        cards.append({**card, "paths": beside[info.address], "problems": problems})
    return cards


# --- on the terminal -----------------------------------------------------------------


def _print(
    console: Console, title: str, facts: dict[str, str], problems: Sequence[Problem]
) -> None:
    console.print(heading(printable(title)), soft_wrap=True)
    rows: list[tuple[str, str | Text]] = [(k, printable(v)) for k, v in facts.items()]
    for problem in problems:
        style = "red" if problem.is_fatal else "yellow"
        what = Text(printable(problem.what), style=style)
        what.append(f"\nremedy: {printable(problem.remedy)}", style="default")
        rows.append(("error" if problem.is_fatal else "note", what))
    console.print(facts_table(rows))
