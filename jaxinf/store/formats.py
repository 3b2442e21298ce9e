"""The formats of a store's arrays: its codecs, and a manifest with others.

Invariant: a leaf with other codecs has the same slots; only an average comes or goes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np
from msgspec import structs

from jaxinf.store.commit import CommitRecord, ScalarState
from jaxinf.store.manifest import (
    CODECS,
    MASTER_CODECS,
    LeafRecord,
    Manifest,
    StateRecord,
)
from jaxinf.store.names import ERROR_FEEDBACK, MASTER_PARAMS, encode_path
from jaxinf.typing import AVERAGE, AVERAGE_SCALARS

StateFormat: TypeAlias = Literal["fp32", "bf16", "int8"]
MasterFormat: TypeAlias = Literal["fp32", "split", "none"]
AverageChoice: TypeAlias = Literal["fp32", "bf16", "none"]

_CODEC_OF = {"fp32": "", "none": "bf16"}  # others are codecs themselves
_MIN_CODED_ELEMENTS = 4096
_NEVER_CODED = (ERROR_FEEDBACK, "acc_grads")  # sums, in which every bit counts


@dataclass(frozen=True)
class Codecs:
    """The codecs of a store; empty for none.

    Attributes:
      state: of the optimizer's float32 state, except in small leaves.
      master: of the master params of leaves that are bfloat16 on the JAX device.
      average: of the params' average, except in small leaves.
    """

    state: str = ""
    master: str = ""
    average: str = ""

    def of(self, state: StateRecord) -> str:
        """Returns the codec of a state that may be coded."""
        if state.name == MASTER_PARAMS:
            return self.master
        return self.average if state.name == AVERAGE else self.state


@dataclass(frozen=True)
class Formats:
    """The formats of a copy's state; those that are None stay.

    Attributes:
      state: of the optimizer's float32 state.
      master: of the master of params that are bfloat16 on the JAX device: ``"split"``,
        the params with 16-bit remainders; ``"none"``, the params alone.
      average: of the params' average, which begins as the master params if there is
        none; ``"none"`` drops it.
    """

    state: StateFormat | None = None
    master: MasterFormat | None = None
    average: AverageChoice | None = None

    def of(self, held: Manifest, where: str) -> Manifest:
        """Returns a manifest with these formats, whose places are as before.

        Raises:
          ValueError: no leaf is bfloat16, or there is no average to drop.
        """
        if self == AS_IT_IS:
            return held
        has_average = AVERAGE in held.state_names
        if self.average == "none" and not has_average:
            raise ValueError(
                f"{where}: average='none': expected a store with an average of the "
                "params, found none; leave it out"
            )
        if self.master and all(leaf.dtype != "bfloat16" for leaf in held.leaves):
            raise ValueError(
                f"{where}: master={self.master!r}: expected params that are "
                "bfloat16 on the JAX device, found none; their master has one "
                "form: leave it out"
            )
        if self.average is not None:
            has_average = self.average != "none"
        asked = {name: form for name, form in vars(self).items() if form is not None}
        changes = {name: _CODEC_OF.get(form, form) for name, form in asked.items()}
        codecs, leaves = replace(store_codecs(held), **changes), []
        for leaf in held.leaves:
            states = [state for state in leaf.slots if state.name != AVERAGE]
            if has_average:  # behind the states of the optimizer
                place = sum(state.name != ERROR_FEEDBACK for state in states)
                states.insert(place, StateRecord(AVERAGE, "float32"))
            plain = structs.replace(leaf, states=tuple(states))
            leaves.append(coded_leaf(plain, codecs))
        return structs.replace(held, leaves=tuple(leaves))


AS_IT_IS = Formats()


def scalars_of(
    record: CommitRecord, held: Manifest, manifest: Manifest
) -> Sequence[ScalarState]:
    """Returns the scalar state of a step in other formats: an average's comes last."""
    if (AVERAGE in held.state_names) == (AVERAGE in manifest.state_names):
        return record.scalar_state
    own = {encode_path((("field", name),)): kind(0) for name, kind in AVERAGE_SCALARS}
    kept = [scalar for scalar in record.scalar_state if scalar.path not in own]
    if AVERAGE not in manifest.state_names:
        return kept
    return [*kept, *(ScalarState(path, np.array(zero)) for path, zero in own.items())]


def coded_leaf(leaf: LeafRecord, codecs: Codecs) -> LeafRecord:
    """Returns a leaf with these codecs in place of its present ones."""
    is_small = np.prod(leaf.shape, dtype=np.int64) < _MIN_CODED_ELEMENTS
    stored: list[StateRecord] = []
    for state in leaf.slots:
        codec = codecs.of(state)
        if state.name == MASTER_PARAMS:
            is_plain = leaf.dtype != "bfloat16"
        else:
            may_be_coded = state.dtype == "float32" and state.name not in _NEVER_CODED
            is_plain = is_small or not may_be_coded
        stored += state.coded(codec) if codec and not is_plain else (state,)
    return structs.replace(leaf, states=tuple(stored))


def store_codecs(held: Manifest) -> Codecs:
    """Returns the codecs that a store's leaves have."""
    masters = {leaf.states[0].codec for leaf in held.leaves}
    others = [state for leaf in held.leaves for state in leaf.states[1:]]
    states = {state.codec for state in others if state.name != AVERAGE}
    averages = {state.codec for state in others if state.name == AVERAGE}
    return Codecs(
        next((codec for codec in CODECS if codec in states), ""),
        next((codec for codec in MASTER_CODECS if codec in masters), ""),
        "bf16" if "bf16" in averages else "",
    )
