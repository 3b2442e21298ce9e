"""Writes an xclbin for XRT's software emulation: a kernel library and its metadata.

Invariant: every section follows from one list of compute units, and the UUID from the
content, for XRT takes two xclbins of one UUID for the same.
"""

import hashlib
import struct
from xml.etree import ElementTree

from .table import UNIT_RANGE, registers

PLATFORM = "xilinx_u2_gen3x4_xdma_gc_base_2"
DDR_BYTES = 2 << 30
"""The part of a card's memory that the emulation can share with the host."""

BITSTREAM, EMBEDDED_METADATA, MEM_TOPOLOGY, CONNECTIVITY, IP_LAYOUT = 0, 2, 6, 7, 8
HEADER_BYTES, SECTION_HEADER_BYTES = 456, 40
MEM_DDR4, IP_KERNEL = 1, 1
SW_EMULATION = 5
INTERRUPT_ENABLED = 1
PORTS = (
    ("M_AXI_GMEM", "master", "0xFFFFFFFF", "512"),
    ("S_AXI_CONTROL", "slave", hex(UNIT_RANGE), "32"),
)


def write_xclbin(library, compute_units):
    """Returns the bytes of a file with a library of ``model/card_units.hpp``'s form."""
    bank = struct.pack("<BB6xQQ16s", MEM_DDR4, 1, DDR_BYTES // 1024, 0, b"bank0")
    return _container(
        {
            BITSTREAM: library,
            EMBEDDED_METADATA: metadata(compute_units),
            MEM_TOPOLOGY: struct.pack("<i4x", 1) + bank,  # DDR at address 0
            IP_LAYOUT: ip_layout(compute_units),
            CONNECTIVITY: connectivity(compute_units),
        }
    )


def ip_layout(compute_units):
    """The compute units, their order fixed by ascending interrupt numbers."""
    entries = []
    for interrupt, unit in enumerate(compute_units):
        properties = INTERRUPT_ENABLED | interrupt << 1  # and AP_CTRL_HS, which is 0
        name = f"{unit.kernel.name}:{unit.name}".encode()
        if len(name) >= 64:
            raise ValueError(f"{name.decode()}: longer than the 63 bytes of an IP name")
        entries.append(struct.pack("<IIQ64s", IP_KERNEL, properties, unit.base, name))
    return struct.pack("<i4x", len(entries)) + b"".join(entries)


def connectivity(compute_units):
    """Every pointer of every unit goes to the one bank."""
    connections = [
        struct.pack("<iii", argument, unit, 0)
        for unit, one in enumerate(compute_units)
        for argument, described in enumerate(one.kernel.arguments)
        if described.kind == "pointer"
    ]
    return struct.pack("<i", len(connections)) + b"".join(connections)


def metadata(compute_units):
    """The XML from which XRT takes arguments, registers and compute units."""
    add = ElementTree.SubElement
    project = ElementTree.Element("project", name="kernels")
    platform = add(project, "platform", name=PLATFORM, vendor="")
    device = add(platform, "device", name="card")
    core = add(device, "core", name="OCL_REGION_0", target="csim", type="clc_region")
    for unit in compute_units:
        kernel = unit.kernel
        element = add(core, "kernel", name=kernel.name, language="c", type="pl")
        for name, mode, address_range, width in PORTS:
            add(
                element, "port", name=name, mode=mode, range=address_range,
                dataWidth=width, portType="addressable", base="0x0",
            )  # fmt: skip
        for number, (argument, offset, num_bytes) in enumerate(registers(kernel)):
            pointer = argument.kind == "pointer"
            add(
                element, "arg", name=argument.name, id=str(number),
                addressQualifier="1" if pointer else "0", offset=hex(offset),
                port="M_AXI_GMEM" if pointer else "S_AXI_CONTROL", hostOffset="0x0",
                size=hex(num_bytes), hostSize=hex(num_bytes),
                type=argument.type + "*" * pointer,
            )  # fmt: skip
        instance = add(element, "instance", name=unit.name)
        base = {"base": hex(unit.base), "range": hex(UNIT_RANGE)}
        add(instance, "addrRemap", base, port="S_AXI_CONTROL")
    ElementTree.indent(project)
    return ElementTree.tostring(project, encoding="utf-8", xml_declaration=True) + b"\n"


def _container(sections):
    """The axlf format: key block, header, section headers, aligned bodies."""
    headers, bodies = b"", b""
    offset = HEADER_BYTES + SECTION_HEADER_BYTES * len(sections)
    for kind, body in sections.items():
        aligned = _aligned(offset + len(bodies)) - offset
        bodies = bodies.ljust(aligned, b"\0") + body
        headers += struct.pack("<I16s4xQQ", kind, b"", offset + aligned, len(body))
    bodies = bodies.ljust(_aligned(offset + len(bodies)) - offset, b"\0")
    digest = hashlib.md5(headers + bodies, usedforsecurity=False).digest()
    header = struct.pack(
        "<QQQHBBHH16s64s16s16sI4x",
        offset + len(bodies), 0, 0, 0, 2, 13, SW_EMULATION, 0, bytes(16),
        PLATFORM.encode(), digest, b"", len(sections),
    )  # fmt: skip
    key_block = struct.pack("<8si28s256sQ", b"xclbin2", -1, b"\xff" * 28, b"", 0)
    return key_block + header + headers + bodies


def _aligned(offset):
    return -(-offset // 8) * 8
