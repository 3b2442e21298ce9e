"""``jaxinf checkpoint``: keeps, lists, removes, restores and exports committed steps.

Invariant: no command disturbs a running writer; to restore, the store must be closed.
An export appears only when it is complete.
"""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from jaxinf.cli.arguments import PathArg, StorePath, Switch, absolute_path, option
from jaxinf.cli.committed import print_warning
from jaxinf.cli.display import make_table, show_progress
from jaxinf.command_line import ByteSize, UsageError
from jaxinf.errors import printable
from jaxinf.exchange import (
    TRANSIT_BYTES,
    ExportOptions,
    ObjectStore,
    export_huggingface,
    export_safetensors,
    export_url,
    is_url,
    kept_tokenizer,
    read_tokenizer_files,
)
from jaxinf.store import (
    CopySource,
    list_checkpoints,
    open_members,
    remove_members_checkpoints,
    restore_members_checkpoint,
    save_members_checkpoint,
    store_source,
)
from jaxinf.terminal import format_bytes, make_console


@dataclass(frozen=True)
class Save:
    """Keep the committed step by hard links, without copying data; print its path."""

    store: StorePath
    # The checkpoint's name; by default the step's number.
    name: Annotated[tyro.conf.Positional[str | None], option("[NAME]")] = None

    def run(self) -> None:
        print(*save_members_checkpoint(self.store, self.name), sep="\n")


@dataclass(frozen=True)
class List:
    """Show the checkpoints, their steps and their times."""

    store: StorePath
    # Print one JSON document instead.
    json: Switch = False

    def run(self) -> None:
        infos = list_checkpoints(*open_members(self.store))
        if self.json:
            print(json.dumps([asdict(info) for info in infos], indent=1))
            return
        if not infos:
            print(f"no checkpoints; make one: jaxinf checkpoint save {self.store}")
            return
        texts = ((info.name, str(info.step), info.committed_at) for info in infos)
        rows = [tuple(map(printable, row)) for row in texts]
        make_console().print(make_table(("name", "step", "committed"), rows, ("step",)))


@dataclass(frozen=True)
class Remove:
    """Remove checkpoints and free their space."""

    store: StorePath
    # Their names.
    names: Annotated[tyro.conf.Positional[tuple[str, ...]], option("NAME [NAME ...]")]

    def run(self) -> None:
        if not self.names:
            raise UsageError("remove: name the checkpoints to remove")
        remove_members_checkpoints(self.store, self.names)
        for name in self.names:
            print(f"removed {printable(name)}", file=sys.stderr)


@dataclass(frozen=True)
class Restore:
    """Make the next run continue from a checkpoint, which stays as it is."""

    store: StorePath
    # Its name.
    name: Annotated[tyro.conf.Positional[str], option("NAME")]
    # Discard the committed step, even if no checkpoint keeps it.
    discard_current: Switch = False

    def run(self) -> None:
        discards = self.discard_current
        record = restore_members_checkpoint(
            self.store, self.name, discard_current=discards
        )
        step = record.step
        print(f"{self.store}: at step {step} again; the next run goes on from there")


_FORMATS_OF_FLAG = {
    "dtype": ("huggingface",),
    "like": ("huggingface",),
    "average": ("safetensors", "huggingface"),
}


@dataclass(frozen=True)
class Export:
    """Write a step into a directory or to a URL, or its params as safetensors.

    This works during a run; every checksum is verified. The format zarr has all state,
    in the store's own chunks; Orbax reads it, and 'jaxinf store copy' makes the same
    store again, to the bit. If it is interrupted, give the command again. The format
    huggingface is a folder that transformers loads, for models trained by jaxinf.train.
    """

    store: StorePath
    # A directory that does not exist yet; for zarr also a URL of file://, gs:// or s3://.
    destination: Annotated[tyro.conf.Positional[str], option("DEST")]
    # Export this checkpoint instead of the last step.
    checkpoint: Annotated[str | None, option("NAME")] = None
    # All state as zarr, or params in another tool's format.
    format: Literal["zarr", "safetensors", "huggingface"] = "zarr"
    # Safetensors and huggingface: the params' average in their place.
    average: Switch = False
    # Huggingface: the folder that the params of a loop of your own came from; its
    # config.json and its tokenizer are written again.
    like: Annotated[PathArg | None, option("FOLDER")] = None
    # Huggingface: dtype of the tensors, rounded to nearest even; by default that of the
    # params in training.
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        option("{float32,bfloat16,float16}"),
    ] = None
    # Memory for data in transit.
    memory: Annotated[int, ByteSize] = TRANSIT_BYTES

    def run(self) -> None:
        where, store = self._check_destination(), self.store
        with store_source(store, self.checkpoint) as source:
            step, number = source.step, source.step.commit.step
            print_warning(store, step)
            with show_progress(f"step {number} to {where}") as progress:
                options = ExportOptions(self.memory, progress)
                content = self._write(source, where, options)
        print(f"{where}: step {number}, {content}")

    def _check_destination(self) -> str:
        """Returns the export's URL or path, if the flags fit it and each other."""
        for flag, formats in _FORMATS_OF_FLAG.items():
            if getattr(self, flag) and self.format not in formats:
                raise UsageError(f"--{flag} goes with --format {' or '.join(formats)}")
        if self.format == "zarr":
            url = self.destination
            if not is_url(url):
                url = f"file://{absolute_path(url)}"
            return ObjectStore(url).where
        if is_url(self.destination):
            raise UsageError(
                f"--format {self.format}: expected a directory, found a URL, which "
                "takes --format zarr; export to a directory, and copy that"
            )
        return str(absolute_path(self.destination))

    def _write(self, source: CopySource, where: str, options: ExportOptions) -> str:
        step, destination = source.step, Path(where)
        if self.format == "zarr":
            report = export_url(
                step, where, beside=source.files_beside, options=options
            )
            return (
                f"{report.num_objects} objects, {format_bytes(report.num_bytes)}; "
                f"{report.num_kept} chunks were there already"
            )
        average = self.average
        if self.format == "safetensors":
            export_safetensors(step, destination, options, average=average)
        else:
            tokenizer = kept_tokenizer(source.files_beside)
            if self.like is not None:
                tokenizer = read_tokenizer_files(weights=self.like)
            export_huggingface(
                step,
                destination,
                average=average,
                dtype=self.dtype,
                like=self.like,
                beside=tokenizer,
                options=options,
            )
        files = [file for file in destination.rglob("*") if file.is_file()]
        return format_bytes(sum(file.stat().st_size for file in files))


@dataclass(frozen=True)
class Checkpoint:
    """Keep, list, remove and restore committed steps; export them."""

    action: Save | List | Remove | Restore | Export

    def run(self) -> int:
        self.action.run()
        return 0
