"""``jaxinf plan``: what a training run would take, beside what this machine has.

Invariant: nothing is trained or written.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, TypeAlias

import jax
import tyro

from jaxinf.cli.arguments import FLAGS, Switch, option
from jaxinf.command_line import ByteSize, UsageError
from jaxinf.terminal import format_bytes, make_console, printable
from jaxinf.train.checks import check
from jaxinf.train.config import TrainConfig
from jaxinf.train.count import RunNeeds, count
from jaxinf.train.loading import load, make_batches
from jaxinf.train.messages import say_config
from jaxinf.train.optimizers import check_optimizer
from jaxinf.train.run_file import config_of
from jaxinf.transfer import MACHINE_MEMORY_BYTES

_PROG = "jaxinf plan"
_FILES = {".toml": "--config", ".json": "--preset", "": "--from"}
_REMEDIES = {
    "disk": "give --state int8, more drives (--csd-root) or a smaller model",
    "host": "give --mode stream with a --memory, or more --micro-batches",
    "device": "give --mode stream with a --memory, or more --micro-batches",
}

_Tiers: TypeAlias = Mapping[str, tuple[int, int | None]]
"""Bytes needed and there, of what the run uses; None if unknown."""


@dataclass(frozen=True)
class Plan:
    """Count what a training run would take: memory at its peak, disk, and bytes.

    Takes the trainer's flags (jaxinf train --help), or first the name of a run's file
    (.toml), of a model's config.json, or of a folder with one. Nothing is trained or
    written, and no weights are read. The exit status is 1 if the run does not fit.
    """

    # Bytes that each drive moves in a second, as 'jaxinf doctor' measures them (mixed),
    # such as 1.8GB: for the least time of a step.
    drive_rate: Annotated[int | None, ByteSize, option()] = None
    # Print one JSON document instead.
    json: Switch = False


def main(words: Sequence[str]) -> int:
    """Runs the command; returns the exit status.

    Raises:
      UsageError: the run is impossible, or a flag has no meaning.
      JaxinfError: the run is refused.
      SystemExit: after ``--help``, and if the words do not parse.
    """
    own, rest = tyro.cli(
        Plan, prog=_PROG, args=words, return_unknown_args=True, config=FLAGS
    )
    if rest and not rest[0].startswith("-"):
        rest = [_FILES.get(Path(rest[0]).suffix, "--from"), *rest]
    config = config_of(rest, _PROG)
    if config.distributed is not None:
        raise UsageError("--distributed: one process is planned; leave it out")
    if own.drive_rate == 0:
        raise UsageError("--drive-rate: expected at least 1 B, got 0")
    if config.store is None and config.mode != "memory":
        config = replace(config, store=Path("STORE"))
    config = check(config)
    check_optimizer(config)
    config, data = load(config)
    console = make_console(soft_wrap=True)
    if not own.json:
        say_config(console, config, data)
    device_bytes = _device_bytes()
    needs = count(config, make_batches(config, data)[0], device_bytes)
    found = {
        "host": (needs.host_bytes, MACHINE_MEMORY_BYTES),
        "device": (needs.device_bytes, device_bytes),
        "disk": (needs.disk_bytes, _free_bytes(config)),
    }
    tiers = {name: pair for name, pair in found.items() if pair[0]}
    fits = all(there is None or needed <= there for needed, there in tiers.values())
    moved_bytes, time_s = needs.drive_read_bytes + needs.drive_write_bytes, None
    if own.drive_rate is not None:
        time_s = moved_bytes / needs.num_drives / own.drive_rate
    if own.json:
        both = ("needed_bytes", "there_bytes")
        named = {name: dict(zip(both, two, strict=True)) for name, two in tiers.items()}
        document = {"fits": fits, "tiers": named, "step": asdict(needs)}
        print(json.dumps(document | {"drives_s": time_s}, indent=1))
    else:
        text = printable("\n".join(_lines(needs, tiers, time_s)), keep="\n")
        console.print(text, markup=False, highlight=False)
    return int(not fits)


def _device_bytes() -> int | None:
    """Returns the memory of the JAX device; None if it computes in the host's."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        return None
    return (device.memory_stats() or {}).get("bytes_limit")


def _free_bytes(config: TrainConfig) -> int | None:
    """Returns the space for a new store; None if it is there."""
    place = config.store
    if place is None or place.expanduser().exists():
        return None
    free = {}
    for root in config.csd_root or (place,):
        root = root.expanduser().absolute()
        there = next(x for x in (root, *root.parents) if x.exists())
        free[there.stat().st_dev] = shutil.disk_usage(there).free
    return sum(free.values())


def _lines(needs: RunNeeds, tiers: _Tiers, time_s: float | None) -> list[str]:
    lines, lacking = list[str](), list[str]()
    for name, (needed, there) in tiers.items():
        has = "" if there is None else f", there is {format_bytes(there)}"
        lines.append(f"{name:7} needed {format_bytes(needed)}{has}")
        if there is not None and needed > there:
            pair = f"{format_bytes(needed)}, has {format_bytes(there)}"
            lacking.append(f"does not fit: the {name} needs {pair}; {_REMEDIES[name]}")
    if needs.drive_read_bytes or needs.drive_write_bytes:
        moved = needs.drive_read_bytes, needs.drive_write_bytes
        read, written = map(format_bytes, moved)
        lines.append(f"drives  {read} read and {written} written a step")
        time = "those bytes over the drives' rate; 'jaxinf doctor' measures it, and "
        time += "--drive-rate takes it"
        if time_s is not None:
            time = f"{time_s:.3g} s a step, for the drives alone"
        lines.append(f"time    at least {time}")
    return [*lines, *lacking, "nothing was trained or written"]
