"""Computes a value again that a drive does not give back.

    lost ─► the call that made it ─► its inputs: in memory, on the drive, params
                                     or lost or dropped, too ─► the call that made them

Invariant: the value has its old bits, since the same program runs on the same inputs.
Memory is taken beside the plan's, for one segment at a time.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxinf.errors import StoreIOError
from jaxinf.streaming.move.values import Values
from jaxinf.streaming.plan.calls import Calls, Slot
from jaxinf.streaming.program.graph import Origin


def computed_again(
    slot: Slot,
    calls: Calls,
    executables: Sequence[Any],
    values: Values,
    read: Callable[[Origin], Any],
) -> jax.Array | None:
    """Returns a value, computed again; None if backward has made it. Blocks.

    Args:
      read: Returns an input of the whole program, such as a part of the params.

    Raises:
      StoreError: Params cannot be read.
    """
    made = calls.lives[slot].made
    call = calls.calls[made]
    if not call.program.name.startswith("forward"):
        return None
    inputs = []
    for ref in call.inputs:
        if not isinstance(ref, Slot):
            inputs.append(read(ref))
            continue
        value = _present(ref, values)
        if value is None:
            value = computed_again(ref, calls, executables, values, read)
        if value is None:
            return None
        inputs.append(value)
    for number in calls.donated[call.program.key]:  # the program takes their memory
        inputs[number] = jnp.array(inputs[number], copy=True)
    outputs = executables[made](*inputs)
    return jax.block_until_ready(outputs[call.outputs.index(slot)])


def _present(slot: Slot, values: Values) -> jax.Array | None:
    try:
        return values.look(slot)
    except StoreIOError:
        return None
