"""Every program of the zoo, cut: loss and gradients against one jit of the whole."""

import hashlib
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from families import family
from streaming_cases import (
    assert_same_bits,
    numbers,
    prepared,
    smallest_bytes,
    streamed,
)
from zoo import ZOO

from jaxinf.program import aval_bytes
from jaxinf.streaming.move.scratch import ScratchFiles
from jaxinf.streaming.move.spill import Spill, beyond_memory
from jaxinf.streaming.move.work_queues import WorkQueues
from jaxinf.streaming.plan.compiled import Executables
from jaxinf.streaming.plan.cut_to_fit import cut_to_fit
from jaxinf.streaming.plan.order import make_plan
from jaxinf.transfer import ByteMeters

pytestmark = pytest.mark.optimized("long")

# Programs that compute in 16 bits, where two programs round differently.
HALF = ("cast_first", "scan_twice_cast", "half_precision_loss")


def whole(program):
    vg = jax.jit(jax.value_and_grad(program.loss, has_aux=program.has_aux))
    value, gradients = vg(program.params, program.batch)
    loss, aux = value if program.has_aux else (value, ())
    return loss, aux, jax.tree.leaves(gradients)


def assert_close(found, expected, tolerance):
    """Compares gradients; the tolerance is relative to the largest of all leaves."""
    found = [x.astype(np.float64) for x in numbers(found)]
    expected = [x.astype(np.float64) for x in numbers(expected)]
    largest = max((np.abs(leaf).max(initial=0) for leaf in expected), default=0)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * largest)


@pytest.mark.parametrize(
    "name", family(ZOO, short=["custom_rules", "scan_remat_reverse"])
)
def test_gradients_are_those_of_one_jit(name, tmp_path):
    program = ZOO[name]()
    ready = prepared(program)
    budget_bytes = smallest_bytes(ready) * 3 // 2
    executables = Executables()
    plan = cut_to_fit(ready, budget_bytes)
    loss, aux, gradients = streamed(program, plan, executables)
    expected_loss, expected_aux, expected = whole(program)
    tolerance = 2e-2 if name in HALF else 1e-6
    assert_close(gradients, expected, tolerance)
    np.testing.assert_allclose(float(loss), float(expected_loss), rtol=tolerance)
    assert_close(aux, expected_aux, 1e-6)

    # With the same bits activations may be kept, and gradients be on a drive meanwhile.
    keeping = make_plan(ready, plan.cuts, "keep")
    found = ready.graph.gradients.items()
    sizes = {piece: max(1, aval_bytes(value.aval)) for piece, value in found}
    scratch = ScratchFiles([tmp_path], meters := ByteMeters())
    places = scratch.allocate(beyond_memory(sizes, 0))
    spill = Spill(WorkQueues(), scratch, places)
    again = streamed(program, keeping, executables, spill)
    assert_same_bits(again, (loss, aux, gradients))
    written_bytes = meters.snapshot().drive_write_bytes
    assert written_bytes >= sum(leaf.nbytes for leaf in gradients)
    scratch.close()


def digest(name, cuts=None):
    program = ZOO[name]()
    ready = prepared(program)
    if cuts is None:
        cuts = cut_to_fit(ready, smallest_bytes(ready) * 3 // 2).cuts
    found = numbers(streamed(program, make_plan(ready, cuts), Executables()))
    text = ready.fingerprint.encode() + b"".join(leaf.tobytes() for leaf in found)
    return cuts, hashlib.sha256(text).hexdigest()


SOME = ("l2_penalty", "scan_remat_reverse")


@pytest.mark.long
@pytest.mark.parametrize("names", [SOME, tuple(ZOO)], ids=len)
def test_a_plan_has_the_same_bits_in_another_process(names, run_python):
    done = run_python(Path(__file__), *names, PYTHONHASHSEED="7")
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line[0] for line in lines] == list(names)
    for name, text, *cuts in lines:
        assert digest(name, tuple(map(int, cuts)))[1] == text, name


if __name__ == "__main__":
    for name in sys.argv[1:]:
        cuts, text = digest(name)
        print(name, text, *cuts)
