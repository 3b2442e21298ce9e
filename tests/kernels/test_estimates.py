"""The table of this processor's estimates of 1 / sqrt(x), and machines without one."""

import numpy as np
import pytest

from jaxinf.kernels import rsqrt_estimates
from jaxinf.native import libraries, toolchain

make = rsqrt_estimates.__wrapped__
needs_estimates = pytest.mark.skipif(
    not toolchain.levels() or toolchain.find_compiler() is None,
    reason="no C++ compiler for this processor",
)


@needs_estimates
def test_the_entries_are_near_the_root():
    table = rsqrt_estimates()
    assert table[0] in (1, 2)
    assert not table[1:16].any()
    index = np.arange(8192, dtype=np.uint32)
    arguments = (128 - (index >> 12) << 23 | (index & 0xFFF) << 11).view(np.float32)
    entries = table[16:].view(np.uint16).astype(np.uint32)
    found = (np.uint32(0x3E800000) + (entries << 9)).view(np.float32)
    np.testing.assert_allclose(found, 1 / np.sqrt(arguments), rtol=1.5 * 2**-11)


def test_machines_without_a_table(monkeypatch, caplog):
    with monkeypatch.context() as patch:
        patch.setattr(toolchain, "levels", tuple)
        assert not make().any()
    assert not caplog.records
    with monkeypatch.context() as patch:
        patch.setattr(toolchain, "levels", lambda: toolchain.LEVELS)
        patch.setattr(toolchain, "find_compiler", lambda: None)
        patch.setattr(libraries, "load_prebuilt", lambda *_: None)
        assert not make().any()
    assert "other last bits than this host: expected a C++ compiler" in caplog.text
    monkeypatch.setattr(libraries, "load_helper", lambda name: Refusing())
    assert not make().any()
    assert "instruction does not estimate by a table" in caplog.text


class Refusing:
    """A helper of a processor whose instruction reads no table."""

    def __call__(self, entries):
        return 0
