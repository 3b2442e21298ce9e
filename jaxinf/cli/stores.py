"""``jaxinf store``: other forms of its state, other drives or processes, free space."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro

from jaxinf.cli.options import StorePath, option
from jaxinf.cli.processes import TogetherOptions, redivide_together
from jaxinf.cli.terminal import show_progress
from jaxinf.command_line import UsageError
from jaxinf.engine import AverageChoice, MasterFormat, StateFormat, convert_store
from jaxinf.engine.options import check_share
from jaxinf.store import (
    Redivided,
    Team,
    in_line,
    rebalance,
    redivide,
    trim_store,
)
from jaxinf.terminal import format_bytes, printable


@dataclass(frozen=True)
class _Convert:
    """Make a new store from a committed step, with its state in more or fewer bits.

    The old store and its checkpoints do not change. No number changes in a conversion
    to fp32, or between --master fp32 and split. To fewer bits, numbers are rounded as
    in a training step.
    """

    store: StorePath
    new: Annotated[
        tyro.conf.Positional[str], option("The directory of the new store.", "NEW")
    ]
    state: Annotated[
        StateFormat | None,
        option("Format of the state in the new store.", "{fp32,bf16,int8}"),
    ] = None
    master: Annotated[
        MasterFormat | None,
        option(
            "Format of the master of bfloat16 params: float32, the params with 16-bit "
            "remainders, or no separate master.",
            "{fp32,split,none}",
        ),
    ] = None
    average: Annotated[
        AverageChoice | None,
        option(
            "Format of the params' average in the new store; one that the store does "
            "not have begins as a copy of the params, and none drops it.",
            "{fp32,bf16,none}",
        ),
    ] = None
    csd_root: Annotated[
        tyro.conf.UseAppendAction[tuple[Path, ...]],
        option("A CSD root of the new store; repeat it for more.", "DIR"),
    ] = ()

    def run(self) -> None:
        source, target = (
            Path(p).expanduser().absolute() for p in (self.store, self.new)
        )
        changes = {"state": self.state, "master": self.master, "average": self.average}
        if not any(changes.values()):
            raise UsageError("convert: give --state, --master or --average")
        roots = [root.expanduser().absolute() for root in self.csd_root]
        with show_progress(f"converting {source}") as progress:
            step = convert_store(
                source,
                target,
                self.state,
                master=self.master,
                average=self.average,
                csds=roots,
                progress=progress,
            )
        shown = ", ".join(f"{name} as {to}" for name, to in changes.items() if to)
        print(f"{target}: step {step}, {shown}")


@dataclass(frozen=True, kw_only=True)
class _Rebalance(TogetherOptions):
    """Spread a store over other CSD roots: add drives, drop some, or deal by shares.

    No bit changes, also in checkpoints, and most chunks stay where they are. The store
    must not be open. If the command is interrupted, run it again; until then the store
    is valid, with the old or the new roots. --processes divides it among another number
    of processes; then STORE may be the path of a run, all of whose members can be seen.
    With --distributed, processes that all see them make the new members together.
    """

    store: StorePath
    csd_root: Annotated[
        tyro.conf.UseAppendAction[tuple[Path, ...]],
        option("A CSD root of the store from now on; repeat it for all.", "DIR"),
    ] = ()
    share: Annotated[
        tyro.conf.UseAppendAction[tuple[float, ...]],
        option(
            "The share of a CSD root, as far as it has room; repeat it, in the order "
            "of the roots.",
            "N",
        ),
    ] = ()
    processes: Annotated[
        int | None,
        option(
            "Divide it among so many processes; {process} in a CSD root is the number "
            "of one. Chunks get other owners.",
            "N",
        ),
    ] = None
    devices: Annotated[
        int | None,
        option(
            "With --processes: number of their JAX devices, in a line, over which "
            "leaves that are sharded along one dimension will be. Those whose chunks "
            "that would cut get another grid. By default as many as there are shards, "
            "or one a process.",
            "N",
        ),
    ] = None

    def _divide(self, path: Path, count: int) -> None:
        if self.share:
            raise UsageError("--share does not go with --processes")
        if self.devices is not None and (
            self.devices < 1 or (count > 0 and self.devices % count)
        ):
            raise UsageError(
                f"--devices: expected as many for each of {count} processes, found "
                f"{self.devices} in all"
            )
        roots = [str(root.expanduser().absolute()) for root in self.csd_root]
        shards_of = None
        if self.devices is not None:
            shards_of = partial(in_line, count=count, num_devices=self.devices)

        def divide(team: Team | None) -> Redivided:
            with show_progress(f"dividing {path}") as progress:
                return redivide(
                    path, count, roots, progress, shards_of=shards_of, team=team
                )

        if self.distributed:
            done = redivide_together(path, self, divide)
        else:
            done = divide(None)
        if done is None:  # the first process tells
            return
        print(
            f"{path}: among {count} process{'es' if count > 1 else ''}, "
            f"{done.num_chunks} chunks with another owner, "
            f"{format_bytes(done.num_bytes)}"
        )
        if done.regridded:
            print(f"with a new grid: {', '.join(map(printable, done.regridded))}")
        if done.idle:
            print(f"nothing is owned by process {', '.join(map(str, done.idle))}")
        if done.dropped:
            print(
                "dropped, as not all members had them of one commit: checkpoint "
                + ", ".join(map(printable, done.dropped))
            )

    def run(self) -> None:
        path = Path(self.store).expanduser().absolute()
        self.check_together()
        if self.processes is None and (self.devices is not None or self.distributed):
            raise UsageError("--devices, --distributed: expected with --processes")
        if self.processes is not None:
            self._divide(path, self.processes)
            return
        roots = [root.expanduser().absolute() for root in self.csd_root]
        if self.share and len(self.share) != len(roots):
            raise UsageError(
                f"rebalance: expected a --share for each --csd-root, found "
                f"{len(self.share)} for {len(roots)}"
            )
        for root, share in zip(roots, self.share, strict=False):
            check_share(root, share)
        with show_progress(f"rebalancing {path}") as progress:
            done = rebalance(path, roots, progress, shares=self.share)
        print(
            f"{path}: {done.num_chunks} chunks moved, {format_bytes(done.num_bytes)}; "
            f"now on {', '.join(map(str, roots))}"
        )


@dataclass(frozen=True)
class _Trim:
    """Free the space of the slot that the next step will write: half of the store.

    The committed step and all checkpoints stay. The store must not be open. A run that
    goes on takes the space again.
    """

    store: StorePath

    def run(self) -> None:
        path = Path(self.store).expanduser().absolute()
        print(f"{path}: {format_bytes(trim_store(path))} freed")


@dataclass(frozen=True)
class Store:
    """Change how a store's state is stored or its drives, or free space."""

    action: (
        Annotated[_Convert, tyro.conf.subcommand("convert")]
        | Annotated[_Rebalance, tyro.conf.subcommand("rebalance")]
        | Annotated[_Trim, tyro.conf.subcommand("trim")]
    )

    def run(self) -> int:
        """Returns the exit status."""
        self.action.run()
        return 0
