"""Forms in fewer bits, in which numbers wait on a drive.

    float32 ─► bf16: rounded to nearest          ─► 2 bytes a number
            ─► int8: blocks of 256 with a scale  ─► 1 byte and 4 / 256

Invariant: int8 is that of docs/format.md, "Codecs", with native code and without. What
has no code is not coded.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jaxinf.io.pages import page_ceil
from jaxinf.layout import CODE_BLOCK, CodedSlot
from jaxinf.native import block_codes
from jaxinf.typing import BFLOAT16, Array

Form: TypeAlias = Literal["bf16", "int8"]
"""A form of floating-point values on a drive, from Mesa's idea (2111.11124): forward is
exact, and backward reads values of low precision."""

PART_BYTES = 4 << 20
"""The longest part of a value that is moved at once."""

FORMS: tuple[Form, ...] = get_args(Form)

_ITEM_BYTES = {"bf16": 2, "int8": 1}
_SCALE_BYTES = 4
_TINY = np.finfo(np.float32).tiny
# Numbers that are converted at once, so that they stay in a processor's cache.
_RUN = 256 * CODE_BLOCK


@dataclass(frozen=True)
class Coding:
    """The form of one value's numbers.

    Attributes:
      key: Seed of the random bits that decide the rounding to int8.
    """

    form: Form
    dtype: np.dtype
    key: int

    def stored_bytes(self, num_bytes: int) -> int:
        """Returns the bytes of a run of the value that has `num_bytes` itself."""
        count = num_bytes // self.dtype.itemsize
        if self.form == "bf16":
            return _ITEM_BYTES["bf16"] * count
        return _num_blocks(count) * _SCALE_BYTES + count

    def encode(self, raw: Array, out: Array, *, start: int) -> bool:
        """Encodes a run of the value.

        Args:
          raw: The run's bytes, `uint8`, aligned for the dtype.
          out: `uint8`, `stored_bytes` long, aligned for float32.
          start: Position of the run in the value, in bytes; whole blocks of numbers.

        Returns:
          Whether it can be decoded. In int8 a block with a number that is not finite,
          or above 2^126, cannot.
        """
        values = raw.view(self.dtype)
        if self.form == "bf16":
            with np.errstate(over="ignore"):
                out.view(BFLOAT16)[...] = values
            return True
        scales, codes = _parts(out, values.size)
        first = start // self.dtype.itemsize
        for i in range(0, values.size, _RUN):
            run = np.ascontiguousarray(values[i : i + _RUN], np.float32)
            own = scales[i // CODE_BLOCK :][: _num_blocks(run.size)]
            _encode_blocks(run, codes[i : i + _RUN], own, self.key, first + i)
        return not np.isnan(scales).any()

    def decode(self, stored: Array, out: Array) -> None:
        """Decodes what `encode` has stored.

        Args:
          stored: `uint8`, aligned for float32.
          out: The run's bytes, `uint8`, aligned for the dtype.
        """
        values = out.view(self.dtype)
        if self.form == "bf16":
            values[...] = stored.view(BFLOAT16)
            return
        scales, codes = _parts(stored, values.size)
        is_direct = self.dtype == np.float32
        for i in range(0, values.size, _RUN):
            those = values[i : i + _RUN]
            run = those if is_direct else np.empty(those.size, np.float32)
            own = scales[i // CODE_BLOCK :][: _num_blocks(run.size)]
            _decode_blocks(codes[i : i + _RUN], own, run)
            if not is_direct:
                those[...] = run


def coding_of(form: Form | None, dtype: np.dtype, key: int) -> Coding | None:
    """Returns the coding of a value; None if it is stored as it is.

    Only floating-point numbers that are longer than those of the form are coded.
    """
    if form is None or jnp.issubdtype(dtype, jax.dtypes.extended):
        return None
    if not jnp.issubdtype(dtype, jnp.floating):
        return None
    if dtype.itemsize <= _ITEM_BYTES[form]:
        return None
    return Coding(form, np.dtype(dtype), key)


def _num_blocks(count: int) -> int:
    return -(-count // CODE_BLOCK)


def _parts(stored: Array, count: int) -> tuple[Array, Array]:
    scales_bytes = _num_blocks(count) * _SCALE_BYTES
    return stored[:scales_bytes].view(np.float32), stored[scales_bytes:][:count]


def _encode_blocks(
    values: Array, codes: Array, scales: Array, key: int, first: int
) -> None:
    if block_codes.run(values, codes, scales, key=key, first=first, decodes=False):
        return
    is_tiny = np.abs(values) < _TINY  # as in machine code, denormals are zero
    flushed = np.where(is_tiny, np.float32(0), values)
    CodedSlot(codes, scales, key, first).encode(flushed)


def _decode_blocks(codes: Array, scales: Array, out: Array) -> None:
    if not block_codes.run(out, codes, scales, key=0, first=0, decodes=True):
        out[...] = CodedSlot(codes, scales).decode()


def stored_bytes(num_bytes: int, coding: Coding | None = None) -> int:
    """Returns the bytes that a value takes on drives, in whole pages of each part."""
    runs = [stop - start for start, stop in runs_of(num_bytes)]
    if coding is not None:
        runs = [coding.stored_bytes(run) for run in runs]
    return sum(map(page_ceil, runs))


def runs_of(num_bytes: int) -> Iterator[tuple[int, int]]:
    """Yields the first byte of each part of a value, and that after its last."""
    for start in range(0, max(num_bytes, 1), PART_BYTES):
        yield start, min(start + PART_BYTES, num_bytes)
