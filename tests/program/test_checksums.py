"""Checksums in JAX: those of the store."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import family

from jaxinf.program import checksums
from jaxinf.transfer import crc32c


@pytest.mark.parametrize(
    ("dtype", "num"),
    family(
        [
            *(("float32", num) for num in (0, 1, 2, 1023, 4096, 70001)),
            ("uint8", 1023),
            ("int16", 1025),
            ("bfloat16", 4095),
        ],
        short=[("float32", 0), ("float32", 1), ("float32", 2), ("int16", 1025)],
    ),
)
def test_they_are_those_of_the_store(dtype, num):
    rng = np.random.default_rng(num)
    dtype = jnp.dtype(dtype)
    array = np.frombuffer(rng.bytes(num * dtype.itemsize), dtype)
    found = jax.jit(checksums.crc32c)(array)
    assert found.dtype == np.uint32
    assert int(found) == crc32c(array)
    if num:
        zeros = np.zeros(num, dtype)
        assert int(jax.jit(checksums.crc32c)(zeros)) == crc32c(zeros)
