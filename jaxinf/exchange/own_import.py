"""Makes a new store from the directory of a checkpoint, bit for bit.

Invariant: the new store has the exported manifest's leaves, states and kernels, and its
commit record; only its id and its CSDs are new.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from jaxinf.errors import ExchangeError
from jaxinf.exchange.sources import SourceArray
from jaxinf.exchange.step_files import DEFAULT_MEMORY_BYTES
from jaxinf.exchange.store_import import ImportReport, read_source
from jaxinf.store import (
    ChunkWriter,
    CommitRecord,
    GivenStep,
    Manifest,
    Slot,
    StoreDirectory,
    dtype_of,
    lay_out,
    making_store,
    stock_documents,
)
from jaxinf.typing import Array, ProgressCallback

_COPIES = 4


def is_own_export(path: Path) -> bool:
    """Whether a directory is an export that can become a store again."""
    return (path / "jaxinf.json").is_file() and (path / "commit.json").is_file()


def import_export(
    source: Path,
    store: Path,
    *,
    csds: Sequence[Path] = (),
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    progress: ProgressCallback | None = None,
) -> ImportReport:
    """Makes a new store from a checkpoint of a store; blocks.

    Args:
      source: the checkpoint's directory, or its copy.
      store: path of the new store; missing or an empty directory.
      csds: absolute CSD roots to spread it over; by default the store itself.
      memory_bytes: memory for data in transit.
      progress: called with the bytes of elements done and those in all.

    Returns:
      A report of the import.

    Raises:
      ExchangeError: the checkpoint is damaged, or its state is in int8.
      StoreFormatError: its manifest or its commit record is damaged, or something is
        in the store's place.
      StoreSpaceError: there is no room; nothing was written.
      StoreError: a drive failed.
    """
    step = own_step(source, memory_bytes=memory_bytes, progress=progress)
    return make_of(step, store, csds)


def make_of(
    step: GivenStep,
    store: Path,
    csds: Sequence[Path],
    beside: Callable[[], None] = lambda: None,
) -> ImportReport:
    """Makes a new store of a whole step; blocks.

    Args:
      beside: writes what belongs to the store beside its steps.
    """
    shapes = [leaf.chunk_shape for leaf in step.manifest.leaves]
    manifest = lay_out(step.manifest, shapes, [str(root) for root in csds])
    with making_store(store, manifest) as directory:
        step.fill(directory, "a")
        beside()
        directory.sync()
        documents = stock_documents(directory.step_path("a"), manifest)
        directory.publish("a", replace(step.commit, documents=documents))
    num_arrays = sum(len(leaf.states) for leaf in manifest.leaves)
    return ImportReport(step.commit.step, num_arrays, (), ())


def own_step(
    source: Path, *, memory_bytes: int, progress: ProgressCallback | None = None
) -> GivenStep:
    """Returns the step of a checkpoint's directory, checked.

    Raises:
      ExchangeError: its state is in int8; or as `import_export`.
      StoreFormatError: as `import_export`.
    """
    exported = Manifest.read(source / "jaxinf.json")
    commit = CommitRecord.read(source / "commit.json")
    if any(s.codec == "scale" for leaf in exported.leaves for s in leaf.states):
        raise ExchangeError(
            f"{source}: expected a checkpoint of state in fp32 or bf16, found int8; "
            "export it instead: jaxinf checkpoint export STORE DEST --checkpoint NAME"
        )
    wanted = _wanted(exported, read_source(source), source)
    commit.check_fits(source / "commit.json", exported)

    def fill(directory: StoreDirectory, slot: Slot) -> None:
        writer = ChunkWriter(directory, slot)
        total_bytes = sum(array.num_bytes for array in wanted.values())
        done_bytes = 0
        for (number, state), array in wanted.items():
            for start, values in array.blocks(memory_bytes // _COPIES):
                writer.write_stored(number, state, start, values)
                done_bytes += values.nbytes
                if progress is not None:
                    progress(done_bytes, total_bytes)
        expected = commit.part(directory.manifest).checksums
        _check_sums(writer.checksums(), expected, source)

    return GivenStep(str(source), exported, commit, fill)


def _wanted(
    manifest: Manifest, found: dict[str, SourceArray], source: Path
) -> dict[tuple[int, str], SourceArray]:
    wanted, problems = {}, []
    for number, leaf in enumerate(manifest.leaves):
        for state in leaf.states:
            name = leaf.array_name(state.name)
            array = found.get(name)
            if array is None:
                problems.append(f"{name}: missing")
            elif array.shape != leaf.shape or array.dtype != dtype_of(state.dtype):
                problems.append(
                    f"{name}: {array.dtype}{list(array.shape)} in the export, its "
                    f"manifest says {state.dtype}{list(leaf.shape)}"
                )
            else:
                wanted[number, state.name] = array
    if problems:
        raise ExchangeError(
            f"{source}: expected the arrays of its jaxinf.json, found "
            f"{'; '.join(problems[:8])}; copy the export anew"
        )
    return wanted


def _check_sums(
    written: Mapping[str, Array], exported: Mapping[str, Array], source: Path
) -> None:
    for name, found in written.items():
        expected = exported[name]
        if not np.array_equal(expected, found):
            differing = np.flatnonzero(expected != found).tolist()
            raise ExchangeError(
                f"{source}: {name} is damaged: its chunks {differing} have other "
                "checksums than in commit.json; copy the export again"
            )
