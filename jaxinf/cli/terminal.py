"""Headings, tables and progress displays of the commands.

Invariant: printed text is never taken for markup; on a terminal it fits the width, in a
pipe no line is cut or wrapped.
"""

import contextlib
import sys
from collections.abc import Iterator, Sequence

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
    """Makes a section's heading, after an empty line."""
    return Text(f"\n{text}", style="bold")


def make_table(*columns: str, right: Sequence[str] = ()) -> Table:
    """Makes an empty table; long cells fold, so that names can be copied whole."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        justify = "right" if column in right else "left"
        no_wrap = column in right
        table.add_column(column, justify=justify, overflow="fold", no_wrap=no_wrap)
    return table


def facts_table(rows: Sequence[tuple[str, str | Text]]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    return table


@contextlib.contextmanager
def show_progress(title: str) -> Iterator[ProgressCallback]:
    """Shows a bar on standard error if that is a terminal.

    Yields:
      A function to call with the number of bytes done and in all.
    """
    progress = Progress(
        TextColumn("{task.description}"),
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
