"""A committed step's params as a Hugging Face checkpoint folder, or its adapters.

Invariant: import and export use the same table of names and axes, so that an imported
  checkpoint is exported to the bit.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from jaxinf.errors import ExchangeError
from jaxinf.exchange.huggingface_config import Architecture, write_config
from jaxinf.exchange.huggingface_families import FAMILIES
from jaxinf.exchange.huggingface_source import HuggingFaceFolder
from jaxinf.exchange.safetensors_files import Tensor, write_tensors
from jaxinf.exchange.step_files import StepFiles, Transit, adapters, param_arrays
from jaxinf.store import dtype_of

_ADAPTERS_NAME = "adapter_model.safetensors"
_CLASS_HEADS = ("score/kernel", "classifier/kernel", "head/classifier/kernel")
_PEFT_TASKS = {"causal-lm": "CAUSAL_LM", "seq2seq": "SEQ_2_SEQ_LM"}
_PEFT_TASKS |= {"classification": "SEQ_CLS"}


def export_huggingface(
    step: StepFiles,
    destination: Path,
    *,
    dtype: str | None = None,
    like: Path | None = None,
    beside: Mapping[str, bytes] | None = None,
    transit: Transit | None = None,
) -> None:
    """Writes a step's params as ``transformers`` loads them; blocks until durable.

    Adapters of ``jaxinf.train --lora`` are added to their matrices.

    The step's commit must name the model: `jaxinf.train` writes it into the payload, as
    ``architecture``. For params of `jaxinf_models.pretrained` in a loop of one's own
    give the folder that they came from.

    Args:
      step: the step to export.
      destination: a directory that does not exist yet.
      dtype: dtype of the tensors: float32, bfloat16 or float16, rounded to nearest
        even; by default that of the params on the JAX device.
      like: a folder of a model with these params, by default the commit says it.
      beside: further files by name: those of the tokenizer.
      transit: how it moves; by default in 256 MiB.

    Raises:
      ExchangeError: the commit does not name its model, or the store has other leaves
        than that model.
      FileExistsError, ValueError, StoreError: as for `export_safetensors`.
    """
    architecture, task = (
        _architecture(step) if like is None else _architecture_like(step, like)
    )
    tensors = _tensors(step, architecture, dtype)
    config = write_config(architecture, task, tensors[0].dtype.name)
    files = {**(beside or {}), "config.json": config}
    write_tensors(destination, tensors, {"format": "pt"}, files, transit)


def _architecture(step: StepFiles) -> tuple[Architecture, str]:
    said = step.architecture
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


def _architecture_like(step: StepFiles, folder: Path) -> tuple[Architecture, str]:
    """Returns the model of a folder, if a step has its params, and its head's task."""
    found = HuggingFaceFolder.read(folder)
    architecture, family = found.architecture, found.architecture.family
    params = param_arrays(step)
    shapes = {"/".join(param.leaf.path): tuple(param.leaf.shape) for param in params}
    _tensors(step, architecture, None)  # refuses other leaves
    found.leaves(shapes, np.dtype(np.float32), compares=False)
    heads = [shapes[head] for head in _CLASS_HEADS if head in shapes]
    if not heads:
        return architecture, next(t for t in family.classes if t != "classification")
    fields = {**architecture.fields, "num_labels": heads[0][1]}
    return replace(architecture, fields=fields), "classification"


def _tensors(
    step: StepFiles, architecture: Architecture, dtype: str | None
) -> list[Tensor]:
    tensors = []
    for param in param_arrays(step):
        try:
            name, axes = architecture.family.find("/".join(param.leaf.path))
        except KeyError as error:
            raise ExchangeError(
                f"{step.path}: leaf {param.leaf.name} is none of a "
                f"{architecture.model}'s, which the commit says this is"
            ) from error
        held = dtype_of(dtype or param.leaf.dtype)
        axes = tuple(int(a) for a in np.argsort(axes))
        tensors.append(Tensor(name, param, held, axes))
    return tensors


def export_adapters(
    step: StepFiles,
    destination: Path,
    *,
    dtype: str | None = None,
    transit: Transit | None = None,
) -> None:
    """Writes a step's adapters, and a new head of classes, in the form of PEFT.

    The folder has ``adapter_config.json`` and ``adapter_model.safetensors``. Blocks
    until it is durable.

    Args:
      step: the step to export, of ``jaxinf.train --lora``.
      destination: a directory that does not exist yet.
      dtype, transit: as for `export_huggingface`.

    Raises:
      ExchangeError: the step has no adapters, or as for `export_huggingface`.
      FileExistsError, ValueError, StoreError: as for `export_huggingface`.
    """
    architecture, task = _architecture(step)
    parts = adapters(step)
    if not parts:
        raise ExchangeError(
            f"{step.path}: expected a step of jaxinf.train --lora, found no adapters "
            "in it; export its params"
        )
    family, rank = architecture.family, 0
    tensors, layers = [], []
    for path, (a, b) in parts.items():
        layers.append(_module(family.find("/".join((*path, "kernel")))[0]))
        rank = a.leaf.shape[1]
        for param, theirs in ((a, "lora_A"), (b, "lora_B")):
            held = dtype_of(dtype or param.leaf.dtype)
            tensors.append(Tensor(f"{layers[-1]}.{theirs}.weight", param, held, (1, 0)))
    heads = family.heads if task == "classification" else ()
    whole = [
        tensor
        for tensor in _tensors(step, architecture, dtype)
        if "/".join(tensor.param.leaf.path).startswith(heads)
    ]
    payload = step.commit.payload
    base = payload.get("base") if isinstance(payload, Mapping) else None
    config = {
        "peft_type": "LORA",
        # PEFT's wrapper of classes is for tokens.
        "task_type": None if architecture.model == "vit" else _PEFT_TASKS.get(task),
        "base_model_name_or_path": base if isinstance(base, str) else None,
        "r": rank,
        "lora_alpha": step.adapter_alpha,
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
    whole_file = replace(transit or Transit(), max_file_bytes=1 << 62)
    beside = {"adapter_config.json": config}
    metadata = {"format": "pt"}
    write_tensors(
        destination, tensors, metadata, beside, whole_file, file_name=_ADAPTERS_NAME
    )


def _module(tensor: str) -> str:
    """Returns the module of a tensor, such as that of ``score.weight``."""
    return tensor.rpartition(".")[0]
