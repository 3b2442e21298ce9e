"""Plans a step of a store within budgets; makes and writes nothing.

Invariant: what is planned takes no more than the budgets, and depends on the store's
chunks alone, so a step can be planned before its store is made.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import optax
from jax.sharding import Mesh

from jaxinf.engine import Store, StoreShape
from jaxinf.program import Passes, UpdateProgram
from jaxinf.streaming.fit import Fitted, fit
from jaxinf.streaming.move.workers import writing_bytes
from jaxinf.streaming.options import Options
from jaxinf.streaming.plan.calls import Call
from jaxinf.streaming.plan.device import check_pinned, device_limit, mesh_limit
from jaxinf.streaming.plan.memory import DeviceLimit, Division, divide
from jaxinf.streaming.plan.plan import Plan, Prepared
from jaxinf.streaming.plan.reads import Reading, planned_fetches, staged_bytes
from jaxinf.streaming.plan.resident import ResidentChooser
from jaxinf.streaming.program.graph import Piece
from jaxinf.streaming.program.meshes import default_device
from jaxinf.streaming.program.units import Places, Unit
from jaxinf.streaming.run import Executables, compiled_bytes
from jaxinf.streaming.update.compressing import Compressor
from jaxinf.streaming.update.micro_batches import sum_bytes
from jaxinf.streaming.update.optimizer import passes_for, trace_optimizer
from jaxinf.streaming.update.passes import PassRunner
from jaxinf.streaming.update.traffic import is_parted, reads_params
from jaxinf.typing import PyTree

__all__ = ["Basis", "Fitting"]


@dataclass(frozen=True)
class Basis:
    """What is planned, whatever the memory.

    Attributes:
      shape: The store's chunks.
      units: Those that are updated.
      is_deferred: Whether gradients wait for the last one.
      numbers_bytes: Memory of the device for numbers of gradients.
      gathered_bytes: Memory of the host to gather shards.
      gradient_bytes, sum_bytes: Bytes of each gradient, and of its sum over parts of a
        batch.
    """

    shape: StoreShape
    program: UpdateProgram
    passes: Passes
    numbers: PassRunner
    places: Places
    units: Set[Unit]
    compressor: Compressor
    is_deferred: bool
    numbers_bytes: int
    gathered_bytes: int
    gradient_bytes: Mapping[Piece, int]
    sum_bytes: Mapping[Piece, int]

    def rereads(self, unit: Unit) -> bool:
        """Whether a unit's update reads params that could be given to it."""
        return reads_params(self.shape, unit, self.program, self.passes)

    def takes_read(self, unit: Unit) -> bool:
        """Whether a unit's update can take what was read for a program."""
        return unit.is_divided and not self.is_deferred and self.rereads(unit)

    def deferred_bytes(self, calls: Iterable[Call]) -> Mapping[Piece, int]:
        """Returns the bytes of gradients that wait for the last one, in their order.

        Those of the parts of a leaf that the passes need as a whole wait together.
        """
        found: dict[Piece, int] = {}
        for call in calls:
            for piece, _ in call.gradients:
                is_whole = piece.leaf in self.passes.whole
                key = Piece(piece.leaf) if is_whole else piece
                found[key] = found.pop(key, 0) + self.gradient_bytes[piece]
        return found

    def given(self, stays: Set[Unit]) -> frozenset[Unit]:
        """Returns the units that stay and that updates can take."""
        return frozenset(filter(self._takes_resident, stays))

    def _takes_resident(self, unit: Unit) -> bool:
        """Whether a unit's update can take what stays between steps.

        A chunk that a step overwrites in parts cannot be compared with its checksum.
        """
        rewrites = self.shape.options.rewrites_steps
        is_known = not (rewrites and is_parted(self.shape, unit))
        return unit.is_divided and is_known and self.rereads(unit)

    def reads(self, plan: Plan, division: Division, stays: Set[Unit]) -> Reading:
        """Plans the reads of a step beside units that stay."""
        return planned_fetches(plan, self.places, division, self.takes_read, stays)


class Fitting:
    """Plans steps of one store.

    Args:
      store: The store.
      tx: The optimizer.
      options: Memory, policy and so on.
      executables: As for `compile_plan`.
    """

    def __init__(
        self,
        store: Store,
        tx: optax.GradientTransformationExtraArgs,
        options: Options,
        executables: Executables,
    ) -> None:
        self._store = store
        self._tx = tx
        self._options = options
        self._executables = executables

    @cached_property
    def device(self) -> Any:
        """The JAX device that programs run on; on a mesh, one like all of them."""
        return default_device()

    @cached_property
    def device_limit(self) -> DeviceLimit:
        """The limit of the JAX device's memory."""
        return device_limit(self.device, self._options.device_memory_bytes)

    def basis(self, ready: Prepared, params: PyTree, shape: StoreShape) -> Basis:
        """Returns what there is to plan; compiles the optimizer's programs.

        Args:
          ready: The loss function, traced for the batch.
          params: Abstract values of the params.
          shape: The store's chunks; it need not be there.
        """
        training, options = self._store._training, self._options
        shapes = [leaf.shape for leaf in ready.traced.params]
        program = trace_optimizer(self._tx, params, options.extra_args)
        passes = passes_for(program, ready.gradient_pieces)
        places = self._places(ready, passes, shape)
        bits = {"is_deterministic": options.deterministic}
        numbers = PassRunner(training, program, passes, **bits)
        units = {places.unit(piece) for piece in ready.gradient_pieces}
        compressor = Compressor(training, options.compress, shape, **bits)
        arrivals = _arrivals(ready.gradient_pieces, shapes, passes.whole)
        gradients = ready.lifetimes.graph.gradients
        return Basis(
            shape,
            program,
            passes,
            numbers,
            places,
            units,
            compressor,
            passes.num_passes > 1 or training.options.rewrites_steps,
            max(numbers.compile(arrivals), compressor.compile(units)),
            self._gathered_bytes(ready, places, passes),
            {piece: ready.lifetimes.sizes[piece] for piece in gradients},
            {piece: sum_bytes(value.aval) for piece, value in gradients.items()},
        )

    def fitted(
        self, ready: Prepared, basis: Basis, budgets: Mapping[str, int]
    ) -> Fitted:
        """Divides the memory, then cuts the program to fit its part; compiles it.

        Raises:
          BudgetError: A budget does not suffice.
          StreamError: The program cannot be cut, or the saved plan is another's.
        """
        options, places = self._options, basis.places
        division = self._division(basis, budgets, ready.traced.mesh)
        check_pinned(self.device, division.staged)
        chooser = ResidentChooser(
            options.resident,
            places,
            basis.units,
            division,
            lambda plan, part: basis.reads(plan, part, frozenset()).fetches,
            basis.rereads,
            partial(compiled_bytes, executables=self._executables),
        )
        return fit(
            ready,
            options.policy,
            division,
            chooser,
            basis.reads,
            self._executables,
            passing=partial(staged_bytes, places),
            saved_in=None if options.replan else self._store.path,
        )

    def _division(
        self, basis: Basis, budgets: Mapping[str, int], mesh: Mesh | None
    ) -> Division:
        device, policy = self.device_limit, self._options.policy
        if mesh is not None:
            device = mesh_limit(mesh.local_devices, self._options.device_memory_bytes)
        if "device_memory_bytes" in budgets:
            device = replace(device, num_bytes=budgets["device_memory_bytes"])
        division = divide(
            budgets["memory_bytes"],
            basis.shape.least_memory_bytes,
            max((unit.num_bytes for unit in basis.units), default=0),
            device,
        )
        division = division.without(
            basis.numbers_bytes, "computing numbers of its gradients", is_on_device=True
        )
        division = division.without(
            basis.gathered_bytes,
            "moving shards of params that are not stored alone",
        )
        if policy not in ("offload", "plan"):
            return division
        num_drives = max(1, basis.shape.directory.num_csds)
        return division.without(
            writing_bytes(num_drives), "writing its values to drives"
        )

    def _places(self, ready: Prepared, passes: Passes, shape: StoreShape) -> Places:
        params = ready.traced.params

        def can_move(leaf: int, origin: Sequence[int], extent: Sequence[int]) -> bool:
            return leaf not in passes.whole and shape.can_move(leaf, origin, extent)

        undivided = range(len(params)) if self._options.compress else passes.computed
        return Places(params, can_move, undivided)

    def _gathered_bytes(self, ready: Prepared, places: Places, passes: Passes) -> int:
        """Memory to gather shards: one unit that is read, and one that is updated."""
        units = {places.unit(piece) for piece in ready.lifetimes.sizes}
        rewrites = self._store._training.options.rewrites_steps
        waits = passes.num_passes > 1 or rewrites or self._options.micro_batches > 1
        apart = [unit for unit in units if len(unit.shards) > 1]
        undivided = [unit.num_bytes for unit in apart if not unit.is_divided]
        updated = [unit.num_bytes for unit in apart] if waits else undivided
        return max(undivided, default=0) + 2 * max(updated, default=0)


def _arrivals(
    pieces: Iterable[Piece],
    shapes: Sequence[tuple[int, ...]],
    whole: Set[int],
) -> Mapping[int, list[tuple[int, ...]]]:
    """Returns the shapes in which each leaf's gradients are given to the passes."""
    found: dict[int, list[tuple[int, ...]]] = {}
    for piece in pieces:
        shape, depth = shapes[piece.leaf], len(piece.index)
        if piece.leaf not in whole:
            shape = (*(1,) * depth, *shape[depth:])
        found.setdefault(piece.leaf, []).append(shape)
    return found
