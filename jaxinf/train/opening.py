"""Opens the backend of a config's mode.

Invariant: nothing is written to a store here, unless it is divided anew.
"""

from typing import TypeAlias

import jax
import optax
from jax.sharding import SingleDeviceSharding

from jaxinf.command_line import UsageError
from jaxinf.engine import divide_for, open_store
from jaxinf.streaming import store_memory_bytes
from jaxinf.train.config import TrainConfig
from jaxinf.train.in_memory import InMemory
from jaxinf.train.on_store import OnStore
from jaxinf.train.processes import Processes
from jaxinf.train.streamed import Streamed

_NUM_KEPT = 3  # checkpoints

Backend: TypeAlias = OnStore | Streamed | InMemory
"""The modes, with the few operations that the training loop needs of each.

Where `needs_all`, a function of the params runs in all processes together. `init`
returns params and optimizer state of the resumed run or new ones: both None if neither
is ever in memory as a whole.
"""


def open_backend(
    config: TrainConfig,
    optimizer: optax.GradientTransformation,
    processes: Processes | None = None,
) -> Backend:
    """Makes the backend of the config's mode; opens the store without writing to it.

    Args:
      processes: those of the run; by default this one.

    Raises:
      UsageError: an argument of the store is out of range.
      JaxinfError: as `jaxinf.open_store`.
    """
    if config.mode == "memory":
        return InMemory(config, optimizer)
    assert config.store is not None
    memory_bytes = config.buffer_bytes
    if config.mode == "stream":
        # It decides how chunks are divided; a step's budget has the tier in it.
        memory_bytes = store_memory_bytes(memory_bytes) + (config.state_tier or 0)
    processes = processes or Processes()
    try:
        if config.elastic:
            like = processes.like(config.abstract[1])
            alone = SingleDeviceSharding(jax.devices()[0])
            shardings = jax.tree.map(lambda leaf: leaf.sharding or alone, like)
            divide_for(config.store, shardings, config.csd_root or ())
        store = open_store(
            config.store,
            csds=config.csd_root,
            csd=config.csd,
            memory_bytes=memory_bytes,
            durability=config.durability,
            restore=config.restore,
            state=config.state,
            keep_steps=(0, _NUM_KEPT) if config.checkpoint_every else None,
            tiers={"host": config.state_tier} if config.state_tier else None,
            export_every=config.checkpoint_every if config.export_to else None,
            export_to=config.export_to,
        )
    except (ValueError, NotADirectoryError) as error:
        raise UsageError(str(error)) from error
    is_streamed = config.mode == "stream"
    try:
        if is_streamed:
            return Streamed(config, store, optimizer, processes)
        return OnStore(config, store, optimizer)
    except ValueError as error:
        store.close()
        flag = "--mode stream" if is_streamed else f"--compress {config.compress}"
        raise UsageError(f"{flag}: {error}") from error
