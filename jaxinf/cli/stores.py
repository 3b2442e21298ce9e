"""``jaxinf store``: copies in another form, on other drives."""

import contextlib
import os
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from jaxinf.cli.arguments import PathArg, Switch, absolute_path, option
from jaxinf.cli.checkpoints import Export
from jaxinf.cli.committed import print_warning
from jaxinf.cli.display import show_progress
from jaxinf.command_line import ByteSize, UsageError
from jaxinf.errors import printable
from jaxinf.exchange import TRANSIT_BYTES, export_source, export_url_at, is_url
from jaxinf.store import (
    CopyLayout,
    Formats,
    MasterFormat,
    StateFormat,
    copy_step,
    store_source,
)
from jaxinf.terminal import format_bytes


@dataclass(frozen=True)
class StoreCommand:
    """Make NEW of a step: a store's, a run's, a checkpoint's, or an export's.

    In other formats, on other drives, or among another number of processes; what is not
    given stays. Chunks whose bytes stay are links where they can be, verified copies
    elsewhere. OLD does not change; it may be in use. Where NEW is OLD, it must be
    closed, its checkpoints come along, and they are exchanged at the end. If the
    command is interrupted, give it again.
    """

    # The only action: to copy.
    verb: Annotated[tyro.conf.Positional[Literal["copy"]], option("copy")]
    # A store, a run's path, a checkpoint's directory, or an export.
    old: Annotated[tyro.conf.Positional[str], option("OLD")]
    # The new store's directory, OLD itself, or a URL to export to.
    new: Annotated[tyro.conf.Positional[str], option("NEW")]
    # Format of the state.
    state: Annotated[StateFormat | None, option("{fp32,bf16,int8}")] = None
    # Format of the master of bfloat16 params: float32, the params with 16-bit
    # remainders, or no separate master.
    master: Annotated[MasterFormat | None, option("{fp32,split,none}")] = None
    # A CSD root of NEW; repeat it for all. {process} is its number.
    csd_root: Annotated[
        tyro.conf.UseAppendAction[tuple[PathArg, ...]], option("DIR")
    ] = ()
    # Divide it among so many processes.
    processes: Annotated[int | None, option("N")] = None
    # Take the checkpoints along that all members have.
    checkpoints: Switch = False
    # Memory for data from or to a URL.
    memory: Annotated[int, ByteSize] = TRANSIT_BYTES

    def run(self) -> int:
        roots, formats = map(str, self.csd_root), Formats(self.state, self.master)
        layout = CopyLayout(formats, tuple(roots), self.processes)
        url = export_url_at(self.old)
        if is_url(self.new):
            if layout != CopyLayout() or url is not None:
                raise UsageError(
                    "NEW: a URL takes a step as a store has it: make the store first, "
                    "and copy that to the URL"
                )
            Export(absolute_path(self.old), self.new, memory=self.memory).run()
            return 0
        old, new = absolute_path(self.old), absolute_path(self.new)
        is_same = url is None and os.path.realpath(old) == os.path.realpath(new)
        with contextlib.ExitStack() as stack:
            if url is not None:
                source = export_source(url, self.memory)
            else:
                has_checkpoints = is_same or self.checkpoints
                source = stack.enter_context(
                    store_source(old, holds=is_same, checkpoints=has_checkpoints)
                )
                print_warning(old, source.step)
            progress = stack.enter_context(show_progress(f"copying to {new}"))
            num_bytes = copy_step(source, new, layout, progress)
        step = source.step.commit.step
        print(f"{new}: step {step}, {format_bytes(num_bytes)} written")
        if source.dropped:
            names = ", ".join(map(printable, source.dropped))
            print(f"left out, as not all members had them: checkpoint {names}")
        return 0
