"""The options about data on the command line.

Invariant: a field exists only if it works.
"""

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

HELD_OUT_SHARE = 0.05


def shown(metavar: str, default: str, *, name: str | None = None) -> Any:
    """Sets texts that `--help` shows, and a flag's name if it is not the field's."""
    hint = f"(default: {default})"
    return tyro.conf.arg(name=name, metavar=metavar, help_behavior_hint=hint)


@dataclasses.dataclass(frozen=True)
class DataOptions:
    """The data, its held-out part, and the tokenizer."""

    # The training data: text files, JSON lines, Parquet, folders of these, quoted
    # globs; images in a folder for each class. docs/training.md describes each.
    data: Annotated[
        tuple[str, ...], shown("PATH...", "Python's standard library sources")
    ] = ()

    # The validation data, or the share of --data to hold out: 0.1.
    validation: Annotated[
        tuple[str, ...],
        shown("PATH...|SHARE", "the validation split of --data, or 0.05 of it"),
    ] = ()

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

    @property
    def held_out_share(self) -> float | None:
        """The share of `data` to hold out; None if `validation` names files."""
        if not self.validation:
            return HELD_OUT_SHARE
        try:
            return float(*self.validation)
        except (TypeError, ValueError):
            return None
