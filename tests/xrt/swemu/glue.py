"""Writes code by which the device model calls kernels with their register files."""

from collections.abc import Sequence

from .table import CardKernel, Unit, registers

__all__ = ["write_glue"]

HEADER = """\
// Calls kernels with their register files.
#include "card_units.hpp"

"""


def write_glue(compute_units: Sequence[Unit]) -> str:
    """Returns C++ that is linked with the kernels into the library of an xclbin.

    Pointers are declared as ``void*``: the functions are ``extern "C"``, so that the
    kernels' own types, and their headers, are not needed.
    """
    kernels = {unit.kernel.name: unit.kernel for unit in compute_units}
    parts = [_caller(kernel) for kernel in kernels.values()]
    table = ",\n".join(
        f'    {{"{unit.name}", {unit.base:#x}, run_{unit.kernel.name}}}'
        for unit in compute_units
    )
    parts.append(
        f"const CardUnit card_units[] = {{\n{table}}};\n"
        f"const unsigned card_num_units = {len(compute_units)};\n"
    )
    return HEADER + "\n".join(parts)


def _caller(kernel: CardKernel) -> str:
    types, values = [], []
    for register in registers(kernel):
        if register.argument.kind == "pointer":
            types.append("void*")
            values.append(
                f"addresses(card_register<std::uint64_t>(registers, "
                f"{register.offset:#x}))"
            )
        else:
            types.append("std::uint32_t")
            values.append(
                f"card_register<std::uint32_t>(registers, {register.offset:#x})"
            )
    arguments = ",\n      ".join(values)
    return (
        f'extern "C" void {kernel.name}({", ".join(types)});\n'
        f"static void run_{kernel.name}(const unsigned char* registers,\n"
        f"    const CardAddresses& addresses) {{\n"
        f"  {kernel.name}({arguments});\n"
        f"}}\n"
    )
