"""``jaxinf doctor``: examines this machine and its drives.

Invariant: no file made for a measurement is left behind.

``--json`` prints one document: ``usable``; ``paths``, for each directory ``path``,
``usable``, ``filesystem``, ``mount_point``, ``source``,
``free_bytes``, ``total_bytes``, ``adam_params`` (that fit, in fp32),
``direct_io``, ``hard_links``, ``symlinks``, ``fallocate``, ``locks``, ``bandwidth``
(``file_bytes`` and ``read_``, ``write_``, ``mixed_bytes_per_s``, or null),
``adam_params_per_s`` and ``problems`` (``what``, ``remedy``, ``fatal``); ``machine``:
``cpu`` (``model``, ``num_cores``, ``isa``), ``memory_bytes``, ``available_bytes``,
``compiler``, ``packages``, ``jax_devices``, ``problems``; ``cards``, for each
``address``, ``firmware``, ``p2p``, ``paths`` (those on the drive beside it),
``problems``.

``--machine FILE`` writes another one, with what `jaxinf.plan.read_machine` reads.
"""

import json
import socket
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from jaxinf.cli.machine import Machine, Problem, look_at_machine
from jaxinf.cli.place import ADAM_STEP_BYTES, Place, look_at_place
from jaxinf.cli.rates import measure_machine
from jaxinf.cli.terminal import facts_table, heading, show_progress
from jaxinf.command_line import UsageError
from jaxinf.csd.cards.runtime import has_runtime
from jaxinf.csd.cards.sysfs import card_of, list_cards
from jaxinf.errors import CsdError
from jaxinf.plan import write_machine
from jaxinf.terminal import (
    format_bytes,
    format_count,
    format_rate,
    make_console,
    printable,
)


def run(
    paths: Sequence[str],
    file_bytes: int,
    *,
    as_json: bool,
    machine_file: Path | None = None,
) -> bool:
    """Examines the machine and the directories, and prints the findings.

    The temporary file has `file_bytes`; `machine_file` is for ``jaxinf plan``.

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
        with show_progress(f"measuring {printable(str(path))}") as progress:
            places.append(look_at_place(path, file_bytes, progress))
    machine = look_at_machine()
    cards = _look_at_cards([place.path for place in places])
    runs_jax = not any(problem.is_fatal for problem in machine.problems)
    usable = runs_jax and all(place.is_usable for place in places)
    if as_json:
        document = {
            "usable": usable,
            "paths": [place.to_json() for place in places],
            "machine": machine.to_json(),
            "cards": [
                {**card, "problems": [problem.to_json() for problem in problems]}
                for card, problems in cards
            ],
        }
        print(json.dumps(document, indent=1, allow_nan=False))
    else:
        _print(make_console(), places, machine, cards)
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
    make_console(sys.stderr).print(f"wrote {printable(str(file))}")


def _look_at_cards(paths: Sequence[Path]) -> list[tuple[dict[str, Any], list[Problem]]]:
    """Finds this machine's cards without opening them, each with its problems."""
    infos = list_cards()
    beside: dict[str, list[str]] = {info.address: [] for info in infos}
    for path in paths:
        try:
            beside[card_of(path, infos).address].append(str(path))
        except (CsdError, OSError):
            continue  # on another drive, or missing: the directory's own rows say so
    found = []
    for info in infos:
        problems = []
        if info.p2p_remedy and info.p2p != "unknown":
            problems.append(Problem(f"P2P is {info.p2p}", info.p2p_remedy))
        if not has_runtime():
            what = "XILINX_XRT is not set, or names no directory of XRT's"
            remedy = "install XRT, and `source /opt/xilinx/xrt/setup.sh` before Python"
            problems.append(Problem(what, remedy))
        card = {"address": info.address, "firmware": info.firmware, "p2p": info.p2p}
        found.append(({**card, "paths": beside[info.address]}, problems))
    return found


# --- on the terminal -----------------------------------------------------------------


def _print(
    console: Console,
    places: Sequence[Place],
    machine: Machine,
    cards: Sequence[tuple[dict[str, Any], list[Problem]]],
) -> None:
    for place in places:
        _print_part(console, str(place.path), _place_rows(place), place.problems)
    cores = "core" if machine.num_cores == 1 else "cores"
    devices = Counter(machine.devices).items()
    _print_part(
        console,
        "this machine",
        {
            "processor": f"{machine.cpu_model}, {machine.num_cores} {cores}, "
            f"{machine.isa}",
            "memory": f"{format_bytes(machine.memory_bytes)}, "
            f"{format_bytes(machine.available_bytes)} available",
            "packages": ", ".join(f"{k} {v}" for k, v in machine.packages.items() if v),
            "JAX devices": ", ".join(
                f"{n} x {name}" if n > 1 else name for name, n in devices
            )
            or "none",
            "compiler": machine.compiler or "none",
        },
        machine.problems,
    )
    for card, problems in cards:
        rows = {
            "firmware": card["firmware"] or "unknown",
            "P2P": card["p2p"],
            "beside": ", ".join(card["paths"]) or "none of these directories",
        }
        _print_part(console, f"card {card['address']}", rows, problems)
    bad = ", ".join(str(place.path) for place in places if not place.is_usable)
    console.print()
    if bad:
        text = f"cannot hold a store: {printable(bad)}"
        console.print(Text(text, style="bold red"))
    elif any(problem.is_fatal for problem in machine.problems):
        console.print(Text("JAX cannot run here", style="bold red"))
    else:
        console.print(Text("ready", style="bold green"))


def _print_part(
    console: Console,
    title: str,
    facts: dict[str, str],
    problems: Sequence[Problem],
) -> None:
    console.print(heading(printable(title)), soft_wrap=True)
    rows: list[tuple[str, str | Text]] = [(k, printable(v)) for k, v in facts.items()]
    for problem in problems:
        style = "red" if problem.is_fatal else "yellow"
        what = Text(printable(problem.what), style=style)
        what.append(f"\nremedy: {printable(problem.remedy)}", style="default")
        rows.append(("error" if problem.is_fatal else "note", what))
    console.print(facts_table(rows))


def _place_rows(place: Place) -> dict[str, str]:
    mount, speed = place.mount, place.bandwidth
    rows = {}
    if mount is not None:
        rows["file system"] = f"{mount.fs_type} on {mount.source}"
    if place.total_bytes:
        free, total = format_bytes(place.free_bytes), format_bytes(place.total_bytes)
        params = format_count(place.adam_params)
        rows["free"] = f"{free} of {total}: {params} params with Adam in fp32"
    if place.abilities:
        words = {name: name.replace("_", " ") for name in place.abilities}
        words["direct_io"] = "direct I/O"
        rows["can"] = ", ".join(
            words[name] if works else f"no {words[name]}"
            for name, works in place.abilities.items()
        )
    if speed is not None:
        is_direct = place.abilities["direct_io"]
        how = "direct" if is_direct else "buffered, so partly memory's"
        rates = {"read": speed.read, "write": speed.write, "mixed": speed.mixed}
        shown = ", ".join(f"{name} {format_rate(one)}" for name, one in rates.items())
        rows["bandwidth"] = f"{shown} ({how}, {format_bytes(speed.file_bytes)})"
        params = format_count(speed.mixed / ADAM_STEP_BYTES)
        rows["means"] = f"{params} params/s with Adam in fp32 "
        rows["means"] += f"({ADAM_STEP_BYTES} bytes a param and step)"
    return rows
