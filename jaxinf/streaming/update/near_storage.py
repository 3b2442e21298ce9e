"""What updates near storage move on drives, of an optimizer and a store's chunks.

Invariant: it depends on the store's chunks alone, which need not be there.
"""

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from jaxinf.csd import is_idle
from jaxinf.engine import StoreShape, SubgroupLayout, can_take, moved_states
from jaxinf.errors import NonFiniteGradientError
from jaxinf.layout import Subgroup
from jaxinf.program import Passes, UpdateProgram
from jaxinf.store import MASTER_PARAMS
from jaxinf.streaming.plan.calls import Call
from jaxinf.streaming.plan.planned import Planned
from jaxinf.streaming.program.graph import Piece
from jaxinf.streaming.program.units import Unit

_PARAMS = 0  # the first of a leaf's states


@dataclass(frozen=True)
class Updates:
    """An optimizer, its passes over gradients, and the store's chunks."""

    program: UpdateProgram
    passes: Passes
    shape: StoreShape

    def layouts(self, unit: Unit) -> Sequence[SubgroupLayout]:
        return self.shape.layouts(unit.leaf, unit.origin, unit.extent)

    @property
    def are_deferred(self) -> bool:
        """Whether updates wait for the last gradient."""
        return self.passes.num_passes > 1 or self.shape.options.rewrites_steps


def takes_read(updates: Updates, unit: Unit) -> bool:
    """Whether a unit's update can take params that were read for a program."""
    if not unit.is_divided or updates.are_deferred:
        return False
    passes, leaf = updates.passes, unit.leaf
    if not can_take(updates.shape, leaf, unit.dtype):
        return False  # they are not what is stored
    part = passes.part(passes.num_passes - 1, leaf)
    if part is not None and passes.params[leaf] in part.own:
        return True
    kernel = updates.program.leaves[leaf].kernel
    loads = (moved_states(kernel, layout)[0] for layout in updates.layouts(unit))
    return any(_PARAMS in own for own in loads)


def _params_bytes(updates: Updates, unit: Unit) -> int:
    """Bytes of a unit's params on drives."""
    shape = updates.shape
    return sum(shape.file_bytes(one, [_PARAMS]) for one in updates.layouts(unit))


def bytes_to_gather(units: Iterable[Unit], *, waits: bool) -> int:
    """Memory to gather shards: one unit that is read, and one that is updated.

    Args:
      waits: Whether gradients wait, each as a whole.
    """
    apart = [unit for unit in units if unit.is_apart]
    undivided = [unit.whole_bytes for unit in apart if not unit.is_divided]
    updated = [unit.whole_bytes for unit in apart] if waits else undivided
    return max(undivided, default=0) + 2 * max(updated, default=0)


def step_bytes(
    updates: Updates, planned: Planned, units: Iterable[Unit]
) -> tuple[int, int]:
    """Returns bytes of params and state that a step reads and writes.

    Args:
      units: Those that have gradients.
    """
    reading = planned.reading
    read = sum(_params_bytes(updates, fetch.unit) for fetch in reading.repeated)
    written = 0
    given = {one.unit for one in reading.fetches if one.gradient is not None}
    there = _staying(updates, units, planned.store_bytes)
    for unit in units:
        own = _moved_bytes(updates, unit, there, has_params=unit in given)
        read, written = read + own[0], written + own[1]
    return read, written


def _staying(
    updates: Updates, units: Iterable[Unit], store_bytes: int
) -> frozenset[Subgroup]:
    """Returns what stays in the memory that the store has while steps run."""
    moved = {
        layout.subgroup
        for unit in units
        for layout in updates.layouts(unit)
        if any(moved_states(updates.program.leaves[unit.leaf].kernel, layout))
    }
    return updates.shape.staying(store_bytes, moved)


def _moved_bytes(
    updates: Updates, unit: Unit, there: frozenset[Subgroup], *, has_params: bool
) -> tuple[int, int]:
    """Returns bytes of state that a unit's update reads and writes.

    Args:
      there: What stays in memory.
      has_params: Whether it takes params that are in memory.
    """
    shape, kernel = updates.shape, updates.program.leaves[unit.leaf].kernel
    names = _read_by_passes(updates, unit, has_params=has_params)
    every = shape.options.steps_per_commit or math.inf
    read, written = 0, 0.0
    for layout in updates.layouts(unit):
        loads, stores = moved_states(kernel, layout)
        if layout.subgroup not in there:
            loads -= {_PARAMS} if has_params else set()
            read += shape.file_bytes(layout, loads)
            read += shape.file_bytes(layout, map(layout.slots.index, names))
            written += shape.file_bytes(layout, stores)
            continue
        if MASTER_PARAMS in names:  # they are read as programs read params
            read += shape.file_bytes(layout, [_PARAMS])
        for state in stores:
            by_commits = shape.options.rewrites_steps and state != _PARAMS
            num_bytes = shape.file_bytes(layout, [state])
            written += num_bytes / every if by_commits else num_bytes
    return read, round(written)


def _read_by_passes(updates: Updates, unit: Unit, *, has_params: bool) -> list[str]:
    """Returns the states that passes over a unit's gradient read, each time."""
    passes, found = updates.passes, list[str]()
    for number in range(passes.num_passes):
        part = passes.part(number, unit.leaf)
        own = () if part is None else part.own
        found += [passes.recalled[v][1].name for v in own if v in passes.recalled]
        if passes.params[unit.leaf] in own and not has_params:
            found.append(MASTER_PARAMS)
    return found


def idle_leaves(program: UpdateProgram, passes: Passes) -> frozenset[int]:
    """Returns the leaves that stay as they are, whose gradients need not wait."""

    def is_read(leaf: int) -> bool:
        first = min(1, passes.num_passes - 1)
        later = range(first, passes.num_passes)
        return any(passes.part(number, leaf) is not None for number in later)

    leaves = enumerate(program.leaves)
    return frozenset(n for n, x in leaves if is_idle(x.kernel) and not is_read(n))


def deferred_bytes(
    calls: Iterable[Call], whole: Container[int], sizes: Mapping[Piece, int]
) -> Mapping[Piece, int]:
    """Returns the bytes of gradients that wait for the last one, in their order.

    Args:
      whole: Leaves that the passes need as a whole, whose parts wait together.
    """
    found: dict[Piece, int] = {}
    for call in calls:
        for piece, _ in call.gradients:
            key = Piece(piece.leaf) if piece.leaf in whole else piece
            found[key] = found.pop(key, 0) + sizes[piece]
    return found


def non_finite(step: int, bad: Sequence[str]) -> NonFiniteGradientError:
    names = list(dict.fromkeys(bad))
    more = f" and {len(names) - 5} more leaves" if len(names) > 5 else ""
    return NonFiniteGradientError(
        f"step {step + 1}: NaN or Inf in the gradient of "
        f"{', '.join(names[:5])}{more}; the step was refused, the store stays at "
        f"step {step}. Lower the learning rate or clip the gradients, or "
        'pass nonfinite="skip" to go on without such steps, as with a loss scale'
    )
