"""A committed step's params as a Hugging Face checkpoint folder, or its adapters.

Invariant: import and export use the same table of names and axes, so that an imported
  checkpoint is exported to the bit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from jaxinf.errors import ExchangeError
from jaxinf.exchange.huggingface_config import Architecture, write_config
from jaxinf.exchange.huggingface_families import FAMILIES
from jaxinf.exchange.huggingface_source import HuggingFaceFolder
from jaxinf.exchange.params import (
    ExportOptions,
    ParamArray,
    adapters,
    param_arrays,
    said_architecture,
)
from jaxinf.exchange.safetensors_files import Tensor, write_tensors
from jaxinf.store import WholeStep, dtype_of

_CLASS_HEADS = ("score/kernel", "classifier/kernel", "head/classifier/kernel")
_PEFT_TASKS = {"causal-lm": "CAUSAL_LM", "seq2seq": "SEQ_2_SEQ_LM"}
_PEFT_TASKS |= {"classification": "SEQ_CLS"}


def export_huggingface(
    step: WholeStep,
    destination: Path,
    *,
    average: bool = False,
    dtype: str | None = None,
    like: Path | None = None,
    beside: Mapping[str, bytes] | None = None,
    options: ExportOptions | None = None,
) -> None:
    """Writes a step's params as ``transformers`` loads them; blocks until durable.

    Adapters of ``jaxinf.train --lora`` are added to their matrices.

    The step's commit must name the model: `jaxinf.train` writes it into the payload, as
    ``architecture``. For params of `jaxinf_models.pretrained` in a loop of one's own
    give the folder that they came from.

    Args:
      step: the step to export.
      destination: a directory that does not exist yet.
      average: whether the params' average is written in their place.
      dtype: dtype of the tensors: float32, bfloat16 or float16, rounded to nearest
        even; by default that of the params on the JAX device.
      like: a folder of a model with these params, by default the commit says it.
      beside: further files by name: those of the tokenizer.
      options: how it moves; by default in 256 MiB.

    Raises:
      ExchangeError: the commit does not name its model, or the store has other leaves
        than that model.
      FileExistsError, ValueError, StoreError: as for `export_safetensors`.
    """
    params = param_arrays(step, average=average)
    architecture, task = (
        _architecture(step) if like is None else _architecture_like(params, like)
    )
    tensors = _tensors(params, architecture, dtype)
    config = write_config(architecture, task, tensors[0].dtype.name)
    files = {**(beside or {}), "config.json": config}
    write_tensors(destination, tensors, {"format": "pt"}, files, options)


def _architecture(step: WholeStep) -> tuple[Architecture, str]:
    """Returns the model that the commit says, and its head's task."""
    said = said_architecture(step)
    if said.get("model") not in FAMILIES:
        raise ExchangeError(
            f"{step.path}: expected a step of jaxinf.train, whose commit says which "
            "model it is of, found none that says so; give the folder that its params "
            "came from (--like FOLDER), or export it as safetensors"
        )
    fields, extra = (
        value if isinstance(value, Mapping) else {}
        for value in (said.get("fields"), said.get("extra"))
    )
    model, kind = str(said["model"]), str(said.get("model_type", ""))
    return Architecture(model, fields, kind, extra), str(said.get("task"))


def _architecture_like(
    params: Sequence[ParamArray], folder: Path
) -> tuple[Architecture, str]:
    """Returns the model of a folder, if these are its params, and its head's task."""
    found = HuggingFaceFolder.read(folder)
    architecture = found.architecture
    _tensors(params, architecture, None)  # refuses other leaves
    shapes = {param.path: tuple(param.leaf.shape) for param in params}
    found.leaves(shapes, np.dtype(np.float32), compares=False)
    heads = [shapes[head] for head in _CLASS_HEADS if head in shapes]
    if not heads:
        classes = architecture.family.classes
        return architecture, next(task for task in classes if task != "classification")
    fields = {**architecture.fields, "num_labels": heads[0][1]}
    return replace(architecture, fields=fields), "classification"


def _tensors(
    params: Sequence[ParamArray], architecture: Architecture, dtype: str | None
) -> list[Tensor]:
    tensors = []
    for param in params:
        try:
            name, axes = architecture.family.find(param.path)
        except KeyError as error:
            raise ExchangeError(
                f"{param.step.path}: leaf {param.leaf.name} is none of a "
                f"{architecture.model}'s, which the commit says this is"
            ) from error
        held = dtype_of(dtype or param.leaf.dtype)
        axes = tuple(int(a) for a in np.argsort(axes))
        tensors.append(Tensor(name, param, held, axes))
    return tensors


def export_adapters(
    step: WholeStep,
    destination: Path,
    *,
    average: bool = False,
    dtype: str | None = None,
    options: ExportOptions | None = None,
) -> None:
    """Writes a step's adapters, and a new head of classes, in the form of PEFT.

    The folder has ``adapter_config.json`` and ``adapter_model.safetensors``. Blocks
    until it is durable.

    Args:
      step: the step to export, of ``jaxinf.train --lora``.
      destination: a directory that does not exist yet.
      average, dtype, options: as for `export_huggingface`.

    Raises:
      ExchangeError: the step has no adapters, or as for `export_huggingface`.
      FileExistsError, ValueError, StoreError: as for `export_huggingface`.
    """
    architecture, task = _architecture(step)
    parts = adapters(step, average=average)
    if not parts:
        raise ExchangeError(
            f"{step.path}: expected a step of jaxinf.train --lora, found no adapters "
            "in it; export its params"
        )
    family, (first, _, alpha) = architecture.family, next(iter(parts.values()))
    tensors, layers = [], []
    for path, (a, b, _) in parts.items():
        layers.append(_module(family.find("/".join((*path, "kernel")))[0]))
        for param, theirs in ((a, "lora_A"), (b, "lora_B")):
            held = dtype_of(dtype or param.leaf.dtype)
            tensors.append(Tensor(f"{layers[-1]}.{theirs}.weight", param, held, (1, 0)))
    heads = family.heads if task == "classification" else ()
    params = param_arrays(step, average=average)
    heads_params = [param for param in params if param.path.startswith(heads)]
    whole = _tensors(heads_params, architecture, dtype)
    payload = step.commit.payload
    base = payload.get("base") if isinstance(payload, Mapping) else None
    config = {
        "peft_type": "LORA",
        # PEFT's wrapper of classes is for tokens.
        "task_type": None if architecture.model == "vit" else _PEFT_TASKS.get(task),
        "base_model_name_or_path": base if isinstance(base, str) else None,
        "r": first.leaf.shape[1],
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": not family.transposed,
        "target_modules": sorted(layers),
        "modules_to_save": sorted({_module(t.name) for t in whole}) or None,
        "inference_mode": True,
    }
    tensors = [
        replace(t, name=f"base_model.model.{t.name}") for t in (*tensors, *whole)
    ]
    write_tensors(
        destination,
        tensors,
        {"format": "pt"},
        {"adapter_config.json": config},
        replace(options or ExportOptions(), max_file_bytes=1 << 62),
        file_name="adapter_model.safetensors",
    )


def _module(tensor: str) -> str:
    """Returns the module of a tensor, such as that of ``score.weight``."""
    return tensor.rpartition(".")[0]
