"""``jaxinf doctor``: examines this machine and its drives.

Invariant: no file made for a measurement is left behind.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.text import Text

from jaxinf.cli.arguments import AnyPath
from jaxinf.cli.host import Finding, look_at_host
from jaxinf.cli.place import look_at_place
from jaxinf.cli.terminal import facts_table, heading, show_progress
from jaxinf.command_line import ByteSize
from jaxinf.terminal import make_console, printable


@dataclass(frozen=True)
class Doctor:
    """Test this machine and its drives, and give a remedy for each problem.

    Measures the read, write and mixed bandwidth of each directory's file system with
    direct I/O in a temporary file. The exit status is 1 if a directory cannot hold a
    store.
    """

    # Directories where a store or a CSD root could be.
    paths: Annotated[
        tyro.conf.Positional[tuple[AnyPath, ...]], tyro.conf.arg(metavar="[PATH ...]")
    ] = (Path(),)
    # Length of the temporary file; shorter if space is short. 0 measures nothing.
    size: Annotated[int, ByteSize] = 1 << 30

    def run(self) -> int:
        """Examines, and prints the findings; returns the exit status."""
        places = []
        for path in [path.absolute() for path in self.paths]:
            with show_progress(f"measuring {printable(str(path))}") as progress:
                places.append(look_at_place(path, self.size, progress))
        host = look_at_host()
        for one in (*places, host):
            _print(one)
        bad = ", ".join(place.title for place in places if not place.is_usable)
        verdict = f"cannot hold a store: {printable(bad)}" if bad else ""
        if not bad and not host.is_usable:
            verdict = "JAX cannot run here"
        style = "bold red" if verdict else "bold green"
        make_console().print(Text(f"\n{verdict or 'ready'}", style=style))
        return 1 if verdict else 0


def _print(found: Finding) -> None:
    rows: list[tuple[str, str | Text]] = []
    rows += [(name, printable(fact)) for name, fact in found.facts.items()]
    for problem in found.problems:
        what = Text(printable(problem.what), "red" if problem.is_fatal else "yellow")
        what.append(f"\nremedy: {printable(problem.remedy)}", style="default")
        rows.append(("error" if problem.is_fatal else "note", what))
    console = make_console()
    console.print(heading(printable(found.title)), soft_wrap=True)
    console.print(facts_table(rows))
