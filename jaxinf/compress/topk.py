"""The user's choice of a compression: `top_k`, and its form on a command line.

Invariant: every compression that exists can be carried out; invalid ones are refused
when they are made.
"""

from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any, Literal, TypeAlias

import jax.numpy as jnp
import msgspec
import numpy as np

from jaxinf.terminal import check_choice

ValueDType: TypeAlias = Literal["float32", "bfloat16", "float16"]
"""Dtype of the values on the link."""

INDEX_BYTES = 4
"""Bytes of an index on the link, an int32."""

_FORM = "top_k:RATIO, then ,warmup_steps=N ,error_feedback=true or ,values=DTYPE"


@dataclass(frozen=True)
class TopK:
    """Compression to the largest elements of each chunk; made by `top_k`."""

    ratio: float
    warmup_steps: int = 0
    error_feedback: bool = False
    values: ValueDType | None = None

    def __post_init__(self) -> None:
        if isinstance(self.ratio, bool) or not 0 < self.ratio <= 1:
            raise ValueError(
                f"top_k: expected a ratio above 0 and at most 1, found {self.ratio!r}; "
                "0.02 sends 2 % of a dense gradient's bytes"
            )
        if isinstance(self.warmup_steps, bool) or self.warmup_steps < 0:
            raise ValueError(
                f"top_k: expected warmup_steps of at least 0, found "
                f"{self.warmup_steps!r}"
            )
        if self.values is not None:
            check_choice("top_k: values", self.values, ValueDType)

    def value_dtype(self, gradient: Any) -> np.dtype:
        """Returns the dtype of values on the link, for a gradient's dtype."""
        return jnp.dtype(self.values or gradient)

    def num_kept(self, num_elements: int, gradient: Any) -> int:
        """Returns the number of elements of a chunk to send, for a gradient's dtype.

        As many as fit into ``ratio`` times the dense bytes, but at least one.
        """
        ratio = Fraction(repr(float(self.ratio)))  # as it is written, not as it rounds
        dense_bytes = num_elements * np.dtype(gradient).itemsize
        entry_bytes = INDEX_BYTES + self.value_dtype(gradient).itemsize
        num_fitting = int(ratio * dense_bytes / entry_bytes)
        return min(num_elements, max(1, num_fitting))


def top_k(
    ratio: float,
    *,
    warmup_steps: int = 0,
    error_feedback: bool = False,
    values: ValueDType | None = None,
) -> TopK:
    """Sends only the largest elements of a gradient to the CSDs, the rest as zero.

    Each chunk of a leaf sends its largest elements by magnitude, as pairs of an int32
    index and a value: in a chunk of 16,384 elements or more all that reach a threshold,
    known to within 0.4 %, and elements just below it. The method is Smart-Infinity's
    SmartComp (Jang et al., HPCA 2024, section IV-C).

    Args:
      ratio: Bytes sent, as a share of the dense gradient's: above 0, at most 1. For
        fp32 gradients an element costs twice its dense bytes, so 0.02, the paper's "2
        %", keeps 1 % of the elements.
      warmup_steps: Number of first steps of the store that send dense gradients.
      error_feedback: Whether elements that were not sent are added to the next
        gradient. This takes 4 bytes a param on the JAX device, and as many on the link
        in each commit.
      values: Dtype of the values sent; by default the gradient's own.

    Returns:
      A value for the argument `compress` of `jaxinf.smart_update`.

    Raises:
      ValueError: An argument is out of range.
    """
    return TopK(ratio, warmup_steps, error_feedback, values)


def parse_compression(text: str) -> TopK:
    """Reads ``top_k:RATIO[,NAME=VALUE…]``, the names being `top_k`'s.

    Raises:
      ValueError: The text does not parse; gives the expected form.
    """
    name, _, rest = text.strip().partition(":")
    ratio, *assignments = rest.split(",")
    pairs = (assignment.partition("=") for assignment in assignments)
    arguments = {"ratio": ratio} | {option: value for option, _, value in pairs}
    if name != "top_k" or arguments.keys() - {field.name for field in fields(TopK)}:
        raise ValueError(
            f"{text!r}: expected {_FORM}, such as top_k:0.02; top_k is the only "
            "compression there is"
        )
    try:
        return msgspec.convert(arguments, TopK, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(f"{text!r}: expected {_FORM}; {error}") from None
