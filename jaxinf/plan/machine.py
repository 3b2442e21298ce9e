"""Machines as data: what moves and computes how fast, and who says so.

    jaxinf doctor --machine FILE ──► FILE ──► read_machine ◄── machines/NAME.json

Invariant: every rate has a unit, a source, and a basis: whether it was measured,
published, fitted to published times, or guessed.
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from jaxinf.schema import (
    Const,
    Either,
    Kind,
    Listed,
    Mapped,
    Number,
    OneOf,
    Record,
    SchemaError,
    Text,
    Whole,
    check_json,
)

Basis: TypeAlias = Literal["measured", "published", "fitted", "guessed"]

_VERSION = 1
_MOST_BYTES = 1 << 20
_LEAST = 1e-9
_MODES = ("memory", "update", "stream")
_PRODUCTS = ("float32", "bfloat16", "float16")


class MachineError(ValueError):
    """A machine's description is missing, damaged, or of another version."""


class Rate(NamedTuple):
    """A rate, or a capacity, of a machine.

    Attributes:
      value: The number, in the unit of the field that it is in.
      source: Who says so.
      basis: How it is known. ``"fitted"``: to published times.
    """

    value: float
    source: str
    basis: Basis = "published"


_FIELDS = {
    "bytes": "memory endurance process file",
    "bytes/s": "read write mixed flush copy link kernel decompressor to_device to_host "
    "network",
    "calls/s": "calls",
    "commits/s": "commits",
    "launches/s": "launches",
    "moves/s": "moves",
    "operations/s": "products programs",
    "params/s": "updates",
    "round trips/s": "round_trips",
}
_UNITS = {name: unit for unit, names in _FIELDS.items() for name in names.split()}


@dataclass(frozen=True, kw_only=True)
class Drive:
    """A drive, as its host has it.

    Attributes:
      count: Number of such drives.
      read, write: In bytes/s, alone.
      mixed: In bytes/s, of reads and writes in equal parts together.
      endurance: Bytes that may be written to it in its life; None if it is not known.
      flush: In bytes/s, what it has taken made durable, as a drive with a cache does at
        a commit; None if `write` and `mixed` are until durable.
      file: Bytes of the file that they were measured with; None if it is not known. A
        drive with a cache may be slower when it takes much more at once.
    """

    count: int = 1
    read: Rate
    write: Rate
    mixed: Rate
    endurance: Rate | None = None
    flush: Rate | None = None
    file: Rate | None = None


@dataclass(frozen=True, kw_only=True)
class Card:
    """The processor beside a drive, of a computational storage device.

    Attributes:
      read, write: Of the drive by the processor, in bytes/s.
      kernel: Of an update's input of state and gradient, in bytes/s.
      decompressor: Of its output of dense gradient, in bytes/s.
    """

    read: Rate
    write: Rate
    kernel: Rate
    decompressor: Rate


@dataclass(frozen=True, kw_only=True)
class Device:
    """A JAX device with memory of its own.

    Attributes:
      memory: Its capacity in bytes.
      to_device, to_host: Copies, in bytes/s.
    """

    memory: Rate
    to_device: Rate
    to_host: Rate


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A host with its drives, and the device that computes.

    Attributes:
      name: Its name.
      num_cores: Cores of the host.
      memory: The host's memory in bytes.
      copy: Copies within the host's memory by one core, in bytes/s.
      products: Matrix products of what computes, in operations/s by dtype; a
        multiplication and an addition are two.
      updates: Params/s that one core of the host updates in memory, checksums
        included, by optimizer and state, such as ``"adamw fp32"``.
      drives: Its drives.
      device: What computes, if it has memory of its own; None if the host does.
      card: What each drive has beside it; None for plain drives.
      link: Bytes/s between the host and all drives together, each way; None if the
        drives are slower.
      programs: As `products`, of a model's loss and gradient; empty if only products
        are known.
      commits: Commits a second; None if it is not known, and so on.
      launches: Programs a second with next to nothing to compute, one after another.
      calls: Calls a second beside their programs, of a streamed step: what chooses and
        hands over their operands.
      moves: Reads or writes a second of next to nothing on a drive by a step.
      process: Memory of a process that trains, beside a step's, in bytes by mode: of
        `"memory"` and `"update"` the most, of `"stream"` while it steps, when it has
        given back what compilation took; empty if it is not known.
      network: Bytes/s that a host sends to others while it receives as many; None for a
        machine alone.
      round_trips: Messages to another host and back, a second, one after another.
    """

    name: str
    num_cores: int
    memory: Rate
    copy: Rate
    products: Mapping[str, Rate]
    updates: Mapping[str, Rate]
    drives: tuple[Drive, ...] = ()
    device: Device | None = None
    card: Card | None = None
    link: Rate | None = None
    programs: Mapping[str, Rate] = field(default_factory=dict)
    commits: Rate | None = None
    launches: Rate | None = None
    calls: Rate | None = None
    moves: Rate | None = None
    process: Mapping[str, Rate] = field(default_factory=dict)
    network: Rate | None = None
    round_trips: Rate | None = None

    def rates(self) -> Iterator[tuple[str, Rate]]:
        """Yields each rate with its place, such as ``drives[0].read``."""
        return _rates(self, "")


def _rates(value: Any, where: str) -> Iterator[tuple[str, Rate]]:
    if isinstance(value, Rate):
        yield where, value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _rates(one, f"{where}[{key!r}]")
    elif isinstance(value, tuple):
        for number, one in enumerate(value):
            yield from _rates(one, f"{where}[{number}]")
    elif is_dataclass(value):
        for one in fields(value):
            place = f"{where}.{one.name}" if where else one.name
            yield from _rates(getattr(value, one.name), place)


# --- as documents -------------------------------------------------------------------


def _rate_kind(name: str) -> Kind:
    return Record(
        {
            "value": Number(_LEAST, 1e24),
            "unit": Const(_UNITS[name]),
            "source": Text(most_bytes=1000),
            "basis": OneOf(get_args(Basis)),
        }
    )


def _rates_kind(needed: str, optional: str = "", **others: Kind) -> Kind:
    optionals = {n: Either(Const(None), _rate_kind(n)) for n in optional.split()}
    rates = {name: _rate_kind(name) for name in needed.split()}
    return Record(rates, {**others, **optionals})


_SCHEMA = Record(
    {
        "version": Const(_VERSION),
        "name": Text(most_bytes=200),
        "num_cores": Whole(1, 1 << 20),
        "memory": _rate_kind("memory"),
        "copy": _rate_kind("copy"),
        "products": Mapped(_rate_kind("products"), OneOf(_PRODUCTS)),
        "updates": Mapped(_rate_kind("updates"), Text(most_bytes=200)),
        "drives": Listed(
            _rates_kind(
                "read write mixed", "endurance flush file", count=Whole(1, 1 << 20)
            ),
            most=1000,
        ),
    },
    {
        "device": Either(Const(None), _rates_kind("memory to_device to_host")),
        "card": Either(Const(None), _rates_kind("read write kernel decompressor")),
        "link": Either(Const(None), _rate_kind("link")),
        "commits": Either(Const(None), _rate_kind("commits")),
        "launches": Either(Const(None), _rate_kind("launches")),
        "calls": Either(Const(None), _rate_kind("calls")),
        "moves": Either(Const(None), _rate_kind("moves")),
        "network": Either(Const(None), _rate_kind("network")),
        "round_trips": Either(Const(None), _rate_kind("round_trips")),
        "process": Mapped(_rate_kind("process"), OneOf(_MODES)),
        "programs": Mapped(_rate_kind("programs"), OneOf(_PRODUCTS)),
    },
)


def _document(value: Any, name: str = "") -> Any:
    if isinstance(value, Rate):
        return {"value": value.value, "unit": _UNITS[name], **value._asdict()}
    if isinstance(value, Mapping):
        return {key: _document(one, name) for key, one in value.items()}
    if isinstance(value, tuple):
        return [_document(one) for one in value]
    if not is_dataclass(value):
        return value
    return {
        one.name: _document(getattr(value, one.name), one.name) for one in fields(value)
    }


def _rate(document: Mapping[str, Any] | None) -> Rate | None:
    if document is None:
        return None
    return Rate(document["value"], document["source"], document["basis"])


def _made(kind: type, document: Mapping[str, Any] | None) -> Any:
    if document is None:
        return None
    return kind(
        **{key: _rate(one) if key != "count" else one for key, one in document.items()}
    )


def _machine(document: Mapping[str, Any]) -> Machine:
    rates: dict[str, Any] = {}
    for name in ("products", "updates", "programs", "process"):
        rates[name] = {k: _rate(one) for k, one in document.get(name, {}).items()}
    alone = ("memory", "copy", "link", "commits", "launches", "calls", "moves")
    for name in (*alone, "network", "round_trips"):
        rates[name] = _rate(document.get(name))
    return Machine(
        name=document["name"],
        num_cores=document["num_cores"],
        drives=tuple(_made(Drive, one) for one in document["drives"]),
        device=_made(Device, document.get("device")),
        card=_made(Card, document.get("card")),
        **rates,
    )


def _shipped() -> Mapping[str, Any]:
    folder = resources.files("jaxinf.plan") / "machines"
    files = [file for file in folder.iterdir() if file.name.endswith(".json")]
    return {file.name.removesuffix(".json"): file for file in files}


MACHINES: tuple[str, ...] = tuple(sorted(_shipped()))
"""Names of the machines that come with the package."""


def read_machine(name: str | Path) -> Machine:
    """Reads a machine's description; blocks.

    Args:
      name: One of `MACHINES`, or else a file that `write_machine` or a person wrote.

    Raises:
      MachineError: No such machine or file, or its content is no description: names
        the file and the field.
    """
    shipped = _shipped().get(str(name))
    try:
        if shipped is not None:
            content = shipped.read_bytes()
        else:
            with open(os.path.expanduser(name), "rb") as file:
                content = file.read(_MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        found = error.strerror if isinstance(error, OSError) else error
        raise MachineError(
            f"machine {name}: expected a file that 'jaxinf doctor --machine FILE' "
            f"wrote, or one of {', '.join(MACHINES)}; found: {found}"
        ) from None
    try:
        document = check_json(content, _SCHEMA, most_bytes=_MOST_BYTES)
    except SchemaError as error:
        raise MachineError(
            f"machine {name}: {error}; write it with 'jaxinf doctor --machine FILE', "
            f"or mend the field"
        ) from None
    return _machine(document)


def write_machine(path: Path, machine: Machine) -> None:
    """Writes a machine's description, in place of one that is there; blocks.

    Raises:
      OSError: The file cannot be written.
    """
    document = {"version": _VERSION, **_document(machine)}
    _SCHEMA.check(document)
    beside = path.with_name(f"{path.name}.tmp{os.getpid()}")
    beside.write_text(json.dumps(document, indent=1) + "\n")
    beside.replace(path)
