"""A committed step's params as a Hugging Face checkpoint folder.

Invariant: import and export use the same table of names and axes, so that an imported
  checkpoint is exported to the bit.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxinf.errors import ExchangeError
from jaxinf.exchange.huggingface_config import Architecture, write_config
from jaxinf.exchange.huggingface_names import TABLES
from jaxinf.exchange.safetensors_writer import (
    DEFAULT_FILE_BYTES,
    Tensor,
    write_tensors,
)
from jaxinf.exchange.step_files import DEFAULT_MEMORY_BYTES, StepFiles
from jaxinf.store import MASTER_PARAMS, dtype_of
from jaxinf.typing import ProgressCallback

__all__ = ["export_huggingface"]


def export_huggingface(
    step: StepFiles,
    destination: Path,
    *,
    dtype: str | None = None,
    beside: Mapping[str, bytes] | None = None,
    max_file_bytes: int = DEFAULT_FILE_BYTES,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    progress: ProgressCallback | None = None,
) -> None:
    """Writes a step's params as ``transformers`` loads them; blocks until durable.

    The step's commit must name the model: `jaxinf.train` writes it into the payload, as
    ``architecture``.

    Args:
      step: the step to export.
      destination: a directory that does not exist yet.
      dtype: dtype of the tensors: float32, bfloat16 or float16, rounded to nearest
        even; by default that of the params on the JAX device.
      beside: further files by name: those of the tokenizer.
      max_file_bytes: size at which another file begins; a tensor is never split.
      memory_bytes: memory for data in transit.
      progress: called with the bytes of elements done and those in all.

    Raises:
      ExchangeError: the commit does not name its model, or the store has other leaves
        than that model.
      FileExistsError: the destination exists.
      ValueError: a limit is too small.
      StoreSpaceError: there is no room; nothing was written.
      StoreCorruptError: a chunk is damaged.
      StoreError: the step cannot be read, or the destination not written.
    """
    architecture, task = _architecture(step)
    tensors = _tensors(step, architecture, dtype)
    held = tensors[0].dtype.name
    config = write_config(architecture, task, held)
    write_tensors(
        step,
        destination,
        tensors,
        {"format": "pt"},
        lambda: {**(beside or {}), "config.json": config},
        max_file_bytes=max_file_bytes,
        memory_bytes=memory_bytes,
        progress=progress,
    )


def _architecture(step: StepFiles) -> tuple[Architecture, str]:
    payload = step.commit.payload
    said = payload.get("architecture") if isinstance(payload, Mapping) else None
    if not isinstance(said, Mapping) or said.get("model") not in TABLES:
        raise ExchangeError(
            f"{step.path}: expected a step of jaxinf.train, whose commit says which "
            "model it is of, found none that says so; export it as safetensors"
        )
    architecture = Architecture(
        model=str(said["model"]),
        fields=_mapping(said.get("fields")),
        model_type=str(said.get("model_type", "")),
        extra=_mapping(said.get("extra")),
    )
    return architecture, str(said.get("task"))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _tensors(
    step: StepFiles, architecture: Architecture, dtype: str | None
) -> list[Tensor]:
    table = TABLES[architecture.table]
    tensors = []
    for array in step.arrays():
        if array.state_name != MASTER_PARAMS:
            continue
        try:
            name = table.find("/".join(array.leaf.path))
        except KeyError as error:
            raise ExchangeError(
                f"{step.path}: leaf {array.leaf.name} is none of a "
                f"{architecture.model}'s, which the commit says this is"
            ) from error
        held = dtype_of(dtype or array.leaf.dtype)
        axes = tuple(int(a) for a in np.argsort(name.axes))
        tensors.append(Tensor(name.theirs, array, held, axes))
    return tensors
