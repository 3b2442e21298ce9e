"""The options about data on the command line.

Invariant: a field exists only if it works.
"""

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro


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
