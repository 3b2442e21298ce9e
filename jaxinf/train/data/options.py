"""The options about data on the command line.

Invariant: a field exists only if it works.
"""

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from jaxinf_models import TaskName

from jaxinf.train.data.errors import DataError
from jaxinf.train.data.examples import field_map


def shown(metavar: str, default: str) -> Any:
    """Sets the text that `--help` shows in place of a default."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=f"(default: {default})")


@dataclasses.dataclass(frozen=True)
class DataOptions:
    """The data, its held-out part, and the tokenizer."""

    # The training data: text files, JSON lines, CSV, Parquet, Arrow, packed ones, too,
    # folders of these, quoted globs; folders saved by Hugging Face datasets; images in
    # a folder for each class. docs/training.md describes each.
    data: Annotated[
        tuple[str, ...], shown("PATH...", "Python's standard library sources")
    ] = ()

    # The validation data; by default the validation split of --data, or a part of it
    # that is held out.
    validation: Annotated[tuple[str, ...], shown("PATH...", "a part of --data")] = ()

    # The share of the data that is held out.
    validation_fraction: float = 0.05

    # A Hugging Face folder with a tokenizer; without it every byte is a token.
    tokenizer: Annotated[Path | None, shown("DIR", "bytes")] = None

    # Fields of records under other names, as OURS=YOURS,...: ours are text; prompt and
    # response; messages and tools; label, a class's number or name; and text_pair.
    # Alpaca's and ShareGPT's fields are known.
    fields: Annotated[str, shown("OURS=YOURS,...", "our names")] = ""

    # With prompts and responses, or messages: learn the answers alone, or all text.
    loss_on: Literal["answers", "all"] = "answers"

    # Share of the tokens that --task masked-lm masks.
    mask_rate: float = 0.15


def check_options(
    options: DataOptions, task: TaskName, *, takes_images: bool = False
) -> None:
    """Refuses invalid or contradictory options.

    Args:
      takes_images: whether the model takes images instead of text.

    Raises:
      DataError: names the flag, the value found and the remedy.
    """
    for name, value in (
        ("validation-fraction", options.validation_fraction),
        ("mask-rate", options.mask_rate),
    ):
        if not 0 < value < 1:
            raise DataError(f"--{name}: expected more than 0, less than 1, got {value}")
    field_map(options.fields)
    if options.validation:
        _check_unset(
            options, "validation_fraction", "--validation says what to hold out"
        )
    if task != "masked-lm":
        _check_unset(options, "mask_rate", f"--task {task} hides no tokens")
    if task != "causal-lm":
        _check_unset(options, "loss_on", f"--task {task} learns no prompts")
    if takes_images:
        for name in ("tokenizer", "fields"):
            _check_unset(options, name, "the model takes images")


def _check_unset(options: DataOptions, name: str, why: str) -> None:
    default = next(f.default for f in dataclasses.fields(options) if f.name == name)
    if getattr(options, name) != default:
        raise DataError(f"--{name.replace('_', '-')}: {why}; leave it out")
