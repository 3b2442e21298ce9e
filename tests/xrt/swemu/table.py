"""The table of a card's kernels, with their registers and addresses.

Invariant: the register map is that of HLS's s_axilite adapter, so that one table serves
the metadata of an xclbin and the code that calls a kernel with its register file.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from jaxinf.kernels.card_kernels import CardArgument

__all__ = ["CardKernel", "Kernel", "Register", "Unit", "registers", "units"]

FIRST_REGISTER = 0x10
FIRST_UNIT = 0x1400000
UNIT_RANGE = 0x10000


class CardKernel(Protocol):
    """The required part of a kernel; `jaxinf.kernels.CardKernel` has it.

    It is an ``extern "C"`` function of this name. Every scalar is passed as an unsigned
    32-bit word of its bits.
    """

    @property
    def name(self) -> str: ...
    @property
    def arguments(self) -> Sequence[CardArgument]: ...


@dataclass(frozen=True)
class Kernel:
    """A `CardKernel` for tests."""

    name: str
    arguments: tuple[CardArgument, ...]


@dataclass(frozen=True)
class Register:
    """The place of an argument in its kernel's register file."""

    argument: CardArgument
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class Unit:
    """A compute unit: an instance of a kernel, with the address of its registers."""

    kernel: CardKernel
    name: str
    base: int


def registers(kernel: CardKernel) -> Iterator[Register]:
    """Yields the arguments' registers: 64 bits a pointer, 32 a scalar, each reserved
    32 bits behind them."""
    offset = FIRST_REGISTER
    for argument in kernel.arguments:
        num_bytes = 8 if argument.kind == "pointer" else 4
        yield Register(argument, offset, num_bytes)
        offset += num_bytes + 4


def units(kernels: Sequence[CardKernel], per_kernel: int = 1) -> list[Unit]:
    """The compute units, at ascending addresses.

    Their names are short: an xclbin has 63 bytes for kernel and unit together.
    """
    instances = [kernel for kernel in kernels for _ in range(per_kernel)]
    return [
        Unit(kernel, f"u{index}", FIRST_UNIT + index * UNIT_RANGE)
        for index, kernel in enumerate(instances)
    ]
