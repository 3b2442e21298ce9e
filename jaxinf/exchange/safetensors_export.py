"""A committed step as safetensors files, with the index that other tools expect.

Invariant: with the manifest and the commit record beside the files, the export can
become a store again, to the bit.
"""

from pathlib import Path

from jaxinf.exchange.adapters import Adapters
from jaxinf.exchange.safetensors_writer import (
    DEFAULT_FILE_BYTES,
    Tensor,
    write_tensors,
)
from jaxinf.exchange.step_files import (
    DEFAULT_MEMORY_BYTES,
    StepFiles,
    StoredArray,
)
from jaxinf.store import MASTER_PARAMS, seal
from jaxinf.typing import ProgressCallback

__all__ = ["export_safetensors"]


def export_safetensors(
    step: StepFiles,
    destination: Path,
    *,
    params_only: bool = False,
    max_file_bytes: int = DEFAULT_FILE_BYTES,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    progress: ProgressCallback | None = None,
) -> None:
    """Writes a step as safetensors; blocks until it is durable.

    A tensor has the name of its array, ``mu.h0.kernel``; with `params_only` that of the
    leaf, ``h0.kernel``. Tensors have the dtypes of the optimizer's computations: coded
    state is decoded, and master params are float32. The export also has its manifest
    and commit record, except with `params_only`, which adds the adapters of
    ``jaxinf.train --lora`` to their matrices.

    Args:
      step: the step to export.
      destination: a directory that does not exist yet.
      params_only: whether to leave the optimizer's state out, as with the average.
      max_file_bytes: size at which another file begins; an array is never split.
      memory_bytes: memory for data in transit.
      progress: called with the bytes of elements done and those in all.

    Raises:
      FileExistsError: the destination exists.
      ValueError: a limit is too small.
      StoreSpaceError: there is no room; nothing was written.
      StoreCorruptError: a chunk is damaged.
      StoreError: the step cannot be read, or the destination not written.
    """
    params_only = params_only or step.average
    adapters = Adapters(step)
    arrays = [
        array
        for array in step.arrays()
        if not params_only
        or (array.state_name == MASTER_PARAMS and not adapters.has(array))
    ]

    def documents() -> dict[str, bytes]:
        if params_only:
            return {}
        manifest, commit = step.exported()
        return {
            "jaxinf.json": seal(manifest.to_json()),
            "commit.json": seal(commit.to_json()),
        }

    write_tensors(
        step,
        destination,
        [
            Tensor(
                *(_name(array, params_only), array, array.dtype),
                change=adapters.change_of(array) if params_only else None,
            )
            for array in arrays
        ],
        {"format": "flax", "step": str(step.commit.step)},
        documents,
        max_file_bytes=max_file_bytes,
        memory_bytes=memory_bytes,
        progress=progress,
    )


def _name(array: StoredArray, params_only: bool) -> str:
    if not params_only:
        return array.name
    # A params tree that is one array has an empty path, but a tensor needs a name.
    return array.name.removeprefix(MASTER_PARAMS + ".")
