"""Insides of optax, Flax and Orbax that are not promised.

Invariant: Flax and Orbax are not imported.
"""

import inspect
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import optax

# ---- optax


def is_inside_multi_steps() -> bool:
    """Whether a method of an ``optax.MultiSteps`` is among the callers."""
    module = optax.MultiSteps.__module__  # not f_locals, which would keep tracers
    return any(
        f.f_code.co_qualname.startswith("MultiSteps.")
        and f.f_globals.get("__name__") == module
        for f in _callers()
    )


def is_inside_lookahead() -> bool:
    """Whether a function of an ``optax.lookahead`` is among the callers."""
    return any(
        f.f_globals.get("__name__") == optax.lookahead.__module__ for f in _callers()
    )


def _callers() -> Iterator[FrameType]:
    frame = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _multi_steps_of(tx: Any) -> Any:
    """Returns the ``optax.MultiSteps`` that a transformation is, or is made by."""
    owner = getattr(getattr(tx, "update", None), "__self__", None)
    found = owner if isinstance(owner, optax.MultiSteps) else tx
    return found if isinstance(found, optax.MultiSteps) else None


def is_single_step(tx: Any) -> bool:
    """Whether a transformation is ``MultiSteps(inner, 1)`` and skips no step."""
    steps = _multi_steps_of(tx)
    if steps is None:
        return False
    every = getattr(steps, "_every_k_schedule", None)
    skips = getattr(steps, "_should_skip_update_fn", None)
    own = [getattr(f, "__qualname__", "") for f in (every, skips)]
    if not all(name.startswith("MultiSteps.__init__.<locals>.") for name in own):
        return False
    assert callable(every), "it has a qualified name"
    return inspect.getclosurevars(every).nonlocals == {"every_k_schedule": 1}


def is_params_placeholder(params: Any) -> bool:
    """Whether params are what ``optax.tree.map_params`` gives to an ``init``."""
    kind = type(params)
    return kind.__name__ == "_ParamsPlaceholder" and kind.__module__[:5] == "optax"


# ---- Flax


def register_with_flax(node: type) -> None:
    """Lets Flax's serialization pass over nodes of a tree that have no arrays.

    Nothing is done, and Flax is not imported, where a program does not use it.
    """
    flax = sys.modules.get("flax.serialization")
    if flax is not None:
        flax.register_serialization_state(
            node, lambda node: {}, lambda node, state: node, override=True
        )


# ---- Orbax

ORBAX_HANDLER = (
    "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"
)
"""Orbax's handler of a pytree, as a checkpoint's metadata names it."""

ORBAX_DICT_KEY = 2
"""``KeyType.DICT`` of Orbax's metadata of trees."""
