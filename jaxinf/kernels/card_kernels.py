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
from collections.abc import Sequence
from dataclasses import dataclass
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
"""Bytes of the block that a kernel writes last, 16 words of uint32: [0] 1 if every
gradient is finite, otherwise 0; from [1] the checksums of `CardStatus`; [15] not 0 if
top-k's positions are not valid; the others 0.
"""

ESTIMATES_BYTES = 64 + 2 * 8192
"""Bytes of the table of `rsqrt_estimates`: a block, then 8,192 entries of 16 bits."""

GRADIENTS = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
RESULTS = {"update": "float32", "bf16": "bfloat16", "f16": "float16"}
STATES = {"": "f32", "bf16": "bf16", "int8": "int8"}
_STATE_DTYPES = {"f32": "float32", "bf16": "bfloat16", "int8": "uint8"}
_ITEM_BYTES = {"uint8": 1, "bfloat16": 2, "float16": 2}
_BAD_INDICES = STATUS_BYTES // 4 - 1

Count = Literal["one", "elements", "selected", "blocks", "estimates", "status"]


@dataclass(frozen=True)
class CardArgument:
    """One argument of a card kernel.

    Attributes:
      name: For example ``mu_in``.
      kind: A pointer is memory that a port (``m_axi``) reaches; a scalar is 32 bits.
      type: Type of the memory, or of the scalar, whose bits are passed.
      is_output: Whether the kernel only writes through it.
      count: The unit that gives the memory's length: the subgroup's elements, those
        selected by top-k, the scales of its blocks, the table of estimates, or the
        status.
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
      finite: Whether every gradient is finite.
      indices_valid: Whether top-k's positions ascend and lie in the subgroup; True
        without top-k.
      checksums_read: CRC-32C (`jaxinf.transfer.crc32c`) of each extent as read, without
        padding: master params, then the slots, each followed by its scales.
      checksums_written: The same for the extents as written.
    """

    finite: bool
    indices_valid: bool
    checksums_read: tuple[int, ...]
    checksums_written: tuple[int, ...]


@dataclass(frozen=True)
class CardKernel:
    """A kernel of a card, with the literals of one optimizer.

    Attributes:
      name: Name in the xclbin and of the C function.
      body: The source in ``generated/`` without its suffix.
      gradient: ``f32``, ``bf16`` or ``f16``.
      out: ``update``: optax's u, float32; ``bf16`` or ``f16``: the new params, rounded
        to nearest even.
      state: ``f32``; ``bf16`` or ``int8``: the store's codec.
      compressed: Whether the gradient comes as top-k values and positions.
      slots: Names of the stored state, in order.
      arguments: All arguments in the order of the call.
      constants: The body's literals, 32 bits each, in order.
    """

    name: str
    body: str
    gradient: str
    out: str
    state: str
    compressed: bool
    slots: tuple[str, ...]
    arguments: tuple[CardArgument, ...]
    constants: tuple[int, ...]

    @property
    def pointers(self) -> tuple[CardArgument, ...]:
        """The arguments that are memory; they come first."""
        return tuple(a for a in self.arguments if a.kind == "pointer")

    @property
    def scalars(self) -> tuple[CardArgument, ...]:
        """The 32-bit arguments; they come last."""
        return tuple(a for a in self.arguments if a.kind == "scalar")

    @property
    def has_rsqrt(self) -> bool:
        """Whether it takes the host's `rsqrt_estimates`, by a pointer of that name."""
        return any(a.name == "rsqrt_estimates" for a in self.pointers)

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
          rounding_key: key of the random bits; slot i rounds with
            ``rounding_key + 1 + i``, as on the host.
          rounding_first: number of the subgroup's first element in its chunk.
          scalars: the prologue's 0-d arrays, in order.
          num_selected: number of elements that top-k sends; 0 without top-k.
        """
        assert 0 < num_elements < 1 << 31, self.name
        words = [num_elements, *([num_selected] if self.compressed else [])]
        words += [rounding_key, rounding_first, *self.constants]
        words += map(scalar_word, scalars)
        assert len(words) == len(self.scalars), self.name
        return tuple((word & 0xFFFFFFFF ^ 1 << 31) - (1 << 31) for word in words)

    def read_status(self, words: Array) -> CardStatus:
        """Decodes a status block; `words`: ``(16,)`` uint32."""
        numbers = [int(word) for word in words]
        count = len(self.extents)
        return CardStatus(
            finite=bool(numbers[0]),
            indices_valid=not numbers[_BAD_INDICES],
            checksums_read=tuple(numbers[1 : 1 + count]),
            checksums_written=tuple(numbers[1 + count : 1 + 2 * count]),
        )


@functools.lru_cache(maxsize=4096)
def card_kernel(
    kernel: Kernel,
    gradient_dtype: np.dtype,
    out_dtype: np.dtype,
    codec: str = "",
    compressed: bool = False,
) -> CardKernel:
    """Returns the card kernel that computes a leaf's update; see `CardKernel`.

    Raises:
      UnsupportedTransformError: cards have no kernel for this optimizer.
    """
    body, constants = _body_of(kernel)
    gradient, state = GRADIENTS[gradient_dtype.name], STATES[codec]
    out = next(name for name, dtype in RESULTS.items() if dtype == out_dtype.name)
    number: Count = "selected" if compressed else "elements"
    pointers: list[tuple[str, str, bool, Count]] = []
    pointers.append(("gradient", gradient_dtype.name, False, number))
    if compressed:
        pointers.append(("indices", "int32", False, "selected"))
    states: list[tuple[str, str, Count]] = [("params", "float32", "elements")]
    for slot in kernel.slots:
        states.append((slot, _STATE_DTYPES[state], "elements"))
        if state == "int8":
            states.append((f"{slot}_scales", "float32", "blocks"))
    for name, dtype, count in states:
        pointers.append((f"{name}_in", dtype, False, count))
        pointers.append((f"{name}_out", dtype, True, count))
    if any(equation.op == "rsqrt" for equation in lower(kernel).equations):
        pointers.append(("rsqrt_estimates", "uint32", False, "estimates"))
    pointers.append(("out", out_dtype.name, True, "elements"))
    pointers.append(("status", "uint32", True, "status"))
    names = ["num_elements", *(["num_selected"] if compressed else [])]
    words = [(name, "uint32") for name in (*names, "rounding_key", "rounding_first")]
    words += [(f"c{i}", "float32") for i in range(len(constants))]
    for i, dtype in enumerate(kernel.scalar_dtypes):
        words.append((f"s{i}", "uint32" if dtype == np.bool_ else dtype.name))
    arguments = [CardArgument(n, "pointer", t, o, c) for n, t, o, c in pointers]
    arguments += [CardArgument(name, "scalar", dtype) for name, dtype in words]
    return CardKernel(
        f"jaxinf_{body}_{gradient}_{out}_{state}{'_topk' if compressed else ''}",
        body, gradient, out, state, compressed, kernel.slots, tuple(arguments),
        constants,
    )  # fmt: skip


@functools.cache
def named_card_kernel(name: str) -> CardKernel:
    """Returns the card kernel of a name, with the literals of some optimizer.

    Raises:
      ValueError: there is no such kernel.
    """
    dtypes = {short: dtype for dtype, short in GRADIENTS.items()}
    codecs = {short: codec for codec, short in STATES.items()}
    kinds = "_".join(f"({'|'.join(kind)})" for kind in (dtypes, RESULTS, codecs))
    match = re.fullmatch(form := f"jaxinf_(.+)_{kinds}(_topk)?", name)
    kernel = _bodies().get(match[1]) if match else None
    if match is None or kernel is None:
        raise ValueError(
            f"card kernel: expected {form} with one of the bodies "
            f"{', '.join(_bodies())}; found {name!r}"
        )
    dtype, out = np.dtype(dtypes[match[2]]), np.dtype(RESULTS[match[3]])
    return card_kernel(kernel, dtype, out, codecs[match[4]], bool(match[5]))


def _body_of(kernel: Kernel) -> tuple[str, tuple[int, ...]]:
    if kernel.array_dtypes:
        raise _refusal("an update that needs more than scalars beside the state")
    for slot, dtype in zip(kernel.slots, kernel.slot_dtypes, strict=True):
        if dtype != FLOAT32:
            raise _refusal(
                f"{slot} as {dtype}: the optimizer's own state must be float32 "
                'there; open_store(state="bf16") stores it in fewer bits'
            )
    source = emit(lower(kernel))
    body = _bodies_by_text().get(source.text)
    if body is None:
        known = ", ".join(_bodies())
        raise _refusal(f"this update; kernels for cards exist for {known}")
    return body, source.constants


def _refusal(what: str) -> UnsupportedTransformError:
    return UnsupportedTransformError(
        f'CSD of a card: no kernel for {what}. Use csd="host", which runs any update'
    )


@functools.cache
def _bodies() -> dict[str, Kernel]:
    """Returns the package's kernels, except those that change nothing."""
    return {n: k for n, k in standard_kernels().items() if k.update is not None}


@functools.cache
def _bodies_by_text() -> dict[str, str]:
    return {emit(lower(kernel)).text: name for name, kernel in _bodies().items()}
