"""Traces and jaxprs: primitives and their parameters, equations and their sources.

Invariant: an unknown primitive is refused by name, never guessed.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax._src.core import trace_state_clean
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, Primitive

ELEMENTWISE = frozenset(
    """
    abs add and cbrt ceil clamp convert_element_type cos div eq exp exp2 expm1 floor
    ge gt integer_pow is_finite le log log1p logistic lt max min mul ne neg
    nextafter not or pow reduce_precision rem round rsqrt select_n sign sin sqrt
    square sub tanh xor
    """.split()
)
"""Primitives by name: every operand leaf-shaped or a scalar. They name equations of
`jaxinf.program.kernel`, too."""

POINTWISE = ELEMENTWISE | frozenset(
    """
    acos acosh add_any asin asinh atan atan2 atanh bessel_i0e bessel_i1e
    bitcast_convert_type clz copy copy_p cosh digamma erf erf_inv erfc imag is_finite
    lgamma mul optimization_barrier population_count real shift_left
    sharding_constraint shift_right_arithmetic shift_right_logical sinh stop_gradient
    tan
    """.split()
)
"""Primitives that compute each element from the elements at the same position."""

LIGHT = POINTWISE | frozenset(
    """
    argmax argmin broadcast_in_dim concatenate dynamic_slice dynamic_update_slice
    expand_dims gather iota pad random_bits random_clone random_fold_in random_seed
    random_split random_unwrap random_wrap reduce_and reduce_max reduce_min reduce_or
    reduce_prod reduce_sum reshape rev shift slice split squeeze stack threefry2x32
    transpose unstack
    """.split()
)
"""Primitives whose repeated computation costs less than keeping the result."""

IDENTITIES = frozenset(
    """
    copy copy_p stop_gradient optimization_barrier sharding_constraint reshape
    squeeze expand_dims broadcast_in_dim convert_element_type
    """.split()
)
"""Primitives that pass operands through, where no shape or dtype changes."""

_CALLS = frozenset(
    """
    jit pjit closed_call core_call core_closed_call custom_jvp_call custom_vjp_call
    custom_vjp_call_jaxpr remat remat2 checkpoint
    """.split()
)
_CHECKPOINTS = frozenset({"remat", "remat2", "checkpoint"})
_CALLEE_PARAMETERS = ("jaxpr", "call_jaxpr", "fun_jaxpr")
_REDUCED = {(8, 7): "bfloat16", (5, 10): "float16", (8, 23): "float32"}


def called_jaxpr(
    name: str, params: Mapping[str, Any], *, checkpoints: bool = True
) -> Any:
    """Returns the jaxpr of an equation that is only a call; None for other equations.

    With `checkpoints`, `jax.checkpoint` counts as a call, so that its recomputed
    equations need not stay together.
    """
    if name not in _CALLS or (name in _CHECKPOINTS and not checkpoints):
        return None
    return next(params[key] for key in _CALLEE_PARAMETERS if key in params)


def inner_jaxprs(params: Mapping[str, Any]) -> Iterator[Any]:
    """Yields the jaxprs of an equation's calls, loops and branches, closed or not."""
    for value in params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, (ClosedJaxpr, Jaxpr)):
                yield item


def all_equations(jaxpr: Any) -> Iterator[Any]:
    """Yields a jaxpr's equations, each followed by those of its own jaxprs."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in inner_jaxprs(eqn.params):
            yield from all_equations(inner)


def static_params(name: str, params: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns an equation's parameters in a kernel; None if kernels lack it."""
    if name not in ELEMENTWISE:
        return None
    if name == "integer_pow":
        return {"y": int(params["y"])}
    if name == "round":
        return {"to_even": int(params["rounding_method"]) == 1}
    if name == "reduce_precision":
        bits = (int(params["exponent_bits"]), int(params["mantissa_bits"]))
        return {"to": _REDUCED[bits]} if bits in _REDUCED else None
    return {}


def evaluate_equation(
    primitive: Primitive,
    operands: Sequence[Any],
    params: Mapping[str, Any],
    context: Any,
) -> Sequence[Any]:
    """Computes an equation; `context` is its ``ctx``, if it has one; traceable."""
    params = primitive.get_bind_params(dict(params))
    if isinstance(params, tuple):  # in JAX 0.8, with the functions that it calls
        functions, params = params
        operands = (*functions, *operands)
    if context is None:
        results = primitive.bind(*operands, **params)
    else:
        with context.manager:
            results = primitive.bind(*operands, **params)
    return results if primitive.multiple_results else [results]


def source_frames(source: Any) -> list[tuple[str, str]]:
    """Returns file and function of each frame above an equation, if JAX kept them."""
    try:
        return [(f.file_name, f.function_name) for f in source.traceback.frames]
    except AttributeError:
        return []


CALLBACK_LOGGER = "jax._src.callback"
"""Logs an exception of a callback, which is then raised, with a traceback."""


def trace_context() -> Any:
    """The settings that a trace depends on, which compare as jit's cache does."""
    from jax._src import config

    return config.trace_context()


def is_tracing() -> bool:
    """Whether JAX is tracing a function, so that even constants become tracers."""
    return isinstance(jax.numpy.zeros(()), Tracer)


def is_in_transformation() -> bool:
    """Whether JAX traces a function or runs it by `jax.grad`, `jax.vmap` and so on."""
    return not trace_state_clean()
