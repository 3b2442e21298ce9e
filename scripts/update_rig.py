"""Updates a store step by step from the caller's NumPy arrays, for benchmarks.

Invariant: it makes the same calls of the engine as `smart_update`'s callbacks, with the
optimizer's own prologue, but without a model. The new params are in the caller's arrays
when a step returns.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from floor import Piece, Transfer

import jaxinf
from jaxinf.compress import SparseLeaf
from jaxinf.engine import SubgroupLayout, UpdateRequest, engine_of
from jaxinf.optimizer.leaf_call import LeafCall, group_leaves
from jaxinf.program import LeafInputs, trace_init, trace_update
from jaxinf.store import ScalarState, Slot, dtype_of, encode_path
from jaxinf.transfer import page_ceil
from jaxinf.typing import Array

LEAF_ELEMENTS = 1 << 24
_NO_PROBE = np.zeros(0, np.float32)


class UpdateRig:
    """A new store of `num_params` params, updated by adamw.

    Args:
      path: the store's directory.
      num_params: number of params over all leaves.
      num_leaves: number of leaves; None for leaves of 16 Mi elements.
      options: options of `jaxinf.open_store`.
    """

    def __init__(
        self,
        path: Path,
        num_params: int,
        num_leaves: int | None = None,
        **options: Any,
    ) -> None:
        count = num_leaves or -(-num_params // LEAF_ELEMENTS)
        ends = [num_params * i // count for i in range(count + 1)]
        self.params = [np.full(size, 0.5, np.float32) for size in np.diff(ends)]
        self.store = jaxinf.open_store(path, **options)
        self.engine = engine_of(self.store)
        named = {f"leaf{n:05}": leaf for n, leaf in enumerate(self.params)}
        tx = optax.adamw(1e-3)
        jaxinf.smart_update(tx, self.store).init(named)
        self._program, layout = trace_update(tx, named), trace_init(tx, named).layout
        self._paths = [encode_path(keys) for keys in layout.scalar_keys]
        first = [layout.avals[index] for index in layout.scalar_indices]
        self._scalar_state = [np.zeros(aval.shape, aval.dtype) for aval in first]
        self._next_params = [np.zeros_like(leaf) for leaf in self.params]
        self.gradients: list[Array | SparseLeaf] = [
            np.full_like(leaf, 1e-3) for leaf in self.params
        ]
        stored = self.engine.directory.manifest.leaves[0].states[0]
        takes_params = not self.engine.options.csd.has_cards
        self._takes_params = takes_params and dtype_of(stored.dtype) == np.float32
        self.step_number = 0
        self._groups = group_leaves(
            [LeafCall(n, leaf.shape, None) for n, leaf in enumerate(self.params)]
        )
        self._prologue = jax.jit(self._run_prologue)

    @property
    def caller_bytes(self) -> int:
        """Bytes of gradients, params, and the new params that a step fills."""
        arrays = [*self.gradients, *self.params, *self._next_params]
        return sum(array.nbytes for array in arrays)

    def _run_prologue(self, scalars: list[jax.Array]) -> Any:
        zeros = [jnp.zeros(leaf.shape, leaf.dtype) for leaf in self.params]
        new, inputs = self._program.prologue(zeros, zeros, scalars, {})
        return new, [own.scalars for own in inputs]

    def step(self) -> None:
        """Updates every leaf once; the commit may still be in flight at the end."""
        steps = self.engine.steps
        new, inputs = jax.device_get(self._prologue(self._scalar_state))
        for group in self._groups:
            requests = [self._request(number, inputs[number]) for number in group]
            steps.update(self.step_number, *requests)
        self._scalar_state = new
        named = map(ScalarState.of, self._paths, new)
        steps.finish(self.step_number, [*named], 0)
        self.step_number += 1
        for params, out in zip(self.params, self._next_params, strict=True):
            np.add(params, out, out=out)  # as JAX does beside the commit
        self.params, self._next_params = self._next_params, self.params

    def _request(self, number: int, scalars: tuple[Array, ...]) -> UpdateRequest:
        return UpdateRequest(
            leaf=number,
            kernel=self._program.leaves[number].kernel,
            origin=(0,),
            gradient=self.gradients[number],
            inputs=LeafInputs(scalars),
            out=self._next_params[number],
            probe=_NO_PROBE,
            params=self.params[number] if self._takes_params else None,
        )

    def transfers(self) -> list[Transfer]:
        """Returns the transfers of the next step, in order; nothing may be running.

        State that stays in memory is not read.
        """
        files = self.engine.files
        kept = files.subgroups.choose_cached(files.memory_bytes)
        return [
            self._transfer(layout, is_kept=layout.subgroup in kept)
            for number, params in enumerate(self.params)
            for layout in files.subgroups.layouts(number, (0,), params.shape)
        ]

    def _transfer(self, layout: SubgroupLayout, *, is_kept: bool) -> Transfer:
        files = self.engine.files
        states = range(len(layout.state_names))

        def piece(state: int, slot: Slot) -> Piece:
            extent = layout.extents[state]
            return Piece(
                files.directory.chunk_path(slot, layout.file(state)),
                extent.file_offset_bytes,
                page_ceil(extent.num_bytes),
            )

        return Transfer(
            reads=tuple(
                piece(state, files.chunks.newest_slot(layout.entries[state]))
                for state in states
                if not is_kept and (state > 0 or not self._takes_params)
            ),
            writes=tuple(piece(state, files.chunks.target) for state in states),
        )

    def close(self) -> None:
        self.store.close()
