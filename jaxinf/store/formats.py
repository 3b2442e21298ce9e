"""The codecs in which the states of a store are kept.

Invariant: a leaf with other codecs has the same float32 slots and the same grid.
"""

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

from msgspec import structs

from jaxinf.store.manifest import LeafRecord, Manifest, StateRecord
from jaxinf.store.names import ERROR_FEEDBACK, MASTER_PARAMS
from jaxinf.typing import AVERAGE

StateFormat: TypeAlias = Literal["fp32", "bf16", "int8"]
MasterFormat: TypeAlias = Literal["fp32", "split", "none"]

_CODEC_OF = {"fp32": "", "none": "bf16"}  # other formats are named as their codecs
_MIN_CODED_ELEMENTS = 4096
_NEVER_CODED = (ERROR_FEEDBACK, "acc_grads")  # sums, in which every bit counts


@dataclass(frozen=True)
class Formats:
    """The formats of a store's states; in a copy None keeps a format.

    Small leaves have float32 states and averages. The master of params that are
    bfloat16 on the JAX device may be ``"split"``, the params with 16-bit remainders, or
    ``"none"``, the params alone.
    """

    state: str | None = None  # of the optimizer's float32 states
    master: str | None = None
    average: str | None = None  # of the params' average


def apply_formats(leaf: LeafRecord, formats: Formats) -> LeafRecord:
    """Returns a leaf whose states have these formats, as far as they may."""
    is_small = math.prod(leaf.shape) < _MIN_CODED_ELEMENTS
    by_name = {MASTER_PARAMS: formats.master, AVERAGE: formats.average}
    stored: list[StateRecord] = []
    for old in leaf.states:
        if old.is_companion:
            continue
        wanted, state = by_name.get(old.name, formats.state), old.decoded()
        may_change = leaf.dtype == "bfloat16"
        if old.name != MASTER_PARAMS:
            is_plain = state.dtype != "float32" or state.name in _NEVER_CODED
            may_change = not (is_small or is_plain)
        codec = old.codec
        if wanted is not None:
            codec = _CODEC_OF.get(wanted, wanted) if may_change else ""
        stored += state.coded(codec)
    return structs.replace(leaf, states=tuple(stored))


def store_formats(manifest: Manifest) -> Formats:
    """Returns the formats of a store's leaves; None for an average that it lacks."""
    codecs = dict[str, str]()  # of the optimizer's states together by ""
    for state in [state for leaf in manifest.leaves for state in leaf.states]:
        name = state.name if state.name in (MASTER_PARAMS, AVERAGE) else ""
        if not state.is_companion:
            codecs[name] = codecs.get(name) or state.codec
    master = {"": "fp32", "bf16": "none"}.get(codecs.get(MASTER_PARAMS, ""), "split")
    average = (codecs[AVERAGE] or "fp32") if AVERAGE in codecs else None
    return Formats(codecs.get("") or "fp32", master, average)
