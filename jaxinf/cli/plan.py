"""``jaxinf plan``: what a training run would take, beside what this machine has.

Invariant: nothing is trained or written.
"""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, TypeAlias

import jax
import tyro

from jaxinf.cli.arguments import FLAG_FORMS, Switch, option
from jaxinf.command_line import ByteSize, UsageError
from jaxinf.errors import printable
from jaxinf.streaming import device_is_host, gpu_limit
from jaxinf.terminal import exact_bytes, format_bytes, make_console
from jaxinf.train.checks import check
from jaxinf.train.config import TrainConfig
from jaxinf.train.count import RunNeeds, count_needs, roots_by_drive
from jaxinf.train.loading import load_data, make_batches
from jaxinf.train.messages import print_config
from jaxinf.train.run_file import parse_config
from jaxinf.transfer import MACHINE_MEMORY_BYTES, existing_parent
from jaxinf.typing import FLOAT32

_PROG = "jaxinf plan"
_FILES = {".toml": "--config", ".json": "--preset", "": "--from"}
_RATED_BYTES = 1_200 * 10**12  # that a drive of 2 TB is often rated for
_STREAM_SHARE = 0.75  # of this machine's memory, in advice

_Tiers: TypeAlias = Mapping[str, tuple[int, int | None]]
"""Bytes that a run needs, and those that are there; None if that is not known."""


@dataclass(frozen=True)
class PlanCommand:
    """Count what a training run would take: memory at its peak, disk, and bytes.

    Takes the trainer's flags (jaxinf train --help); before them may stand a run's file
    of TOML, a model's config.json, or a folder with one. Nothing is trained or written,
    and no weights are read. The exit status is 1 if the run does not fit.
    """

    # Bytes that each drive moves in a second, as 'jaxinf doctor' measures them (mixed),
    # such as 1.8GB: for the least time of a step.
    drive_rate: Annotated[int | None, ByteSize, option()] = None
    # Count for a GPU in place of this machine's JAX device: the memory that JAX has
    # there, 3/4 of the card's unless XLA_PYTHON_CLIENT_MEM_FRACTION is set. For a card
    # of 24 GiB give 18GiB.
    gpu_memory: Annotated[int | None, ByteSize, option()] = None
    # Print one JSON document instead.
    json: Switch = False


def main(words: Sequence[str]) -> int:
    options, flags = tyro.cli(
        PlanCommand, prog=_PROG, args=words, return_unknown_args=True, config=FLAG_FORMS
    )
    config = _read_config(flags)
    if 0 in (options.drive_rate, options.gpu_memory):
        raise UsageError("--drive-rate, --gpu-memory: expected at least 1 B, got 0")
    config, data = load_data(check(config))
    device_bytes, limit = _device_bytes(), None
    device = f"this machine's {jax.devices()[0].platform.upper()}"
    if options.gpu_memory is not None:
        device, device_bytes = "a GPU", options.gpu_memory
        limit = gpu_limit(options.gpu_memory)
    console = make_console(soft_wrap=True)
    if not options.json:
        print_config(console, config, data)
        console.print(f"counting for {device}; host and disk are this machine's …")
    needs = count_needs(config, make_batches(config, data)[0], device_bytes, limit)
    pairs = {
        "host": (needs.host_bytes, MACHINE_MEMORY_BYTES),
        "device": (needs.device_bytes, device_bytes),
        "disk": (needs.disk_bytes, _free_bytes(config)),
    }
    tiers = {name: pair for name, pair in pairs.items() if pair[0]}
    fits = all(there is None or needed <= there for needed, there in tiers.values())
    moved_bytes, time_s = needs.drive_read_bytes + needs.drive_write_bytes, None
    if options.drive_rate is not None:
        time_s = moved_bytes / needs.num_drives / options.drive_rate
    wear_bytes = needs.drive_write_bytes * config.steps // needs.num_drives
    if options.json:
        names = ("needed_bytes", "there_bytes")
        tier_documents = {k: dict(zip(names, v, strict=True)) for k, v in tiers.items()}
        document = {"fits": fits, "tiers": tier_documents, "step": asdict(needs)}
        document |= {"drives_s": time_s, "written_bytes_per_drive": wear_bytes}
        print(json.dumps(document, indent=1))
    else:
        lines = [
            *_tier_lines(config, needs, tiers),
            *_drive_lines(config, needs, time_s, wear_bytes),
            "nothing was trained or written",
        ]
        text = printable("\n".join(lines), keep="\n")
        console.print(text, markup=False, highlight=False)
    return int(not fits)


def _read_config(flags: Sequence[str]) -> TrainConfig:
    """Parses the trainer's flags, before which a file or a folder may stand."""
    if flags and not flags[0].startswith("-"):
        path, *others = flags
        path = str(_config_without_weights(Path(path)) or path)
        flags = [_FILES.get(Path(path).suffix, "--from"), path, *others]
    config = parse_config(flags, _PROG)
    if config.distributed is not None:
        raise UsageError("--distributed: one process is planned; leave it out")
    source = config.source
    if source is not None and _config_without_weights(source.expanduser()) is not None:
        raise UsageError(
            f"--from {source}: expected weights, found a config.json alone; to plan "
            f"for its model: jaxinf plan {source}"
        )
    if config.store is None and config.mode != "memory":
        config = replace(config, store=Path("STORE"))
    return config


def _config_without_weights(folder: Path) -> Path | None:
    """Returns the config.json of a folder that has no weights; else None."""
    path = folder / "config.json"
    has_weights = any(folder.glob("*.safetensors"))
    return path if path.is_file() and not has_weights else None


def _device_bytes() -> int | None:
    """Returns the memory of the JAX device; None if it computes in the host's."""
    device = jax.devices()[0]
    if device_is_host(device):
        return None
    return (device.memory_stats() or {}).get("bytes_limit")


def _free_bytes(config: TrainConfig) -> int | None:
    """Returns the space for a new store; None if it exists, or that is not known."""
    store = config.store
    if store is None or store.expanduser().exists() or _missing_roots(config):
        return None
    free = {}
    for root in config.csd_root or (store,):
        parent = existing_parent(root.expanduser())
        free[parent.stat().st_dev] = shutil.disk_usage(parent).free
    return sum(free.values())


def _missing_roots(config: TrainConfig) -> list[Path]:
    return [root for root in config.csd_root if not root.expanduser().is_dir()]


def _tier_lines(config: TrainConfig, needs: RunNeeds, tiers: _Tiers) -> Iterator[str]:
    limit = ""
    if config.mode == "stream" and config.memory is not None:
        limit = f" of --memory {format_bytes(config.memory)},"
    for name, (needed, there) in tiers.items():
        beside = f"{limit} beside up to 600 MB of the process" * (name == "host")
        has = "" if there is None else f", there is {format_bytes(there)}"
        yield f"{name:7} needed {format_bytes(needed)}{beside}{has}"
    for root in _missing_roots(config):
        yield f"        {root}: not here, its space is not known"
    for name, (needed, there) in tiers.items():
        if there is not None and needed > there:
            remedy = _remedy(name, config, needs, there)
            pair = f"{format_bytes(needed)}, has {format_bytes(there)}"
            yield f"does not fit: the {name} needs {pair}; give {remedy}"


def _drive_lines(
    config: TrainConfig, needs: RunNeeds, time_s: float | None, wear_bytes: int
) -> Iterator[str]:
    moved = needs.drive_read_bytes, needs.drive_write_bytes
    if not any(moved):
        return
    read, written = map(format_bytes, moved)
    yield f"drives  {read} read and {written} written a step"
    if needs.spilled_bytes and config.clip_norm and config.durability in ("step", 1):
        spilled = f"of it, and of the disk, {format_bytes(needs.spilled_bytes)}"
        yield f"        {spilled} are gradients that wait for --clip-norm;"
        yield "        --clip-norm 0 saves them, --lora or --freeze a part"
    for roots in roots_by_drive(config).values():
        if roots[1:]:
            names = " and ".join(map(str, roots))
            yield f"        {names} are one drive, and counted as one"
    if wear_bytes:
        num_runs = _RATED_BYTES / wear_bytes
        lasts = f"{_few(num_runs)} such runs"
        if time_s:
            days = num_runs * config.steps * time_s / 86400
            lasts += f", at least {_few(days)} days"
        run = f"{format_bytes(wear_bytes)} to each drive in {config.steps:,} steps"
        yield f"wear    {run}; one rated for 1,200 TB lasts {lasts}"
    time = "not known; give --drive-rate, which 'jaxinf doctor' measures (mixed)"
    if time_s is not None:
        time = f"at least {time_s:.3g} s a step, for the drives alone"
    yield f"time    {time}"


def _few(number: float) -> str:
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def _remedy(tier: str, config: TrainConfig, needs: RunNeeds, there_bytes: int) -> str:
    """Returns settings that may help, without those in force."""
    if tier == "disk":
        state = "" if config.state == "int8" else "--state int8, "
        trained = "" if config.lora else "--lora or --freeze, "
        return f"{state}{trained}more drives (--csd-root) or a smaller model"
    if config.mode == "stream":
        return "a smaller --memory" if tier == "host" else "a smaller --device-memory"
    unit = 1 << (30 if MACHINE_MEMORY_BYTES > 2 << 30 else 20)
    memory_bytes = max(unit, int(_STREAM_SHARE * MACHINE_MEMORY_BYTES) // unit * unit)
    remedy = f"--mode stream --memory {exact_bytes(memory_bytes)}"
    # Micro-batches make activations smaller, but not params and gradients.
    if 2 * FLOAT32.itemsize * needs.num_params < there_bytes:
        remedy += ", or more --micro-batches"
    return remedy
