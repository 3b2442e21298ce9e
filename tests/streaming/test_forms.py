"""Values in fewer bits on the drive: losses to the bit, gradients nearly, traffic."""

import numpy as np
import optax
import pytest
from streaming import (
    FORM_LIMITS,
    assert_same_bits,
    prepared,
    relative_error,
    smallest_bytes,
    streamed,
)
from zoo import ZOO

import jaxinf
from jaxinf.streaming.move.scratch import Scratch
from jaxinf.streaming.move.values import Values
from jaxinf.streaming.plan import offload
from jaxinf.streaming.plan.plan import Plan

pytestmark = pytest.mark.optimized("long")


@pytest.fixture(autouse=True)
def small_values_leave(monkeypatch):
    monkeypatch.setattr(offload, "SMALL_BYTES", 1)


def planned(program, form):
    """Plans of one program: with all values in memory, and with all that can away."""
    ready = prepared(program)
    cuts = ready.plan(smallest_bytes(ready) * 3 // 2).cuts
    keep, offload = (ready.plan_of(cuts, policy) for policy in ("keep", "offload"))
    # Whatever temporaries take, there is no room for any value.
    return keep, offload.fitted(0, offload.calls.temp_bytes, form)


LONG = (
    "gpt2_nano",
    "linen",
    "gpt2_bfloat16",
    "u_net",
    "conv_batch_norm",
    "linen_dropout",
)


@pytest.mark.parametrize("form", FORM_LIMITS)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[pytest.mark.long] if n in LONG else [])
        for n in ("l2_penalty", "haiku", *LONG)
    ],
)
def test_losses_keep_their_bits_and_gradients_are_near(name, form, tmp_path):
    program = ZOO[name]()
    keep, plan = planned(program, form)
    executables = {}
    loss, aux, gradients = streamed(program, keep, executables)
    values = Values(plan.calls, Scratch([tmp_path]))
    first = streamed(program, plan, executables, values=values)
    assert_same_bits(first[:2], (loss, aux))
    assert_same_bits(streamed(program, plan, executables, values=values), first)
    assert relative_error(first[2], gradients) < FORM_LIMITS[form]
    is_coded = [
        plan.calls.coding(slot, one.needed) is not None
        for slot, one in plan.calls.evictions.items()
    ]
    if any(is_coded):
        assert relative_error(first[2], gradients) > 0
    assert any(is_coded) or (name, form) == ("gpt2_bfloat16", "bf16")
    values.close()


def test_what_forward_reads_again_is_exact():
    _, plan = planned(ZOO["u_net"](), "int8")
    calls = plan.calls
    num_forward = sum(call.is_forward for call in calls.calls)
    forward = {
        slot: one for slot, one in calls.evictions.items() if one.needed < num_forward
    }
    assert forward, "a skip connection waits on the drive"
    for slot, one in forward.items():
        assert calls.coding(slot, one.needed) is None
        assert calls.stored_bytes(slot, one.needed) >= calls.lives[slot].num_bytes


@pytest.mark.long
def test_a_plan_counts_the_bytes_on_the_drive(tmp_path):
    program = ZOO["gpt2_nano"]()
    written = {}
    for form in (None, "bf16", "int8"):
        _, plan = planned(program, form)
        calls = plan.calls
        values = Values(calls, Scratch([tmp_path]))
        written[form] = values.num_bytes
        stored = [
            calls.stored_bytes(s, one.needed) for s, one in calls.evictions.items()
        ]
        assert values.num_bytes == sum(stored)
        values.close()
    assert written["int8"] < written["bf16"] < written[None]


@pytest.fixture
def everything_leaves(monkeypatch):
    real = Plan.fitted
    monkeypatch.setattr(
        Plan, "fitted", lambda self, _, temps, form=None: real(self, 0, temps, form)
    )


def trained(make, program, num_steps=3, **options):
    step = make(policy="offload", **options)
    step.load(program.params, batch=program.batch)
    losses = [float(step(program.batch)[0]) for _ in range(num_steps)]
    traffic = step.traffic
    step.close()
    return losses, traffic


@pytest.mark.parametrize("with_store", [True, False])
def test_a_step_takes_a_form(open_store, place, everything_leaves, with_store):
    program, tx = ZOO["l2_penalty"](), optax.sgd(1e-2)
    stores = iter("abc")

    def make(**options):
        if with_store:
            store = open_store(next(stores), chunk_elements=4096, memory_bytes=16 << 20)
            return jaxinf.stream(
                program.loss, tx, store, memory_bytes=256 << 20, **options
            )
        return jaxinf.stream_in_memory(
            program.loss,
            tx,
            memory_bytes=256 << 20,
            scratch=place,
            **options,
        )

    exact, most = trained(make, program)
    coded, least = trained(make, program, activations="int8")
    assert trained(make, program, activations="int8")[0] == coded
    assert coded[0] == exact[0]
    assert coded[1] != exact[1]
    np.testing.assert_allclose(coded, exact, rtol=0.01)
    assert least.drive_write_bytes <= most.drive_write_bytes


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"activations": "fp8", "policy": "offload"},
            "'fp8': expected 'bf16' or 'int8'",
        ),
        ({"activations": "bf16"}, 'no value leaves with policy="recompute"'),
        ({"activations": "int8", "policy": "keep"}, 'policy="keep"; leave it out, or'),
    ],
)
def test_refusals(place, options, text):
    options = {"tx": optax.sgd(0.1), "store": place / "store", **options}
    with pytest.raises(ValueError, match=text):
        jaxinf.stream(lambda p, b: p, memory_bytes=1 << 20, **options)
    assert not (place / "store").exists()
