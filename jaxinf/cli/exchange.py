"""``jaxinf checkpoint export STORE``: a step, or its params.

Invariant: an export appears only when it is complete.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from jaxinf.cli.looking import say_warning
from jaxinf.cli.options import AnyPath, StorePath, option, whole_path
from jaxinf.cli.terminal import show_progress
from jaxinf.command_line import ByteSize, UsageError
from jaxinf.exchange import (
    DEFAULT_FILE_BYTES,
    DEFAULT_MEMORY_BYTES,
    ObjectStore,
    Transit,
    export_adapters,
    export_huggingface,
    export_safetensors,
    export_url,
    is_url,
    kept_tokenizer,
    tokenizer_files,
)
from jaxinf.store import CopySource, store_source
from jaxinf.terminal import format_bytes, make_console


@dataclass(frozen=True)
class Export:
    """Write a step into a directory or to a URL, or its params as safetensors.

    This works during a run; every checksum is verified. The format zarr has all state,
    in the store's own chunks; Orbax reads it, and an import makes the same store again,
    to the bit. If it is interrupted, give the command again. The format huggingface is
    a folder that transformers loads, for models trained by jaxinf.train.
    """

    store: StorePath
    destination: Annotated[
        tyro.conf.Positional[str],
        option(
            "A directory that does not exist yet; for zarr also a URL of file://, "
            "gs:// or s3://.",
            "DEST",
        ),
    ]
    checkpoint: Annotated[
        str | None, option("Export this checkpoint instead of the last step.", "NAME")
    ] = None
    format: Annotated[
        Literal["zarr", "safetensors", "huggingface"],
        tyro.conf.arg(help="All state as zarr, or params in another tool's format."),
    ] = "zarr"
    average: Annotated[
        bool,
        option("Safetensors and huggingface: the params' average in their place."),
    ] = False
    adapters: Annotated[
        bool,
        option(
            "Huggingface: the adapters of --lora alone, in the form of PEFT. Without "
            "it they are added to their matrices."
        ),
    ] = False
    like: Annotated[
        AnyPath | None,
        option(
            "Huggingface: the folder that the params of a loop of your own came from; "
            "its config.json and its tokenizer are written again.",
            "FOLDER",
        ),
    ] = None
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        tyro.conf.arg(
            help="Huggingface: dtype of the tensors, rounded to nearest even.",
            help_behavior_hint="(default: the dtype of the params in training)",
        ),
    ] = None
    max_file: Annotated[
        int,
        ByteSize,
        tyro.conf.arg(help="Start another safetensors file at this size."),
    ] = DEFAULT_FILE_BYTES
    memory: Annotated[
        int, ByteSize, tyro.conf.arg(help="Memory for data in transit.")
    ] = DEFAULT_MEMORY_BYTES

    def run(self) -> None:
        """Exports, and prints the path and content of the export."""
        where, store = self._checked(), self.store
        with store_source(store, self.checkpoint) as source:
            step, number = source.step, source.step.commit.step
            say_warning(store, step)
            if steps := step.commit.steps_without_params:
                make_console(sys.stderr).print(
                    f"warning: {store}: the last {steps} updates were given no params, "
                    "so the exported ones were not compared with the program's"
                )
            with show_progress(f"step {number} to {where}") as progress:
                transit = Transit(self.memory, progress, max_file_bytes=self.max_file)
                content = self._write(source, where, transit)
        print(f"{where}: step {number}, {content}")

    def _checked(self) -> str:
        """Returns the place of the export, if the flags fit it and each other."""
        only = {"dtype": self.dtype, "like": self.like, "adapters": self.adapters}
        for flag, value in only.items():
            if value and self.format != "huggingface":
                raise UsageError(f"--{flag} goes with --format huggingface")
        if self.format == "zarr":
            if self.average:
                raise UsageError(
                    "--average goes with --format safetensors or huggingface"
                )
            is_place = is_url(self.destination)
            url = f"file://{whole_path(self.destination)}"
            return ObjectStore(self.destination if is_place else url).where
        if is_url(self.destination):
            raise UsageError(
                f"--format {self.format}: expected a directory, found a URL, which "
                "takes --format zarr; export to a directory, and copy that"
            )
        return str(whole_path(self.destination))

    def _write(self, source: CopySource, where: str, transit: Transit) -> str:
        """Writes the export; returns what it has."""
        step, destination = source.step, Path(where)
        given: dict[str, Any] = {"average": self.average, "transit": transit}
        if self.format == "zarr":
            done = export_url(step, where, beside=source.beside(), transit=transit)
            return (
                f"{done.num_objects} objects, {format_bytes(done.num_bytes)}; "
                f"{done.num_kept} chunks were there already"
            )
        if self.adapters:
            export_adapters(step, destination, dtype=self.dtype, **given)
        elif self.format == "huggingface":
            if self.like is not None:
                kept = tokenizer_files(weights=self.like)
            else:
                kept = kept_tokenizer(source.beside())
            given |= {"dtype": self.dtype, "like": self.like, "beside": kept}
            export_huggingface(step, destination, **given)
        else:
            export_safetensors(step, destination, **given)
        files = [file for file in destination.rglob("*") if file.is_file()]
        return format_bytes(sum(file.stat().st_size for file in files))
