"""What the command line says about data.

Invariant: a field exists only if it works.
"""

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from jaxinf_models import TaskName

from jaxinf.train.data.errors import DataError

__all__ = ["DataOptions", "check_options", "shown"]


def shown(metavar: str, default: str) -> Any:
    """How `--help` shows a flag whose default is no plain value."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=f"(default: {default})")


@dataclasses.dataclass(frozen=True)
class DataOptions:
    """Data, what is held out of it, and how text becomes tokens."""

    # What to learn: text files, JSON lines, Parquet, folders of either, quoted globs;
    # folders that Hugging Face datasets saved; images in a folder for each class, or
    # an .npz with images and labels. docs/training.md shows each.
    data: Annotated[
        tuple[str, ...], shown("PATH...", "Python's standard library sources")
    ] = ()

    # What to evaluate on; by default a part of --data is held out, or the validation
    # split that it has.
    validation: Annotated[tuple[str, ...], shown("PATH...", "a part of --data")] = ()

    # The part that is held out.
    validation_fraction: float = 0.05

    # A tokenizer.json, or a folder with one; without it every byte is a token.
    tokenizer: Annotated[Path | None, shown("FILE", "bytes")] = None

    # The field of a text in records. Besides it there may be: prompt and response;
    # messages, a list of {role, content}; label, a class by its number from 0.
    text_field: Annotated[str, tyro.conf.arg(metavar="NAME")] = "text"

    # Of prompts and responses, or messages: learn the answers alone, or all of it.
    loss_on: Literal["answers", "all"] = "answers"

    # Share of the tokens that --task masked-lm hides.
    mask_rate: float = 0.15

    # Classes of --task classification.
    num_labels: Annotated[int | None, shown("INT", "those of the data")] = None


def check_options(
    options: DataOptions, task: TaskName, *, takes_images: bool = False
) -> None:
    """Refuses options that cannot mean anything.

    Args:
      options: what the user says.
      task: what the rows are for.
      takes_images: the model does, instead of text.

    Raises:
      DataError: names the flag, what it found and what to do.
    """
    for name, value in (
        ("validation-fraction", options.validation_fraction),
        ("mask-rate", options.mask_rate),
    ):
        if not 0 < value < 1:
            raise DataError(f"--{name}: expected more than 0, less than 1, got {value}")
    if options.num_labels is not None and options.num_labels < 2:
        raise DataError(f"--num-labels: expected at least 2, got {options.num_labels}")
    if options.validation:
        _check_unset(
            options, "validation_fraction", "--validation says what to hold out"
        )
    if task != "masked-lm":
        _check_unset(options, "mask_rate", f"--task {task} hides no tokens")
    if task != "causal-lm":
        _check_unset(options, "loss_on", f"--task {task} learns no prompts")
    if task != "classification":
        _check_unset(options, "num_labels", f"--task {task} has no classes")
    if takes_images:
        for name in ("tokenizer", "text_field"):
            _check_unset(options, name, "the model takes images")


def _check_unset(options: DataOptions, name: str, why: str) -> None:
    default = next(f.default for f in dataclasses.fields(options) if f.name == name)
    if getattr(options, name) != default:
        raise DataError(f"--{name.replace('_', '-')}: {why}; leave it out")
