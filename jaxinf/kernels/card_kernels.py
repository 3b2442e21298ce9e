"""The kernels of FPGA cards: one table of their names and arguments.

Invariant: this table is the only description of card kernels, for callers, runtimes and
the builder (`jaxinf.kernels.card_source`).

A card kernel is one emitted body for one dtype of gradient, of result and of state:

    jaxinf_<body>_<f32|bf16|f16>_<update|bf16|f16>_<f32|bf16|int8>[_topk]

<body> is the name of a source in ``generated/``; literals and the prologue's scalars
are arguments, so that one kernel serves all hyperparameters.
"""

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal

import numpy as np

from jaxinf.errors import UnsupportedTransformError
from jaxinf.kernels.calls import scalar_word
from jaxinf.kernels.compiled import standard_kernels
from jaxinf.kernels.emitter import emit
from jaxinf.kernels.lowering import lower
from jaxinf.layout import CODE_BLOCK
from jaxinf.program import Kernel
from jaxinf.typing import FLOAT32, Array

CARD_ALIGNMENT_BYTES = 64
"""Alignment of pointers and their memory: the bytes a port moves in one cycle."""

STATUS_BYTES = 64
"""Bytes of the status that a kernel writes last, 16 words of uint32: [0] 1 if every
gradient is finite, otherwise 0; from [1] the checksums of `CardStatus`; [15] not 0 if
top-k's positions are not valid; the others 0.
"""

ESTIMATES_BYTES = 64 + 2 * 8192
"""Bytes of the table of `rsqrt_estimates`: a block, then 8,192 entries of 16 bits."""

_GRADIENT_DTYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}
_OUT_DTYPES = {"update": "float32", "bf16": "bfloat16", "f16": "float16"}
_STATE_DTYPES = {"f32": "float32", "bf16": "bfloat16", "int8": "uint8"}
_CODECS = {"f32": "", "bf16": "bf16", "int8": "int8"}
_ITEM_BYTES = {"uint8": 1, "bfloat16": 2, "float16": 2}
_BAD_INDICES = STATUS_BYTES // 4 - 1

Count = Literal["one", "elements", "selected", "blocks", "estimates", "status"]


@dataclass(frozen=True)
class CardArgument:
    """One argument of a card kernel.

    Attributes:
      name: For example ``mu_in``.
      kind: A pointer is memory that a port (``m_axi``) reaches; a scalar is 32 bits.
      type: Dtype of the memory, or of the scalar, whose bits are passed.
      is_output: Whether the kernel only writes the memory.
      count: The unit of the memory's length: the subgroup's elements, those selected by
        top-k, the scales of its blocks, the table of estimates, or the status.
    """

    name: str
    kind: Literal["pointer", "scalar"]
    type: str
    is_output: bool = False
    count: Count = "one"

    def num_bytes(self, num_elements: int, num_selected: int = 0) -> int:
        """Returns its memory: multiples of `CARD_ALIGNMENT_BYTES`, at least one."""
        number = {
            "one": 1,
            "elements": num_elements,
            "selected": num_selected,
            "blocks": -(-num_elements // CODE_BLOCK),
            "estimates": ESTIMATES_BYTES // 4,
            "status": STATUS_BYTES // 4,
        }[self.count]
        unit = CARD_ALIGNMENT_BYTES
        return max(1, -(-number * _ITEM_BYTES.get(self.type, 4) // unit)) * unit


@dataclass(frozen=True)
class CardStatus:
    """A kernel's report.

    Attributes:
      has_valid_indices: Whether top-k's positions ascend and lie in the subgroup; true
        without top-k.
      checksums_read: CRC-32C (`jaxinf.transfer.crc32c`) of each extent as read, without
        padding: master params, then the slots, each followed by its scales.
      checksums_written: The same for the extents as written.
    """

    is_finite: bool
    has_valid_indices: bool
    checksums_read: tuple[int, ...]
    checksums_written: tuple[int, ...]


@dataclass(frozen=True)
class CardKernel:
    """A kernel of a card, with the literals of one optimizer.

    Attributes:
      body: The source in ``generated/`` without its suffix.
      gradient: ``f32``, ``bf16`` or ``f16``.
      out: ``update``: optax's u, float32; ``bf16`` or ``f16``: the new params, rounded
        to nearest even.
      state: ``f32``; ``bf16`` or ``int8``: the store's codec.
      is_sparse: Whether the gradient comes as top-k values and positions.
      has_rsqrt: Whether it takes the host's `rsqrt_estimates`.
      constants: The body's literals, 32 bits each.
    """

    body: str
    gradient: str
    out: str
    state: str
    is_sparse: bool
    slots: tuple[str, ...]
    has_rsqrt: bool
    constants: tuple[int, ...]
    scalar_types: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name in the xclbin and of the C function."""
        suffix = "_topk" if self.is_sparse else ""
        return f"jaxinf_{self.body}_{self.gradient}_{self.out}_{self.state}{suffix}"

    @property
    def arguments(self) -> tuple[CardArgument, ...]:
        return self.pointers + self.scalars

    @cached_property
    def pointers(self) -> tuple[CardArgument, ...]:
        pointer = partial(CardArgument, kind="pointer")
        num_sent: Count = "selected" if self.is_sparse else "elements"
        gradient_dtype = _GRADIENT_DTYPES[self.gradient]
        pointers = [pointer("gradient", type=gradient_dtype, count=num_sent)]
        if self.is_sparse:
            pointers.append(pointer("indices", type="int32", count="selected"))
        states: list[tuple[str, str, Count]] = [("params", "float32", "elements")]
        for slot in self.slots:
            states.append((slot, _STATE_DTYPES[self.state], "elements"))
            if self.state == "int8":
                states.append((f"{slot}_scales", "float32", "blocks"))
        for name, dtype, count in states:
            state = partial(pointer, type=dtype, count=count)
            pointers += [state(f"{name}_in"), state(f"{name}_out", is_output=True)]
        words = partial(pointer, type="uint32")
        if self.has_rsqrt:
            pointers.append(words("rsqrt_estimates", count="estimates"))
        out_dtype = _OUT_DTYPES[self.out]
        out = pointer("out", type=out_dtype, count="elements", is_output=True)
        return (*pointers, out, words("status", count="status", is_output=True))

    @cached_property
    def scalars(self) -> tuple[CardArgument, ...]:
        scalar = partial(CardArgument, kind="scalar")
        sizes = ["num_elements", *(["num_selected"] if self.is_sparse else [])]
        words = [*sizes, "rounding_key", "rounding_first"]
        constants = [f"c{number}" for number in range(len(self.constants))]
        return (
            *(scalar(name, type="uint32") for name in words),
            *(scalar(name, type="float32") for name in constants),
            *(scalar(f"s{n}", type=name) for n, name in enumerate(self.scalar_types)),
        )

    @property
    def extents(self) -> tuple[str, ...]:
        """The states in the order of their checksums: ``params``, slots, scales."""
        return tuple(
            a.name.removesuffix("_in") for a in self.pointers if a.name.endswith("_in")
        )

    def scalar_values(
        self,
        *,
        num_elements: int,
        rounding_key: int,
        rounding_first: int,
        scalars: Sequence[np.generic | Array],
        num_selected: int = 0,
    ) -> tuple[int, ...]:
        """Returns the scalar arguments as signed 32-bit integers, as pyxrt needs them.

        Args:
          rounding_key: Slot i rounds with ``rounding_key + 1 + i``, as on the host.
          rounding_first: Number of the subgroup's first element in its chunk.
          num_selected: Number of elements that top-k sends.
        """
        assert 0 < num_elements < 1 << 31, self.name
        words = [num_elements, *([num_selected] if self.is_sparse else [])]
        words += [rounding_key, rounding_first, *self.constants]
        words += map(scalar_word, scalars)
        assert len(words) == len(self.scalars), self.name
        return tuple((word & 0xFFFFFFFF ^ 1 << 31) - (1 << 31) for word in words)

    def read_status(self, words: Array) -> CardStatus:
        """Decodes a status: ``(16,)`` uint32."""
        numbers = [int(word) for word in words]
        count = len(self.extents)
        return CardStatus(
            is_finite=bool(numbers[0]),
            has_valid_indices=not numbers[_BAD_INDICES],
            checksums_read=tuple(numbers[1 : 1 + count]),
            checksums_written=tuple(numbers[1 + count : 1 + 2 * count]),
        )


@functools.lru_cache(maxsize=4096)
def card_kernel(
    kernel: Kernel,
    *,
    gradient_dtype: np.dtype,
    out_dtype: np.dtype,
    codec: str = "",
    is_sparse: bool = False,
) -> CardKernel:
    """Returns the card kernel that computes a leaf's update; see `CardKernel`.

    Raises:
      UnsupportedTransformError: Cards have no kernel for this optimizer.
    """
    body, constants = _find_body(kernel)
    return CardKernel(
        body=body,
        gradient=_find_name(gradient_dtype.name, _GRADIENT_DTYPES),
        out=_find_name(out_dtype.name, _OUT_DTYPES),
        state=_find_name(codec, _CODECS),
        is_sparse=is_sparse,
        slots=kernel.slots,
        has_rsqrt=any(equation.op == "rsqrt" for equation in lower(kernel).equations),
        constants=constants,
        scalar_types=tuple(
            "uint32" if dtype == np.bool_ else dtype.name
            for dtype in kernel.scalar_dtypes
        ),
    )


def _find_name(value: str, names: Mapping[str, str]) -> str:
    return next(name for name, named in names.items() if named == value)


@functools.cache
def named_card_kernel(name: str) -> CardKernel:
    """Returns the card kernel of a name, with the literals of some optimizer.

    Raises:
      ValueError: There is no such kernel.
    """
    tables = _GRADIENT_DTYPES, _OUT_DTYPES, _CODECS
    kinds = "_".join(f"({'|'.join(table)})" for table in tables)
    match = re.fullmatch(form := f"jaxinf_(.+)_{kinds}(_topk)?", name)
    kernel = _card_bodies().get(match[1]) if match else None
    if match is None or kernel is None:
        raise ValueError(
            f"card kernel: expected {form} with one of the bodies "
            f"{', '.join(_card_bodies())}; found {name!r}"
        )
    return card_kernel(
        kernel,
        gradient_dtype=np.dtype(_GRADIENT_DTYPES[match[2]]),
        out_dtype=np.dtype(_OUT_DTYPES[match[3]]),
        codec=_CODECS[match[4]],
        is_sparse=bool(match[5]),
    )


def _find_body(kernel: Kernel) -> tuple[str, tuple[int, ...]]:
    if kernel.array_dtypes:
        raise _refusal("an update that needs more than scalars beside the state")
    for slot, dtype in zip(kernel.slots, kernel.slot_dtypes, strict=True):
        if dtype != FLOAT32:
            raise _refusal(
                f"{slot} as {dtype}: the optimizer's own state must be float32 "
                'there; open_store(state="bf16") stores it in fewer bits'
            )
    source = emit(kernel)
    body = _names_by_text().get(source.text)
    if body is None:
        known = ", ".join(_card_bodies())
        raise _refusal(f"this update; kernels for cards exist for {known}")
    return body, source.constants


def _refusal(what: str) -> UnsupportedTransformError:
    return UnsupportedTransformError(
        f'CSD of a card: no kernel for {what}. Use csd="host", which runs any update'
    )


@functools.cache
def _card_bodies() -> dict[str, Kernel]:
    """Returns the package's kernels, except those that change nothing."""
    return {n: k for n, k in standard_kernels().items() if k.update is not None}


@functools.cache
def _names_by_text() -> dict[str, str]:
    return {emit(kernel).text: name for name, kernel in _card_bodies().items()}
