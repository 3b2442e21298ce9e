"""The shardings of a plan's values over the devices of its mesh.

Invariant: the shardings of inputs and gradients are the user's; JAX chooses those of
other values when the program that makes them is compiled.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinf.streaming.plan.calls import Call, Plan, Slot
from jaxinf.streaming.plan.memory import num_together
from jaxinf.streaming.program.graph import Batch, Const, Origin, Piece, aval_bytes
from jaxinf.streaming.program.meshes import piece_sharding, shard_bytes, typed_sharding


class Shardings:
    """Shardings of inputs and outputs, call by call; empty for one device.

    Args:
      plan: The plan, whose calls come in order.
    """

    def __init__(self, plan: Plan) -> None:
        self._traced = plan.traced
        self._held: dict[Slot, Any] = {}
        self._pieces: dict[Slot, Piece] = {}  # gradients of parts, and their sums
        self._gradients: dict[str, Mapping[int, Piece]] = {}
        for call in reversed(plan.calls):
            own = self._own_gradients(call)
            if own:
                self._gradients[call.program.key] = own
            for i, piece in own.items() if call.program.is_sum else ():
                for ref in (call.takes[i], call.takes[i + len(call.makes)]):
                    assert isinstance(ref, Slot), "a sum's operand is a value"
                    self._pieces[ref] = piece

    def inputs(self, call: Call) -> tuple[Any, ...]:
        if self._traced.mesh is None:
            return ()
        pairs = zip(call.takes, call.program.inputs, strict=True)
        return tuple(self._input(ref, value.aval) for ref, value in pairs)

    def outputs(self, call: Call) -> tuple[Any, ...]:
        """Returns the shardings that a call's outputs must have, or None.

        A gradient has that of its params. A program called again has the same.
        """
        mesh = self._traced.mesh
        if mesh is None:
            return ()
        own = self._own_gradients(call) or self._gradients.get(call.program.key, {})
        # A program without inputs would be one device's.
        other = None if call.takes else NamedSharding(mesh, PartitionSpec())
        return tuple(
            self._piece(own[i]) if i in own else other
            for i in range(len(call.program.outputs))
        )

    def _own_gradients(self, call: Call) -> Mapping[int, Piece]:
        """Returns outputs that are gradients, those of a part of the batch, too."""
        found = {i: piece for piece, i in call.gradients}
        for i, slot in enumerate(call.makes):
            if slot is not None and slot in self._pieces:
                found[i] = self._pieces[slot]
        return found

    def note(self, call: Call, executable: Any) -> None:
        """Takes the shardings of a call's outputs from the compiled program."""
        if self._traced.mesh is not None:
            found = zip(call.makes, executable.output_shardings, strict=True)
            self._held.update((slot, one) for slot, one in found if slot is not None)

    def _input(self, ref: Origin | Slot, aval: Any) -> Any:
        mesh = self._traced.mesh
        assert mesh is not None
        typed = typed_sharding(aval)
        if typed is not None and mesh.are_all_axes_explicit:
            return NamedSharding(mesh, typed.spec)
        match ref:
            case Slot():
                return self._held[ref]
            case Piece():
                return self._piece(ref)
            case Batch():
                return self._traced.batch[ref.leaf].sharding
            case Const():
                return const_sharding(self._traced.consts[ref.number], mesh)
        return NamedSharding(mesh, PartitionSpec())

    def _piece(self, piece: Piece) -> Any:
        return piece_sharding(self._traced.params[piece.leaf].sharding, piece)


def const_sharding(const: Any, mesh: Mesh | None) -> Any:
    """Returns the sharding of an array that a function closed over."""
    if mesh is None:
        return None
    own = getattr(const, "sharding", None)
    if isinstance(own, NamedSharding) and own.mesh == mesh:
        return own
    return NamedSharding(mesh, PartitionSpec())


def output_bytes(plan: Plan, compiled: Sequence[Any]) -> Sequence[Sequence[int]] | None:
    """Returns the bytes of each call's outputs; None for one device.

    Those on all devices that share the host's memory, or on one with its own.
    """
    mesh = plan.traced.mesh
    if mesh is None:
        return None
    num = num_together(mesh)
    return [
        [
            num * shard_bytes(aval_bytes(value.aval), value.shape, sharding)
            for value, sharding in zip(
                call.program.outputs, executable.output_shardings, strict=True
            )
        ]
        for call, executable in zip(plan.calls, compiled, strict=True)
    ]
