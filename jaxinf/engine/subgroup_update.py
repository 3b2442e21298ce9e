"""The update of one subgroup with its states in memory.

Invariant: no result is returned or stored for params that differ from the store's.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from jaxinf.csd import Csd, CsdBuffer, Rounding, Update
from jaxinf.engine.chunks import ChunkTable
from jaxinf.engine.divergence import compare_chunk, diverged_error, same_values
from jaxinf.engine.subgroup_arrays import gather_gradient, gather_inputs, gather_run
from jaxinf.engine.subgroup_layout import SubgroupLayout
from jaxinf.engine.update_request import UpdateRequest
from jaxinf.engine.updaters import Updater
from jaxinf.layout import scatter, target_view
from jaxinf.program import Kernel
from jaxinf.store import StoreDirectory
from jaxinf.typing import Array


@dataclass(eq=False, slots=True)
class SubgroupUpdate:
    """The computation of one task of a step.

    Attributes:
      chunks: the checksums of the files.
      kernel: the update, for the request's scalars.
      given: the caller's params, if they are used instead of the stored ones.
      compared: the caller's params, if they are compared with the stored ones.
      is_probed: whether to compare the stored params with the request's probe.
      is_first: whether it is an update of the store's first step.
      inexact: a difference of the caller's params that does not count.
      is_whole: whether the chunk's file is unchanged since the last step.
      updater: what computes it in place of the CSD; None if the CSD does.
      is_finite: whether the gradient is finite; known after `run`.
    """

    directory: StoreDirectory
    chunks: ChunkTable
    request: UpdateRequest
    layout: SubgroupLayout
    kernel: Kernel
    rounding: Rounding
    given: Array | None
    compared: Array | None
    is_probed: bool
    is_first: bool
    inexact: float
    is_whole: bool
    updater: Updater | None = None
    is_finite: bool = True

    def run(
        self, csd: Csd, buffer: CsdBuffer, tells: Collection[int]
    ) -> Mapping[int, int]:
        """Updates the buffer, and writes the result to the request's `out`.

        Args:
          tells: states whose checksum as read is requested.

        Returns:
          These checksums.

        Raises:
          DivergedParamsError: the caller's params differ from the store's.
        """
        directory, layout, request = self.directory, self.layout, self.request
        origin = request.origin
        params = None
        if self.given is not None:
            params = gather_run(directory, layout, self.given, origin)
        elif self.compared is not None:
            compared = gather_run(directory, layout, self.compared, origin)
            self._compare(csd.view(buffer, layout.extents[0]), compared)
        elif self.is_probed:
            probe = request.probe
            self._compare(csd.view(buffer, layout.extents[0])[: probe.size], probe)
        chunk = directory.chunks[layout.subgroup.leaf][layout.subgroup.chunk]
        offset, num = layout.subgroup.offset_elements, layout.subgroup.num_elements
        out = None
        if request.out is not None:
            out = target_view(request.out, chunk, origin, offset, num)
        result = np.empty(num, request.out_dtype) if out is None else out
        update = Update(
            layout.kernel_extents,
            self.kernel,
            gather_gradient(directory, layout, request.gradient, origin),
            gather_inputs(directory, layout, request.inputs, origin),
            result,
            self.rounding,
            params,
            request.wants_params,
            tells,
        )
        if self.updater is None:
            outcome = csd.update(buffer, update)
        else:
            outcome = self.updater.update(
                csd, buffer, update, wants_out=request.out is not None
            )
        read_checksums = dict(outcome.read_checksums)
        if self.given is not None:
            self._check_given(self.given, read_checksums.pop(0))
        self.is_finite = outcome.is_finite
        self._keep_feedback(csd, buffer)
        if out is None and request.out is not None:
            scatter(request.out, chunk, origin, offset, result)
        return read_checksums

    def _keep_feedback(self, csd: Csd, buffer: CsdBuffer) -> None:
        layout, request = self.layout, self.request
        if request.feedback is not None:
            assert layout.feedback is not None
            left = gather_run(self.directory, layout, request.feedback, request.origin)
            csd.put(buffer, layout.extents[layout.feedback], left)

    def _compare(self, master: Array, given: Array) -> None:
        stored = master.astype(given.dtype, copy=False)
        bits = np.dtype(f"u{given.itemsize}")  # twice as fast as numbers
        places = np.flatnonzero(stored.view(bits) != given.view(bits))
        stored, given = stored[places], given[places]
        if not same_values(stored, given, bound=self.inexact):
            if self.is_whole:
                self.chunks.check_file(self.layout, 0)  # damage would explain it
            name = self.directory.manifest.leaves[self.request.leaf].name
            few = given[:3], stored[:3]
            raise diverged_error(name, *few, is_first=self.is_first)

    def _check_given(self, params: Array, checksum: int) -> None:
        """Checks that the given params equal those that the last step stored.

        Their checksum is from the pass of the update, whose results are not stored yet.
        """
        if not self.chunks.matches(self.layout, 0, checksum):
            origin = self.request.origin
            compare_chunk(
                self.directory,
                self.chunks,
                self.layout,
                params,
                origin,
                is_first=self.is_first,
            )
