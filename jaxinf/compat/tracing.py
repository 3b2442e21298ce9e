"""What a trace does not tell: whether there is one, `vmap`, how random bits are made.

Invariant: a primitive of our own leaves no trace in what is computed.
"""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
from jax._src.core import trace_state_clean
from jax.core import Tracer
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

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


def without_examples(
    values: Sequence[Any],
    *,
    refuse_examples: Callable[[int], NoReturn],
    refuse_derivative: Callable[[], NoReturn],
) -> list[Any]:
    """Returns arrays as they are, for a computation that knows no ``vmap``; traceable.

    Under a ``vmap`` over one example they lose that axis; JAX puts it back at the end.

    Args:
      values: arrays.
      refuse_examples: raises for the number of examples of another ``vmap``.
      refuse_derivative: raises where JAX differentiates with respect to an array.
    """
    return _WITHOUT_EXAMPLES.bind(
        *values, refuse_examples=refuse_examples, refuse_derivative=refuse_derivative
    )


_WITHOUT_EXAMPLES = Primitive("without_examples")
_WITHOUT_EXAMPLES.multiple_results = True
_WITHOUT_EXAMPLES.def_impl(lambda *values, **_: list(values))
_WITHOUT_EXAMPLES.def_abstract_eval(lambda *avals, **_: list(avals))
mlir.register_lowering(_WITHOUT_EXAMPLES, lambda _context, *values, **_: values)


def _squeeze_examples(
    values: Sequence[Any], axes: Sequence[int | None], **refusals: Any
) -> tuple[list[Any], list[None]]:
    for value, axis in zip(values, axes, strict=True):
        if axis is not None and value.shape[axis] != 1:
            refusals["refuse_examples"](value.shape[axis])
    squeezed = [
        value if axis is None else jax.numpy.squeeze(value, axis)
        for value, axis in zip(values, axes, strict=True)
    ]
    return without_examples(squeezed, **refusals), [None] * len(values)


def _refuse_derivative(*_: Any, **refusals: Any) -> None:
    refusals["refuse_derivative"]()


batching.primitive_batchers[_WITHOUT_EXAMPLES] = _squeeze_examples
ad.primitive_jvps[_WITHOUT_EXAMPLES] = _refuse_derivative
