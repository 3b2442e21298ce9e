"""The writer's files, read by the vendor's header, an XML parser and XRT."""

import subprocess
from pathlib import Path

import pytest
from swemu.build import INCLUDE, RuntimeUnavailable, check_packages
from swemu.table import Kernel, units
from swemu.xclbin import write_xclbin

from jaxinf.kernels.card_kernels import CardArgument

FIRST = Kernel(
    "first",
    (
        CardArgument("count", "scalar", "uint32"),
        CardArgument("input", "pointer", "float32"),
        CardArgument("factor", "scalar", "float32"),
        CardArgument("output", "pointer", "bfloat16"),
    ),
)
SECOND = Kernel("second", (CardArgument("only", "pointer", "int32"),))

DUMP = """\
xclbin2 signature -1 length right mode 5 platform xilinx_u2_gen3x4_xdma_gc_base_2 \
sections 5
section 0 aligned 1
  library
section 2 aligned 1
section 6 aligned 1
  ddr4 1 used 1 KiB 2097152 base 0 tag bank0
section 8 aligned 1
  kernel 1 first:u0 base 0x1400000 interrupt 0 enabled 1 control 0
  kernel 1 first:u1 base 0x1410000 interrupt 1 enabled 1 control 0
  kernel 1 second:u2 base 0x1420000 interrupt 2 enabled 1 control 0
  kernel 1 second:u3 base 0x1430000 interrupt 3 enabled 1 control 0
section 7 aligned 1
  argument 1 of 0 in 0
  argument 3 of 0 in 0
  argument 1 of 1 in 0
  argument 3 of 1 in 0
  argument 0 of 2 in 0
  argument 0 of 3 in 0
"""


def test_the_vendors_header_reads_it(tmp_path):
    reader, file = tmp_path / "reader", tmp_path / "kernels.xclbin"
    source = Path(__file__).with_name("dump_xclbin.cpp")
    command = ["g++", "-std=c++17", "-isystem", INCLUDE, source, "-o", reader]
    subprocess.run(command, check=True)
    file.write_bytes(write_xclbin(b"library", units([FIRST, SECOND], 2)))
    result = subprocess.run([reader, file], capture_output=True, text=True, check=True)
    assert result.stdout == DUMP


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ("", r"libxrt1: expected 2\S+ .* found: not installed. .* apt-get install"),
        ("202310.2.16.204-1 amd64", r"libxrt1: expected .* found: 202310.2.16.204-1"),
    ],
)
def test_other_packages_are_refused(tmp_path, monkeypatch, found, message):
    query = tmp_path / "dpkg-query"
    query.write_text(f"#!/bin/sh\nprintf '{found}'\ntest '{found}'\n")
    query.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(RuntimeUnavailable, match=message):
        check_packages()
