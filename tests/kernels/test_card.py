"""The table of card kernels: names, arguments, and refusals of cards."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxinf.errors import UnsupportedTransformError
from jaxinf.kernels import (
    ESTIMATES_BYTES,
    CardStatus,
    card_kernel,
    named_card_kernel,
    rsqrt_estimates,
)
from jaxinf.program import trace_update

FLOAT32 = np.dtype(np.float32)


def kernel_of(tx, num_leaves=2):
    return trace_update(tx, [jnp.zeros(8)] * num_leaves).leaves[0].kernel


@pytest.mark.parametrize("compressed", [False, True])
def test_reciprocal_roots_take_the_hosts_estimates(compressed):
    kernel = kernel_of(optax.rmsprop(0.1, centered=True))
    card = card_kernel(kernel, FLOAT32, "update", "int8", compressed)
    assert card.has_rsqrt
    *_, table, _, _ = card.pointers
    assert [a.name for a in card.pointers[-4:]] == [
        "nu_scales_out", "rsqrt_estimates", "out", "status",
    ]  # fmt: skip
    assert (table.type, table.is_output) == ("uint32", False)
    assert table.num_bytes(1) == rsqrt_estimates().nbytes == ESTIMATES_BYTES
    assert not card_kernel(kernel_of(optax.adam(0.1)), FLOAT32, "update").has_rsqrt


def test_scalars_are_signed_bits():
    card = card_kernel(kernel_of(optax.adam(1.0, b1=0.5)), FLOAT32, "update")
    values = card.scalar_values(
        num_elements=7,
        rounding_key=0x80000000,
        rounding_first=5,
        scalars=[np.float32(-2), np.float32(1)],
    )
    assert len(values) == len(card.scalars)
    assert values[:3] == (7, -(1 << 31), 5)
    assert values[3:-2] == tuple(np.array(card.constants, np.uint32).view(np.int32))
    assert values[-2:] == (-(1 << 30), 0x3F800000)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1))
    card = card_kernel(kernel_of(tx), FLOAT32, "update", compressed=True)
    scalars = [np.bool_(True), *[np.float32(1)] * 3]
    counts = dict.fromkeys(("num_elements", "num_selected"), 1)
    keys = dict.fromkeys(("rounding_key", "rounding_first"), 0)
    values = card.scalar_values(**counts, **keys, scalars=scalars)
    assert values[:2] == (1, 1)
    assert values[-4:] == (-1, *[0x3F800000] * 3)


def test_status():
    card = named_card_kernel("jaxinf_sgd_momentum_f32_update_f32")
    words = np.zeros(16, np.uint32)
    words[:5] = 1, 10, 11, 0xFFFFFFFF, 13
    assert card.read_status(words) == CardStatus(
        finite=True,
        indices_valid=True,
        checksums_read=(10, 11),
        checksums_written=(0xFFFFFFFF, 13),
    )
    words[0], words[15] = 0, 1
    status = card.read_status(words)
    assert not status.finite
    assert not status.indices_valid


def test_a_kernel_is_found_by_its_name():
    for name in (
        "jaxinf_adamw_f32_update_f32",
        "jaxinf_adamw_schedule_one_leaf_f16_bf16_bf16",
        "jaxinf_sgd_momentum_bf16_f16_int8_topk",
    ):
        assert named_card_kernel(name).name == name
    for name in ("adamw", "jaxinf_adamw_f64_update_f32", "jaxinf_set_to_zero_f32_f32"):
        with pytest.raises(ValueError, match=f"card kernel: expected .* '{name}'"):
            named_card_kernel(name)


@pytest.mark.parametrize(
    ("tx", "message"),
    [
        (optax.adam(0.1, mu_dtype=jnp.bfloat16), "no kernel for mu as bfloat16"),
        (optax.chain(optax.clip(1.0), optax.sgd(0.1)), "no kernel for this update"),
        (optax.set_to_zero(), "no kernel for this update; .* adamw, .* lion"),
        (optax.chain(optax.scale_by_trust_ratio(), optax.add_noise(1.0, 0.5, 0)),
         "no kernel for an update that needs more than scalars"),
    ],
)  # fmt: skip
def test_what_cards_lack_is_refused(tx, message):
    with pytest.raises(UnsupportedTransformError, match=message):
        card_kernel(kernel_of(tx), FLOAT32, "update")
