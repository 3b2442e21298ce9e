"""Valid compressions, and their numbers of elements."""

import jax.numpy as jnp
import numpy as np
import pytest

import jaxinf
from jaxinf.compress import parse_compression


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *[
            ({"ratio": ratio}, "ratio above 0 and at most 1")
            for ratio in (0, 1.0001, float("nan"), True)
        ],
        ({"warmup_steps": -1}, "warmup_steps"),
        ({"values": "int8"}, "values='int8': expected one of 'float32', 'bfloat16'"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        jaxinf.top_k(**{"ratio": 0.1, **options})


def test_texts():
    for text, expected in {
        "top_k:0.01": jaxinf.top_k(0.01),
        "top_k:0.02,warmup_steps=100": jaxinf.top_k(0.02, warmup_steps=100),
        "top_k:0.02,error_feedback=true": jaxinf.top_k(0.02, error_feedback=True),
        "top_k:0.1,values=bfloat16": jaxinf.top_k(0.1, values="bfloat16"),
    }.items():
        assert parse_compression(text) == expected
        assert expected.describe() == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected top_k:RATIO"),
        ("random_k:0.1", "top_k is the only compression"),
        ("top_k:half", r"Expected `float`.*\.ratio"),
        ("top_k:0", "ratio above 0"),
        ("top_k:0.1,0.2", "expected top_k:RATIO, then ,warmup_steps=N"),
        ("top_k:0.1,warmup_steps=few", r"Expected `int`.*\.warmup_steps"),
        ("top_k:0.1,values=int4", r"Invalid enum value 'int4'.*\.values"),
    ],
)
def test_bad_texts(text, message):
    with pytest.raises(ValueError, match=message):
        parse_compression(text)


@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.02, 0.07, 0.1, 0.29, 0.58, 1.0])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("values", [None, "float32", "bfloat16", "float16"])
def test_volume_is_the_ratio(ratio, dtype, values):
    compression = jaxinf.top_k(ratio, values=values)
    entry = compression._entry_bytes(dtype)
    assert entry == 4 + jnp.dtype(values or dtype).itemsize
    dense = 1000 * entry * np.dtype(dtype).itemsize
    kept = compression.num_kept(1000 * entry, dtype)
    assert kept * entry == round(ratio * dense)  # exactly, where it divides


def test_at_least_one_and_never_more_than_there_are():
    compression = jaxinf.top_k(0.01)
    for num_elements in (0, 1, 2, 150, 199, 200, 201, 399, 400):
        kept = compression.num_kept(num_elements, np.float32)
        assert kept == min(num_elements, max(1, num_elements // 200))
    assert jaxinf.top_k(1.0).num_kept(3, np.float32) == 1
    assert jaxinf.top_k(1.0, values="float16").num_kept(3, np.float32) == 2
