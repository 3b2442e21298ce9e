"""Insides of Flax and Orbax that are not promised.

Invariant: Flax and Orbax are not imported.
"""

import sys

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
