"""``jaxinf doctor``: examines this machine and its drives.

Invariant: no file made for a measurement is left behind.

``--json`` prints one document: ``usable``; ``paths``, for each directory ``path``,
``usable``, ``filesystem``, ``mount_point``, ``source``, ``block_device``,
``rotational``, ``free_bytes``, ``total_bytes``, ``adam_params`` (that fit, in fp32),
``direct_io``, ``hard_links``, ``symlinks``, ``fallocate``, ``locks``, ``bandwidth``
(``file_bytes`` and ``read_``, ``write_``, ``mixed_bytes_per_s``, or null),
``adam_params_per_s`` and ``problems`` (``what``, ``remedy``, ``fatal``); ``machine``:
``cpu`` (``model``, ``num_cores``, ``isa``), ``memory_bytes``, ``available_bytes``,
``compiler``, ``packages``, ``jax_devices``, ``problems``; ``cards``, for each
``address``, ``firmware``, ``p2p``, ``paths`` (those on the drive beside it),
``problems``.

``--machine FILE`` writes another one, with what `jaxinf.plan.read_machine` reads.
"""

import contextlib
import json
import socket
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

from jaxinf.cli.cards import Card, look_at_cards
from jaxinf.cli.filesystem import Mount
from jaxinf.cli.machine import Machine, Problem, look_at_machine
from jaxinf.cli.place import ADAM_STEP_BYTES, Place, look_at_place
from jaxinf.cli.rates import measure_machine
from jaxinf.cli.terminal import facts_table, heading
from jaxinf.command_line import UsageError
from jaxinf.plan import write_machine
from jaxinf.terminal import (
    format_bytes,
    format_count,
    format_rate,
    make_console,
    printable,
)
from jaxinf.typing import ProgressCallback

__all__ = ["run"]

_GPT2_PARAMS = 124_439_808


def run(
    paths: Sequence[str],
    file_bytes: int,
    *,
    as_json: bool,
    machine_file: Path | None = None,
) -> bool:
    """Examines the machine and the directories, and prints the findings.

    Args:
      paths: directories to look at.
      file_bytes: length of the temporary file to measure with; 0 for none.
      as_json: print one JSON document.
      machine_file: where to write the measured rates, for ``jaxinf plan``.

    Returns:
      Whether every directory can hold a store, and JAX has a device.

    Raises:
      UsageError: the rates cannot be measured, or the file cannot be written.
    """
    if machine_file is not None and not machine_file.expanduser().parent.is_dir():
        raise UsageError(
            f"--machine {machine_file}: expected a file in a directory that exists; "
            f"mkdir -p {machine_file.parent}"
        )
    places = []
    for text in paths:
        path = Path(text).expanduser().absolute()
        with _progress(printable(str(path))) as progress:
            places.append(look_at_place(path, file_bytes, progress))
    machine = look_at_machine()
    cards = look_at_cards([place.path for place in places])
    usable = all(place.is_usable for place in places) and not any(
        problem.is_fatal for problem in machine.problems
    )
    if as_json:
        document = {
            "usable": usable,
            "paths": [place.to_json() for place in places],
            "machine": machine.to_json(),
            "cards": [card.to_json() for card in cards],
        }
        print(json.dumps(document, indent=1, allow_nan=False))
    else:
        console = make_console()
        for place in places:
            _print_place(console, place)
        _print_machine(console, machine)
        for card in cards:
            _print_card(console, card)
        _print_verdict(console, places, machine)
    if machine_file is not None and usable:
        _write_machine(machine_file.expanduser(), machine, places)
    return usable


def _write_machine(file: Path, machine: Machine, places: Sequence[Place]) -> None:
    name = f"{socket.gethostname()}, {machine.cpu_model}"
    try:
        write_machine(file, measure_machine(name, machine, places))
    except (OSError, ValueError) as error:
        found = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"--machine {file}: {found}") from None
    make_console(sys.stderr).print(
        f"wrote {printable(str(file))}", markup=False, highlight=False
    )


@contextlib.contextmanager
def _progress(name: str) -> Iterator[ProgressCallback]:
    """Shows a transient bar on standard error if that is a terminal."""
    console = make_console(sys.stderr)
    columns = (
        TextColumn("measuring {task.description}", markup=False),
        BarColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    shown = Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    )
    with shown:
        task = shown.add_task(name, total=None)
        yield lambda done, total: shown.update(task, completed=done, total=total)


def _print_place(console: Console, place: Place) -> None:
    console.print(heading(printable(str(place.path))), soft_wrap=True)
    rows: list[tuple[str, str | Text]] = []
    if place.mount is not None:
        rows.append(("file system", _file_system_text(place, place.mount)))
    if place.total_bytes:
        rows.append(("free", _space_text(place)))
    if place.abilities is not None:
        rows.append(("can", _abilities_text(place)))
    if place.bandwidth is not None:
        rows += _bandwidth_rows(place)
    console.print(facts_table(rows + _problem_rows(place.problems)))


def _file_system_text(place: Place, mount: Mount) -> str:
    drive = place.block_device
    text = f"{mount.fs_type} on {printable(mount.source)}"
    if drive is None:
        return text
    if not mount.source.endswith(f"/{drive.name}"):
        text += f", drive {drive.name}"
    return text + (", rotational" if drive.is_rotational else "")


def _space_text(place: Place) -> str:
    free, total = format_bytes(place.free_bytes), format_bytes(place.total_bytes)
    return (
        f"{free} of {total}: {format_count(place.adam_params)} params with Adam in fp32"
    )


def _abilities_text(place: Place) -> Text:
    can = place.abilities
    assert can is not None
    words = {
        "direct I/O": can.direct_io,
        "hard links": can.hard_links,
        "symlinks": can.symlinks,
        "fallocate": can.fallocate,
        "flock": can.locks,
    }
    text = Text()
    for name, works in words.items():
        text.append(", " if text else "")
        text.append(name if works else f"no {name}", style="" if works else "red")
    return text


def _bandwidth_rows(place: Place) -> list[tuple[str, str | Text]]:
    found, speed = place.bandwidth, place.adam_params_per_s
    assert found is not None
    assert speed is not None
    assert place.abilities is not None
    how = "direct" if place.abilities.direct_io else "buffered, so partly memory's"
    return [
        (
            "bandwidth",
            f"read {format_rate(found.read)}, write {format_rate(found.write)}, "
            f"mixed {format_rate(found.mixed)} "
            f"({how}, {format_bytes(found.file_bytes)})",
        ),
        (
            "means",
            f"{format_count(speed)} params/s with Adam in fp32 "
            f"({ADAM_STEP_BYTES} bytes a param and step); a step of GPT-2 small "
            f"({format_count(_GPT2_PARAMS)}) takes {_GPT2_PARAMS / speed:,.2f} s",
        ),
    ]


def _print_machine(console: Console, machine: Machine) -> None:
    console.print(heading("this machine"))
    cores = "core" if machine.num_cores == 1 else "cores"
    found = [f"{name} {v}" for name, v in machine.packages.items() if v]
    counts = Counter(machine.devices)
    devices = [f"{n} x {name}" if n > 1 else name for name, n in counts.items()]
    rows: list[tuple[str, str | Text]] = [
        (
            "processor",
            f"{machine.cpu_model}, {machine.num_cores} {cores}, {machine.isa}",
        ),
        (
            "memory",
            f"{format_bytes(machine.memory_bytes)}, "
            f"{format_bytes(machine.available_bytes)} available",
        ),
        ("packages", ", ".join(found)),
        ("JAX devices", ", ".join(devices) or "none"),
        ("compiler", machine.compiler or "none"),
    ]
    console.print(facts_table(rows + _problem_rows(machine.problems)))


def _print_card(console: Console, card: Card) -> None:
    console.print(heading(f"card {card.info.address}"))
    paths = ", ".join(map(printable, card.paths))
    rows: list[tuple[str, str | Text]] = [
        ("firmware", printable(card.info.firmware) or "unknown"),
        ("P2P", printable(card.info.p2p)),
        ("beside", paths or "none of these directories"),
    ]
    console.print(facts_table(rows + _problem_rows(card.problems)))


def _problem_rows(problems: Sequence[Problem]) -> list[tuple[str, str | Text]]:
    rows: list[tuple[str, str | Text]] = []
    for problem in problems:
        what = Text(
            printable(problem.what), style="red" if problem.is_fatal else "yellow"
        )
        what.append(f"\nremedy: {printable(problem.remedy)}", style="default")
        rows.append(("error" if problem.is_fatal else "note", what))
    return rows


def _print_verdict(console: Console, places: Sequence[Place], machine: Machine) -> None:
    bad = [printable(str(place.path)) for place in places if not place.is_usable]
    console.print()
    if bad:
        console.print(Text(f"cannot hold a store: {', '.join(bad)}", style="bold red"))
    elif any(problem.is_fatal for problem in machine.problems):
        console.print(Text("JAX cannot run here", style="bold red"))
    else:
        console.print(Text("ready", style="bold green"))
