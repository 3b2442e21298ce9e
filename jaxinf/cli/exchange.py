"""``jaxinf checkpoint export STORE`` and ``import``: steps to and from other tools.

Invariant: a store keeps its committed step until an import is checked and complete; an
export appears only when it is complete.
"""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from jaxinf.cli.committed import open_committed, open_directory
from jaxinf.cli.members import is_run
from jaxinf.cli.options import StorePath, option
from jaxinf.cli.terminal import show_progress
from jaxinf.command_line import ByteSize, UsageError
from jaxinf.errors import ExchangeError
from jaxinf.exchange import (
    DEFAULT_FILE_BYTES,
    DEFAULT_MEMORY_BYTES,
    ImportReport,
    ObjectStore,
    StepFiles,
    Transit,
    export_adapters,
    export_huggingface,
    export_orbax,
    export_safetensors,
    export_url,
    files_beside,
    import_checkpoint,
    import_export,
    import_url,
    is_own_export,
    is_url,
    kept_tokenizer,
)
from jaxinf.store import Manifest, find_checkpoint, find_members, whole_step
from jaxinf.terminal import format_bytes, make_console

__all__ = ["Export", "Import", "Memory"]

_MAX_SHOWN = 8
Memory = Annotated[int, ByteSize, tyro.conf.arg(help="Memory for data in transit.")]


@dataclass(frozen=True)
class Export:
    """Write a step as an Orbax checkpoint (compressed OCDBT), safetensors, or a model.

    This works during a run; every checksum is verified. Except for an export of the
    params alone, an import makes the same store again, to the bit. The format
    huggingface is a folder that transformers loads, for models trained by jaxinf.train.
    At a URL (file://, gs://, s3://) the export has the store's own chunks, as zarr v3;
    if it is interrupted, give the command again.
    """

    store: StorePath
    destination: Annotated[
        tyro.conf.Positional[str],
        option("A directory that does not exist yet, or a URL.", "DEST"),
    ]
    checkpoint: Annotated[
        str | None, option("Export this checkpoint instead of the last step.", "NAME")
    ] = None
    format: Annotated[
        Literal["orbax", "safetensors", "huggingface", "zarr"] | None,
        tyro.conf.arg(
            help="Format of the export; zarr goes with a URL.",
            help_behavior_hint="(default: orbax, at a URL zarr)",
        ),
    ] = None
    params_only: Annotated[
        bool, option("Safetensors: leave the optimizer's state out.")
    ] = False
    average: Annotated[
        bool,
        option("Export the params' average in their place, without other state."),
    ] = False
    adapters: Annotated[
        bool,
        option(
            "Huggingface: the adapters of --lora alone, in the form of PEFT. Without "
            "it they are added to their matrices."
        ),
    ] = False
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
    memory: Memory = DEFAULT_MEMORY_BYTES
    bandwidth: Annotated[
        int,
        ByteSize,
        tyro.conf.arg(
            help="Most bytes a second to write to a URL; as many are read back. 0: no "
            "limit."
        ),
    ] = 0

    def run(self, store: Path) -> None:
        """Exports, and prints the path and content of the export."""
        if is_url(self.destination):
            self._to_url(store)
            return
        if self.format == "zarr" or self.bandwidth:
            raise UsageError(
                "--format zarr and --bandwidth go with a URL, such as file:///exports/6"
            )
        if self.params_only and self.format != "safetensors":
            raise UsageError("--params-only goes with --format safetensors")
        if self.dtype is not None and self.format != "huggingface":
            raise UsageError("--dtype goes with --format huggingface")
        if self.adapters and self.format != "huggingface":
            raise UsageError("--adapters goes with --format huggingface")
        destination = Path(self.destination).expanduser().absolute()
        with _step_of(store, self.checkpoint) as found:
            step = replace(found, average=self.average)
            title = f"step {step.commit.step} to {destination}"
            with show_progress(title) as progress:
                if self.format in (None, "orbax"):
                    export_orbax(
                        step, destination, memory_bytes=self.memory, progress=progress
                    )
                elif self.adapters:
                    export_adapters(
                        step,
                        destination,
                        dtype=self.dtype,
                        memory_bytes=self.memory,
                        progress=progress,
                    )
                elif self.format == "huggingface":
                    export_huggingface(
                        step,
                        destination,
                        dtype=self.dtype,
                        beside=kept_tokenizer([*find_members(store), store][0]),
                        max_file_bytes=self.max_file,
                        memory_bytes=self.memory,
                        progress=progress,
                    )
                else:
                    export_safetensors(
                        step,
                        destination,
                        params_only=self.params_only,
                        max_file_bytes=self.max_file,
                        memory_bytes=self.memory,
                        progress=progress,
                    )
            number = step.commit.step
        files = [f for f in destination.rglob("*") if f.is_file()]
        num_bytes = sum(file.stat().st_size for file in files)
        print(f"{destination}: step {number}, {format_bytes(num_bytes)}")

    def _to_url(self, store: Path) -> None:
        if self.format not in (None, "zarr"):
            raise UsageError(
                f"--format {self.format}: expected zarr for a URL, which Orbax reads, "
                "too; for another format export to a directory, and copy that"
            )
        others = self.params_only, self.average, self.adapters, self.dtype
        if any(others):
            raise UsageError(
                "--params-only, --average, --adapters and --dtype go with other "
                "formats than a URL has"
            )
        place = ObjectStore(self.destination)
        with _step_of(store, self.checkpoint) as step:
            title = f"step {step.commit.step} to {place.where}"
            with show_progress(title) as progress:
                done = export_url(
                    step,
                    self.destination,
                    beside=files_beside(next(iter(find_members(store)), store)),
                    transit=Transit(self.memory, self.bandwidth, progress),
                )
        print(
            f"{place.where}: step {done.step}, {done.num_objects} objects, "
            f"{format_bytes(done.num_bytes)}; {done.num_kept} chunks were there already"
        )


@dataclass(frozen=True)
class Import:
    """Import another tool's checkpoint into STORE, or make STORE from an export.

    An Orbax checkpoint of params and optax state, or safetensors, needs a store at step
    0 that tx.init(params) has made. An export of jaxinf makes STORE if it does not
    exist; so does one at a URL (file://, gs://, s3://). See docs/checkpoints.md.
    """

    store: StorePath
    source: Annotated[
        tyro.conf.Positional[str],
        option("An Orbax checkpoint, safetensors, or an export.", "SOURCE"),
    ]
    csd_root: Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]],
        option("A CSD root of a new store; may be repeated.", "DIR"),
    ] = ()
    name: Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]],
        option(
            "Where a state is in the source, e.g. mu=opt_state/0/mu; may be repeated.",
            "STATE=PLACE",
        ),
    ] = ()
    ignore: Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]],
        option("Ignore the arrays below this name; may be repeated.", "PLACE"),
    ] = ()
    step: Annotated[
        int | None, option("The step to commit, if the source has none.", "N")
    ] = None
    memory: Memory = DEFAULT_MEMORY_BYTES

    def run(self, store: Path) -> None:
        """Imports, and prints the store's new step."""
        if is_url(self.source):
            self._from_url(store)
            return
        source = Path(self.source).expanduser().absolute()
        with show_progress(f"{source} to {store}") as progress:
            if (store / "jaxinf.json").exists():
                if self.csd_root:
                    raise UsageError(f"{store} has its CSD roots; leave --csd-root out")
                report = import_checkpoint(
                    source,
                    store,
                    names=_pairs(self.name),
                    ignored=self.ignore,
                    step=self.step,
                    memory_bytes=self.memory,
                    progress=progress,
                )
            else:
                self._check_new(source, store)
                roots = [Path(root).expanduser().absolute() for root in self.csd_root]
                report = import_export(
                    source,
                    store,
                    csds=roots,
                    memory_bytes=self.memory,
                    progress=progress,
                )
        _print_report(store, report)

    def _from_url(self, store: Path) -> None:
        place = ObjectStore(self.source)
        self._check_as_it_was()
        if (store / "jaxinf.json").exists() or is_run(store):
            raise ExchangeError(
                f"{store}: expected nothing there, as an export at a URL becomes a "
                "store of its own, found one; give another path"
            )
        with show_progress(f"{place.where} to {store}") as progress:
            report = import_url(
                self.source,
                store,
                csds=[Path(root).expanduser().absolute() for root in self.csd_root],
                memory_bytes=self.memory,
                progress=progress,
            )
        _print_report(store, report)

    def _check_as_it_was(self) -> None:
        if self.name or self.ignore or self.step is not None:
            raise UsageError(
                "a store that is made of an export is as it was; --name, --ignore and "
                "--step are for a store that exists"
            )

    def _check_new(self, source: Path, store: Path) -> None:
        if not is_own_export(source):
            raise ExchangeError(
                f"{store}: expected a store to import {source} into, found none, and "
                "only what jaxinf exported says itself what store it is of; make the "
                "store first: tx.init(params) with params of the same shapes"
            )
        self._check_as_it_was()


@contextlib.contextmanager
def _step_of(store: Path, checkpoint: str | None) -> Iterator[StepFiles]:
    """Yields a checkpoint's files, or those of the committed step, pinned."""
    if is_run(store):
        with whole_step(store, checkpoint) as whole:
            yield StepFiles(
                whole.path, whole.manifest, record=whole.commit, places=whole.places
            )
        return
    if checkpoint is not None:
        directory = open_directory(store)
        find_checkpoint(directory, checkpoint)
        path = directory.step_path(f"checkpoints/{checkpoint}")
        held = Manifest.read(path / "jaxinf.json")
        # A checkpoint's own manifest may list earlier CSDs; its chunks are on today's.
        yield StepFiles(path, replace(held, csds=directory.manifest.csds))
        return
    with open_committed(store) as committed:
        for warning in committed.warnings:
            make_console(sys.stderr).print(f"warning: {store}: {warning}")
        yield StepFiles(committed.path, committed.manifest)


def _pairs(names: Sequence[str]) -> dict[str, str]:
    pairs = {}
    for text in names:
        state, separator, place = text.partition("=")
        if not separator:
            raise UsageError(
                f"--name {text}: expected STATE=PLACE, such as mu=opt_state/0/mu"
            )
        pairs[state] = place
    return pairs


def _print_report(store: Path, report: ImportReport) -> None:
    errors = make_console(sys.stderr)
    if report.fresh_states:
        errors.print(
            f"note: the checkpoint has no {', '.join(report.fresh_states)}; the "
            "optimizer begins anew"
        )
    if report.unused:
        shown = ", ".join(report.unused[:_MAX_SHOWN])
        more = len(report.unused) - _MAX_SHOWN
        errors.print(
            f"note: not imported: {shown}" + (f" and {more} more" if more > 0 else "")
        )
    print(f"{store}: step {report.step}, {report.num_arrays} arrays imported")
