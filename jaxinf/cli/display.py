"""Headings, tables and progress displays of the commands.

Invariant: printed text is never taken for markup; on a terminal it fits the width, in a
pipe no line is cut or wrapped.
"""

import contextlib
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence

from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from jaxinf.terminal import make_console
from jaxinf.typing import ProgressCallback


def heading(text: str) -> Text:
    return Text(f"\n{text}", style="bold")


def make_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str | Text]],
    right: Collection[str] = (),
) -> Table:
    """Makes a table; long cells fold, so that names can be copied whole."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        is_right = column in right
        justify = "right" if is_right else "left"
        table.add_column(column, justify=justify, overflow="fold", no_wrap=is_right)
    for row in rows:
        table.add_row(*row)
    return table


def facts_table(facts: Iterable[tuple[str, str | Text]]) -> Table:
    table = make_table(("", ""), facts)
    table.show_header = False
    table.columns[0].style, table.columns[0].no_wrap = "dim", True
    return table


@contextlib.contextmanager
def show_progress(title: str) -> Iterator[ProgressCallback]:
    """Shows a bar on standard error if that is a terminal; yields its callback."""
    progress = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=make_console(sys.stderr),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    with progress:
        task = progress.add_task(title, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
