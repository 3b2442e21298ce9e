"""The options on the command line about a run, its store, streaming and processes.

Invariant: a field exists only if it works.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from jaxinf.engine import Durability
from jaxinf.store import StateFormat
from jaxinf.streaming import DeviceUpdates, Policy
from jaxinf.terminal import exact_bytes, parse_bytes
from jaxinf.train.data.options import shown

MOST_TRACED = 100
"""Steps in a trace, whose spans are kept in memory."""


def spec(
    metavar: str,
    parse: Callable[[str], Any],
    say: Callable[[Any], str] = str,
    nargs: Any = 1,
) -> Any:
    """Returns how tyro reads and writes a value that is one word; ``none`` is None."""
    return tyro.constructors.PrimitiveConstructorSpec(
        metavar=metavar,
        instance_from_str=lambda words: parse(words[0] if words else ""),
        is_instance=lambda value: True,
        str_from_instance=lambda value: ["none" if value is None else say(value)],
        nargs=nargs,
    )


def _parse_memory(text: str) -> int | None:
    return None if text.lower() == "none" else parse_bytes(text)


def _parse_device_updates(text: str) -> DeviceUpdates:
    words: dict[str, DeviceUpdates] = {"kept": None, "none": 0, "auto": "auto"}
    if text not in words and not text.isdecimal():
        raise ValueError(
            f"{text!r}: expected auto, a number, none, or kept, for as many as in the "
            "store's last step"
        )
    return words[text] if text in words else int(text)


def _parse_trace(text: str) -> tuple[int, int]:
    if not text:
        return 0, 0
    first, _, last = text.partition(":")
    if not (first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last)):
        raise ValueError(f"{text!r}: expected FIRST:LAST, such as 10:12")
    if int(last) - int(first) >= MOST_TRACED:
        raise ValueError(f"{text!r}: expected at most {MOST_TRACED} steps")
    return int(first), int(last)


@dataclasses.dataclass(frozen=True)
class Launch:
    """How processes find each other: all None if the environment says it."""

    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None

    def __str__(self) -> str:
        parts = self.coordinator, self.num_processes, self.process_id
        return ",".join(map(str, parts)) if self.coordinator else ""


def _parse_launch(text: str) -> Launch | None:
    if text in ("", "none"):
        return Launch() if not text else None
    address, *numbers = text.split(",")
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal() and [*map(str.isdecimal, numbers)] == [True] * 2):
        raise ValueError(
            f"{text!r}: expected HOST:PORT of process 0, the number of processes and "
            "that of this one, such as 10.0.0.1:1234,4,0"
        )
    return Launch(address, *map(int, numbers))


_MEMORY = spec("BYTES", _parse_memory, exact_bytes)
_DEVICE_UPDATES = spec(
    "{INT,auto,none,kept}",
    _parse_device_updates,
    lambda value: "kept" if value is None else str(value),
)
_LAUNCH = spec("[HOST:PORT,N,I]", _parse_launch, nargs=(0, 1))
_TRACE = spec(
    "[FIRST:LAST]", _parse_trace, lambda value: "{}:{}".format(*value), nargs=(0, 1)
)


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """Where a run is, how long it is, and where its state and params are."""

    # A file in TOML with flags of the run, without --: batch-size = 16. Flags win.
    run_file: Annotated[Path | None, shown("FILE", "none", name="config")] = None

    # Record what each thread, drive and JAX device does in steps FIRST to LAST, by
    # default three early ones, as LOG_DIR/trace.json, which ui.perfetto.dev opens.
    trace: Annotated[tuple[int, int] | None, _TRACE, shown("[FIRST:LAST]", "none")] = (
        None
    )

    # Also write the numbers of each step, and those of evaluations, for TensorBoard.
    tensorboard: Annotated[Path | None, shown("DIR", "none")] = None

    # Send them to this project of Weights & Biases; WANDB_MODE=offline keeps them in
    # the log directory.
    wandb: Annotated[str | None, shown("PROJECT", "none")] = None

    # Directory of the store: a new one, or the store of a run to resume.
    store: Annotated[Path | None, shown("DIR", "none; --mode update needs it")] = None

    # Train up to this number of batches in all, including those of earlier runs.
    steps: int = 1000

    # Train on each row of the data so many times, in place of --steps.
    epochs: Annotated[float | None, shown("NUMBER", "by --steps")] = None

    # Evaluate what is in the store, or in --mode memory what --from names, and stop.
    eval_only: bool = False

    # update: the optimizer's state is in the store and is updated beside the drive.
    # stream: params are in the store, too, and pass through --memory bytes. memory:
    # plain optax with all state in memory, the baseline; nothing is kept.
    mode: Literal["update", "stream", "memory"] = "update"

    # Host memory, such as 4GiB. In --mode update: of the buffers through which state
    # passes, with cards of each card. In --mode stream: of all but the process itself.
    memory: Annotated[
        int | None, _MEMORY, shown("BYTES", "512MiB; --mode stream needs it")
    ] = None


@dataclasses.dataclass(frozen=True)
class StoreOptions:
    """The store: its drives, what updates it, its formats, commits and checkpoints."""

    # A mounted drive to spread a new store's chunks over; repeat it for more drives.
    csd_root: Annotated[
        tyro.conf.UseAppendAction[tuple[Path, ...]], shown("DIR", "the store itself")
    ] = ()

    # The processor that updates the chunks: host, the CPU; smartssd, the card beside
    # the drive; emulated, an emulated card; with options (docs/cards.md).
    csd: Annotated[str, shown("host|smartssd|emulated", "host")] = "host"

    # Steps to commit: every step (step), every n-th one (a number), or checkpoints
    # alone (checkpoint). A crash loses the steps since the last commit.
    durability: Annotated[Durability, shown("{step,INT,checkpoint}", "step")] = "step"

    # Format of the optimizer's float32 state in a new store: fp32, bfloat16 with
    # stochastic rounding, or 8 bits with a scale for each 256 elements.
    state: Annotated[
        StateFormat | None, shown("{fp32,bf16,int8}", "fp32, or what the store has")
    ] = None

    # Steps between checkpoints in STORE/checkpoints, and one at the end; 0 is none. The
    # last three are kept, each in the space of one more copy of the state.
    checkpoint_every: int = 0

    # Export these steps beside training: a URL of file://, gs:// or s3://, with a
    # folder for each. One that is due while another is under way is skipped. If an
    # export fails, training goes on, and the exit status is 3.
    export_to: Annotated[str | None, shown("URL", "none")] = None

    # Continue from this checkpoint of the store, given by name.
    restore: Annotated[str | None, shown("NAME", "none: go on where the run is")] = None


@dataclasses.dataclass(frozen=True)
class StreamOptions:
    """How ``--mode stream`` divides a step and the memory."""

    # For --mode stream: memory of the JAX device for params, activations and
    # temporaries; on a CPU the part of --memory for them.
    device_memory: Annotated[int | None, _MEMORY, shown("BYTES", "what is free")] = None

    # For --mode stream. recompute: activations are computed again for the backward
    # pass. keep: they stay in memory. offload: those that --memory has no room for are
    # on the drive meanwhile. plan: the same as offload. The bits are the same.
    policy: Policy = "recompute"

    # Gradient accumulation: parts of a batch that run one after another, so that
    # activations take the memory of a part; each learned token counts alike.
    micro_batches: int = 1

    # Compute a layer's activations again in the backward pass, and do not keep them. In
    # --mode stream --policy says that.
    remat: bool = False

    # For --mode stream: the JAX device computes the updates of every so many parts of
    # the optimizer's state, and the host the others. auto: as many as save time, as was
    # measured, or none (docs/streaming.md).
    device_updates: Annotated[
        DeviceUpdates,
        _DEVICE_UPDATES,
        shown("{INT,auto,none}", "as in the store's last step, or none"),
    ] = None

    # For --mode stream: replace a plan kept in the store that does not fit --memory, or
    # go on with another --device-updates.
    replan: bool = False


@dataclasses.dataclass(frozen=True)
class ProcessOptions:
    """Several processes that train together."""

    # One of several processes of a run. SLURM, Open MPI and Kubernetes say which;
    # elsewhere give the address of process 0, which coordinates, the number of
    # processes, and that of this one, from 0: 10.0.0.1:1234,4,0.
    distributed: Annotated[
        Launch | None, _LAUNCH, shown("[HOST:PORT,N,I]", "one process")
    ] = None

    # Divide the store among the processes of this run, if it is among another number.
    elastic: bool = False

    # For --distributed: params are sharded over all devices, each on its longest
    # dimension that they divide. Without it they are replicated, and only the
    # optimizer's state is divided.
    fsdp: bool = False
