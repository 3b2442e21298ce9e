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

from jaxinf.cli.arguments import FLAG_FORMS, Switch, option
from jaxinf.command_line import ByteSize, UsageError
from jaxinf.errors import printable
from jaxinf.streaming import device_is_host, gpu_limit
from jaxinf.terminal import format_bytes, make_console
from jaxinf.train.checks import check
from jaxinf.train.config import TrainConfig
from jaxinf.train.count import RunNeeds, count
from jaxinf.train.loading import load, make_batches
from jaxinf.train.messages import say_config
from jaxinf.train.run_file import config_of
from jaxinf.transfer import MACHINE_MEMORY_BYTES, existing_parent

_PROG = "jaxinf plan"
_FILES = {".toml": "--config", ".json": "--preset", "": "--from"}
_RATED_BYTES = 1_200 * 10**12  # that a drive of 2 TB is often rated for

_Tiers: TypeAlias = Mapping[str, tuple[int, int | None]]
"""Bytes needed and there, of what the run uses; None if unknown."""


@dataclass(frozen=True)
class Plan:
    """Count what a training run would take: memory at its peak, disk, and bytes.

    Takes the trainer's flags (jaxinf train --help); before them may stand a run's file
    of TOML, a model's config.json, or a folder with one. Nothing is trained or written,
    and no weights are read. The exit status is 1 if the run does not fit.
    """

    # Bytes that each drive moves in a second, as 'jaxinf doctor' measures them (mixed),
    # such as 1.8GB: for the least time of a step.
    drive_rate: Annotated[int | None, ByteSize, option()] = None
    # Count for a GPU with this much memory for JAX (18GiB of a card's 24 by default),
    # in place of this machine's JAX device.
    gpu_memory: Annotated[int | None, ByteSize, option()] = None
    # Print one JSON document instead.
    json: Switch = False


def main(words: Sequence[str]) -> int:
    """Runs the command; returns the exit status."""
    own, rest = tyro.cli(
        Plan, prog=_PROG, args=words, return_unknown_args=True, config=FLAG_FORMS
    )
    if rest and not rest[0].startswith("-"):
        alone = Path(rest[0], "config.json")
        if alone.is_file() and not any(alone.parent.glob("*.safetensors")):
            rest[0] = str(alone)
        rest = [_FILES.get(Path(rest[0]).suffix, "--from"), *rest]
    config = config_of(rest, _PROG)
    if config.distributed is not None:
        raise UsageError("--distributed: one process is planned; leave it out")
    if 0 in (own.drive_rate, own.gpu_memory):
        raise UsageError("--drive-rate, --gpu-memory: expected at least 1 B, got 0")
    if config.store is None and config.mode != "memory":
        config = replace(config, store=Path("STORE"))
    config = check(config)
    config, data = load(config)
    device_bytes, limit = _device_bytes(), None
    device = f"this machine's {jax.devices()[0].platform.upper()}"
    if own.gpu_memory is not None:
        device, device_bytes = "a GPU", own.gpu_memory
        limit = gpu_limit(own.gpu_memory)
    console = make_console(soft_wrap=True)
    if not own.json:
        say_config(console, config, data)
        console.print(f"counting for {device}; host and disk are this machine's …")
    needs = count(config, make_batches(config, data)[0], device_bytes, limit)
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
    wear_bytes = needs.drive_write_bytes * config.steps // needs.num_drives
    if own.json:
        both = ("needed_bytes", "there_bytes")
        named = {name: dict(zip(both, two, strict=True)) for name, two in tiers.items()}
        document = {"fits": fits, "tiers": named, "step": asdict(needs)}
        document |= {"drives_s": time_s, "written_bytes_per_drive": wear_bytes}
        print(json.dumps(document, indent=1))
    else:
        lines = _lines(config, needs, tiers, time_s, wear_bytes)
        text = printable("\n".join(lines), keep="\n")
        console.print(text, markup=False, highlight=False)
    return int(not fits)


def _device_bytes() -> int | None:
    """Returns the memory of the JAX device; None if it computes in the host's."""
    device = jax.devices()[0]
    if device_is_host(device):
        return None
    return (device.memory_stats() or {}).get("bytes_limit")


def _free_bytes(config: TrainConfig) -> int | None:
    """Returns the space for a new store; None if it is there, or is not known."""
    place = config.store
    if place is None or place.expanduser().exists() or _away(config):
        return None
    free = {}
    for root in config.csd_root or (place,):
        there = existing_parent(root.expanduser())
        free[there.stat().st_dev] = shutil.disk_usage(there).free
    return sum(free.values())


def _lines(
    config: TrainConfig,
    needs: RunNeeds,
    tiers: _Tiers,
    time_s: float | None,
    wear_bytes: int,
) -> list[str]:
    lines, lacking, limit = list[str](), list[str](), ""
    if config.mode == "stream" and config.memory is not None:
        limit = f" of --memory {format_bytes(config.memory)},"
    for name, (needed, there) in tiers.items():
        beside = f"{limit} beside up to 600 MB of the process" * (name == "host")
        has = "" if there is None else f", there is {format_bytes(there)}"
        lines.append(f"{name:7} needed {format_bytes(needed)}{beside}{has}")
        if there is not None and needed > there:
            pair = f"{format_bytes(needed)}, has {format_bytes(there)}"
            cure = _remedy(name, config)
            lacking.append(f"does not fit: the {name} needs {pair}; give {cure}")
    lines += [
        f"        {one}: not here, its space is not known" for one in _away(config)
    ]
    if needs.drive_read_bytes or needs.drive_write_bytes:
        moved = needs.drive_read_bytes, needs.drive_write_bytes
        read, written = map(format_bytes, moved)
        lines.append(f"drives  {read} read and {written} written a step")
        if wear_bytes:
            num_runs = _RATED_BYTES / wear_bytes
            count = f"{num_runs:,.0f}" if num_runs >= 10 else f"{num_runs:.2g}"
            run = f"{format_bytes(wear_bytes)} to each drive in {config.steps:,} steps"
            rated = f"one rated for 1,200 TB lasts {count} such runs"
            lines.append(f"wear    {run}; {rated}")
        time = "not known; give --drive-rate, which 'jaxinf doctor' measures (mixed)"
        if time_s is not None:
            time = f"at least {time_s:.3g} s a step, for the drives alone"
        lines.append(f"time    {time}")
    return [*lines, *lacking, "nothing was trained or written"]


def _away(config: TrainConfig) -> list[Path]:
    return [root for root in config.csd_root or () if not root.expanduser().is_dir()]


def _remedy(name: str, config: TrainConfig) -> str:
    """Returns settings that may help, without those in force."""
    if name == "disk":
        state = "" if config.state == "int8" else "--state int8, "
        return f"{state}more drives (--csd-root) or a smaller model"
    if config.mode == "stream":
        return "a smaller --memory" if name == "host" else "a smaller --device-memory"
    return "--mode stream with a --memory, or more --micro-batches"
