"""Streaming on four devices: as on one, shard by shard.

The programs are functions of `tests/programs/streaming_sharded.py`.
"""

import pytest
from cases import Cases
from families import family

FOUR = "--xla_force_host_platform_device_count=4"


@pytest.fixture(scope="module")
def process():
    cases = Cases("programs/streaming_sharded.py", XLA_FLAGS=FOUR)
    yield cases
    cases.close()


KINDS = ("explicit", "named", "specs", "shard_map")
PROGRAMS = ("tied_and_unused", "linen_scan", "scan_nested", "scan_twice_cast")
OPTIONS = "clipped ratios parts typed_parts weighed rewritten compressed bf16".split()
CASES = [
    *(("training", kind) for kind in KINDS),
    *(("zoo", name) for name in (*PROGRAMS, "moe_map")),
    *(("options", name) for name in OPTIONS),
    *(("initialised", ""), ("function", "")),
    *(("other_devices", ""), ("refused", "")),
]


@pytest.mark.parametrize(("function", "name"), family(CASES, short=[("function", "")]))
def test_on_four_devices(function, name, process, place):
    process.run(function, place, *[name] * bool(name))
