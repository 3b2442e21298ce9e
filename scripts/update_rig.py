"""Updates a store step by step from the caller's NumPy arrays, for benchmarks.

Invariant: it makes the same calls of the engine as `smart_update`'s callbacks, with the
optimizer's own prologue, but without a model. The new params are in the caller's arrays
when a step returns.
"""

import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from floor import Piece, Transfer

import jaxinf
from jaxinf.compress import SparseLeaf
from jaxinf.csd import ScalarInputs
from jaxinf.engine import (
    FirstParams,
    LeafDescription,
    StoreDescription,
    SubgroupLayout,
    UpdateRequest,
)
from jaxinf.optimizer.leaf_call import LeafCall, grouped
from jaxinf.program import Average, averaged, trace_init, trace_update
from jaxinf.store import (
    MASTER_PARAMS,
    ScalarState,
    Slot,
    StateRecord,
    dtype_of,
    encode_path,
)
from jaxinf.transfer import PAGE_BYTES
from jaxinf.typing import Array

LEAF_ELEMENTS = 1 << 24
FLOAT32 = np.dtype(np.float32)
_NO_PROBE = np.zeros(0, np.float32)


class UpdateRig:
    """A new store of `num_params` params, updated by adamw.

    Args:
      path: the store's directory.
      num_params: number of params over all leaves.
      num_leaves: number of leaves; None for leaves of 16 Mi elements.
      dtype: dtype of params and gradients: float32 or bfloat16.
      average: the average of the params that is kept, too.
      options: options of `jaxinf.open_store`.
    """

    def __init__(
        self,
        path: Path,
        num_params: int,
        num_leaves: int | None = None,
        *,
        dtype: np.dtype = FLOAT32,
        average: Average | None = None,
        **options: Any,
    ) -> None:
        count = num_leaves or -(-num_params // LEAF_ELEMENTS)
        bounds = [num_params * i // count for i in range(count + 1)]
        shapes = [stop - start for start, stop in itertools.pairwise(bounds)]
        avals = {
            f"leaf{n:05}": jax.ShapeDtypeStruct((size,), dtype)
            for n, size in enumerate(shapes)
        }
        tx = averaged(optax.adamw(1e-3), average)
        self._average = "" if average is None else average._codec
        self._program = trace_update(tx, avals, {})
        self._init = trace_init(tx, avals)
        self._description = self._describe()
        self.params = [np.full(size, 0.5, dtype) for size in shapes]
        self._next_params = [np.zeros(size, dtype) for size in shapes]
        self.gradients: list[Array | SparseLeaf] = [
            np.full(size, 1e-3, dtype) for size in shapes
        ]
        self.store = jaxinf.open_store(path, **options)
        self._scalar_state = [
            np.zeros(s.value.shape, s.value.dtype) for s in self._create()
        ]
        stored = self.store._manifest.leaves[0].states[0]
        takes_params = self.store._engine.opened.options.csd.takes_params
        self._takes_params = takes_params and dtype_of(stored.dtype) == dtype
        self.step_number = 0
        self._groups = grouped(
            [LeafCall(n, (size,), None) for n, size in enumerate(shapes)]
        )
        self._scalar_places: list[list[int]] = []
        self._prologue = jax.jit(self._run_prologue)

    @property
    def caller_bytes(self) -> int:
        """Bytes of gradients, params, and the new params that a step fills."""
        arrays = [*self.gradients, *self.params, *self._next_params]
        return sum(array.nbytes for array in arrays)

    def _describe(self) -> StoreDescription:
        leaves = [
            LeafDescription(
                path=update.info.path,
                shape=update.info.shape,
                dtype=update.info.dtype.name,
                states=(
                    StateRecord(MASTER_PARAMS, "float32"),
                    *(StateRecord(s.name, s.dtype.name) for s in update.slots),
                ),
                kernel=update.kernel,
                init_kernel=first.kernel,
                shard_counts=(1,),
            )
            for update, first in zip(
                self._program.leaves, self._init.leaves, strict=True
            )
        ]
        paths = tuple(map(encode_path, self._init.layout.scalar_keys))
        return StoreDescription(tuple(leaves), paths, self._average)

    def _create(self) -> list[ScalarState]:
        engine = self.store._engine
        engine.bind(self._description, may_create=True)
        for number, params in enumerate(self.params):
            given = FirstParams(number, params, (0,), ScalarInputs())
            engine.initialise(self._description, [given])
        layout = self._init.layout
        named = [
            ScalarState.of(path, np.zeros((), layout.avals[index].dtype))
            for path, index in zip(
                self._description.scalar_paths, layout.scalar_indices, strict=True
            )
        ]
        engine.finish_initialisation(named)
        return named

    def _run_prologue(self, scalars: list[jax.Array]) -> Any:
        """Computes the new scalar state and the kernels' scalars; equal ones once."""
        zeros = [jnp.zeros(leaf.shape, leaf.dtype) for leaf in self.params]
        new, inputs = self._program.prologue(zeros, zeros, scalars, {})
        unique = {id(scalar): scalar for own in inputs for scalar in own.scalars}
        places = {key: place for place, key in enumerate(unique)}
        self._scalar_places = [[places[id(s)] for s in own.scalars] for own in inputs]
        return new, list(unique.values())

    def step(self) -> None:
        """Updates every leaf once; the commit may still be in flight at the end."""
        new, scalars = self._prologue(self._scalar_state)
        inputs = self._inputs(scalars)
        for group in self._groups:
            requests = [self._request(number, inputs[number]) for number in group]
            self.store._engine.opened.update(self.step_number, *requests)
        self._scalar_state = [np.asarray(value) for value in new]
        named = [
            ScalarState.of(path, value)
            for path, value in zip(
                self._description.scalar_paths, self._scalar_state, strict=True
            )
        ]
        self.store._engine.opened.finish(self.step_number, named, 0)
        self.step_number += 1
        for params, out in zip(self.params, self._next_params, strict=True):
            if out.dtype == np.float32:  # an update, which JAX adds beside the commit
                np.add(params, out, out=out)
        self.params, self._next_params = self._next_params, self.params

    def _request(self, number: int, inputs: ScalarInputs) -> UpdateRequest:
        return UpdateRequest(
            leaf=number,
            kernel=self._description.leaves[number].kernel,
            origin=(0,),
            gradient=self.gradients[number],
            inputs=inputs,
            out=self._next_params[number],
            probe=_NO_PROBE,
            params=self.params[number] if self._takes_params else None,
        )

    def _inputs(self, scalars: list[jax.Array]) -> list[ScalarInputs]:
        """Returns the inputs of each leaf's kernel."""
        values = [np.asarray(scalar) for scalar in scalars]
        return [
            ScalarInputs(tuple([values[place] for place in places]))
            for places in self._scalar_places
        ]

    def transfers(self) -> list[Transfer]:
        """Returns the transfers of the next step, in order; nothing may be running.

        State that stays in memory is not read.
        """
        opened = self.store._engine.opened
        kept = opened.staying(opened.memory_bytes)
        return [
            self._transfer(layout, is_kept=layout.subgroup in kept)
            for number, params in enumerate(self.params)
            for layout in opened.layouts(number, (0,), params.shape)
        ]

    def _transfer(self, layout: SubgroupLayout, *, is_kept: bool) -> Transfer:
        opened = self.store._engine.opened
        states = range(len(layout.states))

        def piece(state: int, slot: Slot) -> Piece:
            extent = layout.extents[state]
            return Piece(
                opened.directory.chunk_file(slot, *layout.place(state)),
                extent.file_offset_bytes,
                -(-extent.num_bytes // PAGE_BYTES) * PAGE_BYTES,
            )

        return Transfer(
            reads=tuple(
                piece(state, opened.chunks.source(layout, state))
                for state in states
                if not is_kept and (state > 0 or not self._takes_params)
            ),
            writes=tuple(piece(state, opened.chunks.target) for state in states),
        )

    def close(self) -> None:
        """Closes the store."""
        self.store.close()
