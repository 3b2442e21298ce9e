"""Chooses the tables that a program reads in blocks of rows, and puts them in rows.

Invariant: a block is of whole chunks of the store. The choice depends on the program,
the optimizer and the store's chunks alone, or is what a kept plan has.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace

from jaxinf.streaming.plan.plan import Prepared
from jaxinf.streaming.program.keys import Keys
from jaxinf.streaming.program.lifetimes import ordered
from jaxinf.streaming.program.rows import in_rows
from jaxinf.streaming.program.tables import Table, find_tables

_OPTIMIZER = "the optimizer computes something of all of it"


def tables_in_rows(
    ready: Prepared,
    chunk_rows: Callable[[int], int],
    kept: Mapping[str, int] | None = None,
    whole: Callable[[frozenset[int]], Container[int]] = lambda _: (),
) -> Prepared | None:
    """Returns a program with its tables in blocks of rows; None if it has none.

    Args:
      chunk_rows: Returns the number of rows of a leaf's chunks.
      kept: By name, the rows of a block that a kept plan has; None if there is none.
      whole: Of leaves that may be in rows, those that the optimizer needs whole.
    """
    if ready.traced.mesh is not None:
        return None
    tables, names = find_tables(ready.lifetimes.graph), ready.traced.names
    if kept is None:
        fit = frozenset(table.leaf for table in tables if table.why is None)
        needed = whole(fit)
        for table in tables:
            if table.leaf in fit and table.leaf in needed:
                table.why = _OPTIMIZER
        rows = _chosen(ready, tables, chunk_rows)
    else:
        rows = {
            table.leaf: kept[names[table.leaf]]
            for table in tables
            if table.why is None and names[table.leaf] in kept
        }
    if not rows:
        return None
    bounds = {
        table.leaf: [*range(0, table.num_rows, rows[table.leaf]), table.num_rows]
        for table in tables
        if table.leaf in rows
    }
    lifetimes, keys = ready.keys.once(
        ("rows", *sorted(rows.items())),
        lambda: (ordered(in_rows(ready.lifetimes.graph, tables, bounds)), Keys()),
    )
    return replace(
        ready,
        lifetimes=lifetimes,
        keys=keys,
        rows=rows,
        tables=tuple(_said(ready, tables, rows)),
    )


def _chosen(
    ready: Prepared, tables: Sequence[Table], chunk_rows: Callable[[int], int]
) -> dict[int, int]:
    """Returns the rows of a block for embeddings, and for heads of their size.

    A block is no larger than half of the largest of the other params, or is one chunk:
    a segment has two blocks where they repeat.
    """
    fit = [table for table in tables if table.why is None]
    least = max((table.num_bytes for table in fit if table.is_gathered), default=None)
    if least is None:
        return {}
    fit = [one for one in fit if one.is_gathered or one.num_bytes >= least]
    leaves, sizes = {table.leaf for table in fit}, ready.lifetimes.sizes
    most = max((size for p, size in sizes.items() if p.leaf not in leaves), default=0)
    rows = {}
    for table in fit:
        length = chunk_rows(table.leaf)
        chunk_bytes = max(1, table.num_bytes * length // table.num_rows)
        count = max(1, most // (2 * chunk_bytes)) * length
        if count < table.num_rows:
            rows[table.leaf] = count
    return rows


def _said(
    ready: Prepared, tables: Sequence[Table], rows: Mapping[int, int]
) -> list[str]:
    """Says what is in rows, and why other params as large as a block are not."""
    names, said = ready.traced.names, []
    least = min(
        table.num_bytes * rows[table.leaf] // table.num_rows
        for table in tables
        if table.leaf in rows
    )
    for table in tables:
        if table.leaf in rows:
            count = -(-table.num_rows // rows[table.leaf])
            said.append(
                f"{names[table.leaf]} in {count} blocks of {rows[table.leaf]} rows"
            )
        elif table.why is not None and table.num_bytes >= least:
            said.append(f"{names[table.leaf]} whole: {table.why}")
    return said
