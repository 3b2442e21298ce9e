"""What one call brings for an update, as tasks of the transfer handler.

Invariant: a task reads only the newest version of a state, and writes only the slot
that the step builds; nothing is stored of params that are not the store's.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from jaxinf.compress import SparseLeaf
from jaxinf.csd import Csd, CsdBuffer, ScalarInputs
from jaxinf.engine.opened import OpenStore
from jaxinf.engine.pipeline import Task
from jaxinf.engine.state import (
    compare_chunk,
    diverged_error,
    gather_gradient,
    gather_inputs,
    gather_run,
    rounding_of,
    same_values,
)
from jaxinf.engine.subgroup_layout import SubgroupLayout
from jaxinf.kernels.specialise import specialise, state_read
from jaxinf.layout import scatter, target_view
from jaxinf.program import Kernel
from jaxinf.store import ERROR_FEEDBACK, dtype_of
from jaxinf.typing import Array

__all__ = ["LeafPart", "PartTasks"]


@dataclass(frozen=True)
class LeafPart:
    """What one call brings for an update: a leaf, or a JAX device's shard of it.

    Attributes:
      leaf: its number.
      kernel: the update.
      origin: index in the leaf of the arrays' first element.
      gradient: 16 or 32 bits, or what a compression sends of it; only read.
      inputs: scalars, and arrays of the gradient's shape.
      out: of the gradient's shape; float32 receives the update, 16 bits the new params,
        rounded to nearest even, or as the store rounds them (docs/format.md, "Codecs").
      probe: the first few params on the JAX device, or empty: compared with the master.
      params: params on the JAX device, of the gradient's shape. Where they are what
        the store has as `params` to the bit, they are taken instead of reading those.
        None where they are not at hand.
      wants_params: float32 `out` receives the new params, not the update.
      feedback: float32 of the gradient's shape, the error feedback after this step;
        None where it stays as it is.
    """

    leaf: int
    kernel: Kernel
    origin: tuple[int, ...]
    gradient: Array | SparseLeaf
    inputs: ScalarInputs
    out: Array
    probe: Array
    params: Array | None = None
    wants_params: bool = False
    feedback: Array | None = None

    @property
    def link_bytes(self) -> int:
        """Bytes that the gradient takes on the link, error feedback included."""
        feedback = 0 if self.feedback is None else self.feedback.nbytes
        return self.gradient.nbytes + feedback


class PartTasks:
    """Makes the tasks of a store's steps."""

    def __init__(self, opened: OpenStore) -> None:
        self._opened = opened

    def task(
        self,
        part: LeafPart,
        layout: SubgroupLayout,
        step: int,
        verdicts: list[bool],
        *,
        is_exact: bool,
    ) -> Task:
        """The update of one subgroup.

        Args:
          part: what came.
          layout: a subgroup of it.
          step: that the update leads to.
          verdicts: receives whether the gradient is finite.
          is_exact: whether the caller's 16-bit params should be the store's to the bit.

        The task raises DivergedParamsError: the caller's params are not the store's.
        """
        opened = self._opened
        kernel = specialise(part.kernel, part.inputs.scalars)
        chunk = opened.directory.chunks[part.leaf][layout.subgroup.chunk]
        offset = layout.subgroup.offset_elements
        is_first = offset == 0 and chunk.start == part.origin
        is_probed = is_first and part.probe.size and is_exact

        rounding = rounding_of(layout, step)
        loads, stores = _moved(kernel, layout.slots, part.feedback is not None)
        if part.out.dtype != np.float32:  # which comes of the params, moved or not
            loads |= {0}
        # Over a step that is not committed a chunk's parts are overwritten one by one:
        # when the whole could be compared, it is not there any more.
        is_part = layout.subgroup.num_elements < chunk.num_elements
        is_overwritten = is_part and opened.num_uncommitted > 0
        given = None
        if 0 in loads and not is_overwritten and is_exact:
            given = self.given(part)
        if given is not None:
            loads -= {0}

        def compute(csd: Csd, buffer: CsdBuffer) -> Mapping[int, int]:
            params = None
            if given is not None:
                params = gather_run(opened, layout, given, part.origin)
            elif is_probed and 0 in loads:
                master = csd.view(buffer, layout.extents[0])
                self._check_probe(part, layout, master, is_whole=not is_overwritten)
            gradient = gather_gradient(opened, layout, part.gradient, part.origin)
            own = gather_inputs(opened, layout, part.inputs, part.origin)
            num = layout.subgroup.num_elements
            out = target_view(part.out, chunk, part.origin, offset, num)
            result = np.empty(num, part.out.dtype) if out is None else out
            outcome = csd.update(
                buffer,
                layout.kernel_extents,
                kernel,
                gradient,
                own,
                result,
                rounding,
                given=params,
                wants_params=part.wants_params,
            )
            read_checksums = dict(outcome.read_checksums)
            if given is not None:
                self._check_given(part, layout, read_checksums.pop(0))
            verdicts.append(outcome.is_finite)
            if part.feedback is not None:
                assert layout.feedback is not None
                left = gather_run(opened, layout, part.feedback, part.origin)
                csd.view(buffer, layout.extents[layout.feedback])[...] = left
            if out is None:
                scatter(part.out, chunk, part.origin, offset, result)
            return read_checksums

        return Task(
            layout,
            compute,
            loads=opened.chunks.sources(layout, sorted(loads)),
            stores=stores,
            runs_kernel=True,
        )

    def given(self, part: LeafPart) -> Array | None:
        """The caller's params, where they are what the store has, and are wanted."""
        opened = self._opened
        stored = opened.directory.manifest.leaves[part.leaf].states[0]
        if part.params is None or not opened.options.csd.takes_params:
            return None
        return part.params if part.params.dtype == dtype_of(stored.dtype) else None

    def _check_probe(
        self, part: LeafPart, layout: SubgroupLayout, master: Array, *, is_whole: bool
    ) -> None:
        held = master[: part.probe.size].astype(part.probe.dtype)
        if not same_values(held, part.probe):
            if is_whole:
                self._opened.chunks.check_file(layout, 0)  # or the drive is to blame
            name = self._opened.directory.manifest.leaves[part.leaf].name
            raise diverged_error(name, part.probe[:3], held[:3])

    def _check_given(
        self, part: LeafPart, layout: SubgroupLayout, checksum: int
    ) -> None:
        """The params that were given must be what the last step left in the store.

        Their checksum comes of the update's own pass; nothing of that is stored yet.
        """
        if not self._opened.chunks.matches(layout, 0, checksum):
            assert part.params is not None
            compare_chunk(self._opened, layout, part.params, part.origin)


@lru_cache
def _moved(
    kernel: Kernel, slots: tuple[str, ...], has_feedback: bool
) -> tuple[frozenset[int], tuple[int, ...]]:
    """The states that a kernel's update reads, and those that it leaves changed."""
    needed, unchanged = state_read(kernel), kernel.unchanged
    if not has_feedback:
        unchanged |= {ERROR_FEEDBACK}
    return (
        frozenset(n for n, slot in enumerate(slots) if slot in needed),
        tuple(n for n, slot in enumerate(slots) if slot not in unchanged),
    )
