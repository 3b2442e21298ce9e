"""The params of a committed step as safetensors files, with their index."""

from pathlib import Path

from jaxinf.exchange.adapters import Adapters
from jaxinf.exchange.safetensors_writer import (
    DEFAULT_FILE_BYTES,
    Tensor,
    write_tensors,
)
from jaxinf.exchange.step_files import DEFAULT_MEMORY_BYTES, StepFiles
from jaxinf.store import MASTER_PARAMS
from jaxinf.typing import ProgressCallback


def export_safetensors(
    step: StepFiles,
    destination: Path,
    *,
    max_file_bytes: int = DEFAULT_FILE_BYTES,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    progress: ProgressCallback | None = None,
) -> None:
    """Writes the master params of a step as safetensors; blocks until it is durable.

    A tensor has the name of its leaf, ``h0.kernel``. Master params are float32.
    Adapters of ``jaxinf.train --lora`` are added to their matrices.

    Args:
      step: the step to export.
      destination: a directory that does not exist yet.
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
    adapters = Adapters(step)
    write_tensors(
        step,
        destination,
        [
            Tensor(
                # Params that are one array have an empty path; a tensor needs a name.
                array.name.removeprefix(MASTER_PARAMS + "."),
                array,
                array.dtype,
                change=adapters.change_of(array),
            )
            for array in step.arrays()
            if array.state_name == MASTER_PARAMS and not adapters.has(array)
        ],
        {"format": "flax", "step": str(step.commit.step)},
        dict,
        max_file_bytes=max_file_bytes,
        memory_bytes=memory_bytes,
        progress=progress,
    )
