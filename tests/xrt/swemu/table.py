"""A card's kernels with their registers and addresses, and C++ that calls them so.

Invariant: the register map is that of HLS's s_axilite adapter, so that one table serves
the metadata of an xclbin and the code that calls a kernel with its register file.
"""

from typing import Any, NamedTuple

from jaxinf.kernels.card_kernels import CardArgument

FIRST_REGISTER = 0x10
FIRST_UNIT = 0x1400000
UNIT_RANGE = 0x10000


class Kernel(NamedTuple):
    """An ``extern "C"`` function; a scalar is an unsigned 32-bit word of its bits."""

    name: str
    arguments: tuple[CardArgument, ...]


class Register(NamedTuple):
    """The place of an argument in its kernel's register file."""

    argument: CardArgument
    offset: int
    num_bytes: int


class Unit(NamedTuple):
    """A compute unit: an instance of a kernel, with the address of its registers."""

    kernel: Any
    name: str
    base: int


def registers(kernel):
    """Yields the arguments' registers: 64 bits a pointer, 32 a scalar, each reserved
    32 bits behind them."""
    offset = FIRST_REGISTER
    for argument in kernel.arguments:
        num_bytes = 8 if argument.kind == "pointer" else 4
        yield Register(argument, offset, num_bytes)
        offset += num_bytes + 4


def units(kernels):
    """The compute units, at ascending addresses, with short names."""
    return [
        Unit(kernel, f"u{index}", FIRST_UNIT + index * UNIT_RANGE)
        for index, kernel in enumerate(kernels)
    ]


def write_glue(compute_units):
    """Returns C++ that is linked with the kernels into the library of an xclbin."""
    parts = ['#include "card_units.hpp"\n', *map(_caller, compute_units)]
    rows = (f'{{"{u.name}", {u.base:#x}, run_{u.kernel.name}}}' for u in compute_units)
    parts.append(f"const CardUnit card_units[] = {{{', '.join(rows)}}};")
    parts.append(f"const unsigned card_num_units = {len(compute_units)};\n")
    return "\n".join(parts)


def _caller(unit):
    types, values = [], []
    for argument, offset, num_bytes in registers(unit.kernel):
        word = f"card_register<std::uint{8 * num_bytes}_t>(registers, {offset:#x})"
        is_pointer = argument.kind == "pointer"
        types.append("void*" if is_pointer else "std::uint32_t")
        values.append(f"addresses({word})" if is_pointer else word)
    name = unit.kernel.name
    return (
        f'extern "C" void {name}({", ".join(types)});\n'
        f"static void run_{name}(const unsigned char* registers,\n"
        f"    const CardAddresses& addresses) {{\n"
        f"  {name}({', '.join(values)});\n"
        f"}}\n"
    )
