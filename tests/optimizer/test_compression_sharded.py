"""Compressed gradients of sharded params: the same bits as on one JAX device.

Each part runs in a process of its own, because the number of CPU devices is fixed when
JAX starts. The shards are whole chunks, on one JAX device too.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.long

PROGRAM = Path(__file__).parents[1] / "programs" / "sharded_compression.py"
DEVICES = {
    "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
    "PJRT_NPROC": "8",
}


def test_same_bits_whatever_the_mesh(tmp_path, run_python):
    traffic = []

    def run(*words, **environment):
        result = run_python(PROGRAM, tmp_path, *words, **environment)
        traffic.append(json.loads(result.stdout.splitlines()[-1]))

    # The store is made by four devices, whose shards then are its chunks.
    run("four", 4, 1, 3, 0, **DEVICES)
    shutil.copytree(tmp_path / "four", tmp_path / "one", symlinks=True)
    run("four", 4, 3, 6, 1, **DEVICES)
    run("one", 1, 3, 6, 0)
    assert len(set(traffic)) == 1
    four, one = (np.load(tmp_path / f"{name}.npz") for name in ("four", "one"))
    for name in four.files:
        np.testing.assert_array_equal(four[name], one[name], err_msg=name)
    left_out = np.mean(four["left/columns"] != 0)
    assert 0.9 < left_out < 1
