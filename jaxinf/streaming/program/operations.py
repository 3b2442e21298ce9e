"""A program's operations as XLA's CPU compiler has them before it fuses them.

Invariant: calls are inlined, equal operations are one, and no operation is unused. An
operand of a product has the layout that the library reads; 16-bit products are in 32.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxinf.compat import called_jaxpr, inner_jaxprs
from jaxinf.program.graph import ancestors, interpret
from jaxinf.streaming.program.graph import aval_bytes

# What is computed again in each reader, at little cost.
_CHEAP = """abs add add_any and bitcast_convert_type ceil clamp convert_element_type eq
floor ge gt imag integer_pow is_finite le lt max min mul ne neg nextafter not or
population_count real round select_n shift_left shift_right_arithmetic
shift_right_logical sign square sub xor""".split()
# What is computed once.
_DEAR = """acos acosh asin asinh atan atan2 atanh cbrt cos cosh digamma div erf erf_inv
erfc exp exp2 expm1 lgamma log log1p logistic pow rem rsqrt sin sinh sqrt tan
tanh""".split()
MOVING = """broadcast_in_dim concatenate dynamic_slice dynamic_update_slice gather iota
pad reshape rev slice transpose""".split()
_VIEWS = {"expand_dims", "optimization_barrier", "reshape", "squeeze", "stop_gradient"}
_VIEWS |= {"copy", "name", "pvary", "random_unwrap", "random_wrap", "reduce_precision"}
_VIEWS |= {"sharding_constraint"}
_FUSIBLE = {*_CHEAP, *_DEAR, *MOVING}
LOOPS = {"cond", "scan", "while"}


@dataclass(eq=False)
class Array:
    aval: Any
    node: Any = None  # that makes it; None for an input
    users: list["Operation"] = field(default_factory=list)
    is_result: bool = False

    @property
    def bytes(self) -> int:
        return aval_bytes(self.aval)

    @property
    def maker(self) -> str:
        return "" if self.node is None else self.node.name


@dataclass(eq=False)
class Operation:
    """An operation.

    Attributes:
      is_dear: Whether it is computed once only.
      inner_bytes: Memory of its loop's or branch's body.
    """

    name: str
    inputs: list[Array]
    outputs: list[Array] = field(default_factory=list)
    is_dear: bool = False
    inner_bytes: int = 0

    @property
    def is_fusible(self) -> bool:
        return self.name in _FUSIBLE

    @property
    def is_repeatable(self) -> bool:
        """Whether readers compute it again: it reads one array of its size at most."""
        least = self.outputs[0].bytes // 2
        large = {v for v in self.inputs if v.bytes > least and not is_broadcast(v)}
        return self.is_fusible and not self.is_dear and len(large) <= 1


class Operations:
    """The operations of a jaxpr and of those that it calls; equal ones are one.

    Args:
      temp_bytes: Returns the temporaries of a body: of its jaxpr, the primitive, and
        the number of its arguments that are not slices, None for all.
    """

    def __init__(self, temp_bytes: Callable[..., int]) -> None:
        self._temp_bytes = temp_bytes
        self.nodes: list[Operation] = []
        self._seen: dict[Any, list[Array]] = {}

    def inline(self, jaxpr: Any, inputs: Sequence[Array | None]) -> list[Any]:
        return interpret(
            jaxpr,
            inputs,
            self._equation,
            const=lambda array: Array(jax.typeof(array)),
            literal=lambda literal: None,
        )

    def add(
        self,
        name: str,
        inputs: Sequence[Array],
        avals: Sequence[Any],
        key: Any = None,
        *,
        is_dear: bool = False,
        inner_bytes: int = 0,
    ) -> list[Array]:
        """Appends an operation; one with a key, only if there is no equal one."""
        shapes = tuple((aval.shape, aval.dtype) for aval in avals if key is not None)
        known = name, str(key), shapes, tuple(map(id, inputs))
        if key is not None and known in self._seen:
            return self._seen[known]
        node = Operation(name, list(inputs), [], is_dear, inner_bytes)
        node.outputs = [Array(aval, node) for aval in avals]
        self.nodes.append(node)
        if key is not None:
            self._seen[known] = node.outputs
        return node.outputs

    def _equation(self, eqn: Any, values: list[Array | None]) -> Sequence[Any]:
        name, avals = eqn.primitive.name, [var.aval for var in eqn.outvars]
        callee = called_jaxpr(name, eqn.params)
        if callee is not None:
            return self.inline(callee, values)
        inputs = [value for value in values if value is not None]
        if name in LOOPS:
            return self._loop(eqn, inputs, avals)
        if name == "dot_general":
            return self._product(eqn, inputs, avals[0])
        if name in _CHEAP or name in _DEAR:
            return self._elementwise(eqn, values, avals[0])
        if name == "split":
            parts = enumerate(avals)
            return [self.add("slice", inputs, [aval], i)[0] for i, aval in parts]
        if name == "conv_general_dilated":  # which can read in reverse itself
            inputs = [v.node.inputs[0] if v.maker == "rev" else v for v in inputs]
        key = None if any(inner_jaxprs(eqn.params)) else eqn.params
        return self.add(name, inputs, avals, key, is_dear=name == "gather")

    def _loop(self, eqn: Any, inputs: list[Array], avals: Sequence[Any]) -> Any:
        name, params = eqn.primitive.name, eqn.params
        kept = params["num_consts"] + params["num_carry"] if name == "scan" else None
        bodies = inner_jaxprs(params)
        inner_bytes = max(self._temp_bytes(body, name, kept) for body in bodies)
        # Stacked 16-bit values are widened before the loop that reads them.
        inputs = [self._wide(v) if v.maker == "scan" else v for v in inputs]
        return self.add(name, inputs, avals, inner_bytes=inner_bytes)

    def _product(self, eqn: Any, inputs: list[Array], aval: Any) -> Sequence[Array]:
        """A product: operands in the layout of the library, in 32 bits."""
        contracted, batch = eqn.params["dimension_numbers"]
        sizes = [eqn.invars[0].aval.shape[i] for i in contracted[0]]
        if math.prod(sizes) == 1:
            return self.add("mul", inputs, [aval], eqn.params)
        inputs = [
            self._wide(self._laid_out(*one))
            for one in zip(inputs, batch, contracted, (True, False), strict=True)
        ]
        outputs = self.add("dot_general", inputs, [_widened(aval)], eqn.params)
        if aval.dtype.itemsize != 2:
            return outputs
        return self.add("convert_element_type", outputs, [aval], is_dear=True)

    def _laid_out(
        self, value: Array, batch: Any, contracted: Any, is_left: bool
    ) -> Array:
        shape = value.aval.shape
        free = [i for i in range(len(shape)) if i not in (*batch, *contracted)]
        last = (*free, *contracted) if is_left else (*contracted, *free)
        order = [i for i in (*batch, *last) if shape[i] != 1]
        is_matrix = not batch and len(contracted) == 1 and len(free) <= 1
        if is_matrix or order == sorted(order):
            return value
        moved = value.aval.update(shape=tuple(shape[i] for i in (*batch, *last)))
        return self.add("transpose", [value], [moved], order)[0]

    def _wide(self, value: Array) -> Array:
        wide = _widened(value.aval)
        if wide is value.aval:
            return value
        return self.add("convert_element_type", [value], [wide], "wide")[0]

    def _elementwise(
        self, eqn: Any, values: list[Array | None], aval: Any
    ) -> Sequence[Array]:
        name, params, inputs = eqn.primitive.name, eqn.params, []
        for value in values:
            if value is None:
                continue
            if math.prod(value.aval.shape) not in (1, math.prod(aval.shape)):
                spread = value.aval.update(shape=aval.shape)
                [value] = self.add("broadcast_in_dim", [value], [spread], "spread")
            inputs.append(value)
        rounds = aval.dtype.itemsize == 2 and name != "select_n"

        def add(one: str, operands: list[Array], key: Any = "") -> list[Array]:
            is_dear = one in _DEAR or rounds
            return self.add(one, operands, [aval], key, is_dear=is_dear)

        power = {"square": 2, "integer_pow": params.get("y")}.get(name)
        if power in (2, 3):
            square = add("mul", inputs * 2)
            return square if power == 2 else add("mul", square + inputs)
        if name == "erfc":  # computed by what its gradient needs, too
            opposite = add("neg", add("mul", inputs * 2), {})
            inputs += add("exp", opposite, {"accuracy": None})
        if name == "div" and len(inputs) == 2 and is_broadcast(inputs[1]):
            name = "mul"
        return add(name, inputs, params)


def _widened(aval: Any) -> Any:
    is_half = getattr(aval.dtype, "itemsize", 0) == 2
    return aval.update(dtype=jax.numpy.float32.dtype) if is_half else aval


def is_broadcast(value: Array) -> bool:
    is_one = value.maker == "broadcast_in_dim"
    return is_one and sum(v.bytes for v in value.node.inputs) < value.bytes


def simplified(
    nodes: Sequence[Operation], results: Sequence[Array]
) -> tuple[list[Operation], list[Array]]:
    """Leaves out views, unused operations, and zeros to which is added."""
    for node in nodes:
        node.inputs = [_viewed(value) for value in node.inputs]
        if node.name in ("add", "add_any") and len(node.inputs) == 2:
            _add_in_place(node)
    results = [_viewed(value) for value in results]
    for value in results:
        value.is_result = True
    needed = ancestors(results)
    nodes = [node for node in nodes if node in needed]
    for node in nodes:
        for value in node.inputs:
            value.users.append(node)
    for node in reversed(nodes):
        if node.name == "reduce_sum":
            _take_factors(node)
    needed = ancestors(results)
    return [node for node in nodes if node in needed], results


def _viewed(value: Array) -> Array:
    while value.node is not None and value.node.inputs and _is_view(value.node):
        value = value.node.inputs[0]
    return value


def _is_view(node: Operation) -> bool:
    source = node.inputs[0]
    if node.name == "reshape":  # of a fused operation it is fused, too
        return source.node is None or not source.node.is_fusible
    if node.name == "broadcast_in_dim":
        return source.bytes == node.outputs[0].bytes
    return node.name in _VIEWS


def _add_in_place(node: Operation) -> None:
    for value, other in (node.inputs, node.inputs[::-1]):
        if value.maker == "scatter-add":
            zeros, *rest = value.node.inputs
            if zeros.node is not None and not zeros.node.inputs:
                node.name, node.inputs = "scatter-add", [other, *rest]
                return


def _take_factors(node: Operation) -> None:
    """Makes the factors of a product that is only summed inputs of the sum."""
    found, stack = [], node.inputs[:1]
    while stack:
        value = stack.pop()
        is_own = set(value.users) == {node} and not value.is_result
        if value.maker in ("mul", "neg") and is_own:
            for factor in value.node.inputs:
                factor.users.append(node)
                factor.users.remove(value.node)
            stack += value.node.inputs
        else:
            found.append(value)
    node.inputs[:1] = found
