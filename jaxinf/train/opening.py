"""Opens the store of a run, and reads the costs of its steps.

Invariant: nothing is written to a store when it is opened, unless it is divided anew. A
new run's params are compared with a store's before its first step.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from jaxinf.command_line import UsageError
from jaxinf.engine import Store, divide_store, engine_of, open_store
from jaxinf.errors import StreamError, UnsupportedTransformError
from jaxinf.store import required_bytes
from jaxinf.streaming import store_memory_bytes
from jaxinf.train.config import TrainConfig
from jaxinf.train.devices import Devices
from jaxinf.train.resume import initial_payload

_NUM_CHECKPOINTS = 3
_FLAGS = {  # by the arguments of jaxinf's functions, as errors name them
    "device_memory_bytes": "--device-memory",
    "memory_bytes": "--memory",
    "device_updates": "--device-updates",
    "micro_batches": "--micro-batches",
    "policy=": "--policy ",
    "replan=True": "--elastic",
    'durability="step"': "--durability step",
    "error_feedback=True": "--compress …,error_feedback=true",
}


@contextlib.contextmanager
def name_flags_in_errors() -> Iterator[None]:
    """Makes errors name flags in place of arguments, whose errors are of usage."""
    try:
        yield
    except StreamError as error:
        raise StreamError(_with_flags(error)) from error
    except UnsupportedTransformError as error:
        text = f"--optimizer: {_with_flags(error)} (--mode memory trains with it)"
        raise UsageError(text) from error
    except (ValueError, NotADirectoryError) as error:
        raise UsageError(_with_flags(error)) from error


def _with_flags(error: Exception) -> str:
    text = str(error)
    for argument, flag in _FLAGS.items():
        text = text.replace(argument, flag)
    return text


@name_flags_in_errors()
def open_run_store(config: TrainConfig, devices: Devices) -> Store:
    """Opens a run's store; a new one says at step 0 which model it has."""
    assert config.store is not None
    memory_bytes = config.buffer_bytes
    if config.mode == "stream":
        memory_bytes = store_memory_bytes(memory_bytes)  # divides chunks
    if config.elastic:
        alone = SingleDeviceSharding(jax.devices()[0])
        shapes = devices.add_shardings(config.abstract[1])
        shardings = jax.tree.map(lambda leaf: leaf.sharding or alone, shapes)
        divide_store(config.store, shardings, config.csd_root or ())
    store = open_store(
        config.store,
        csds=config.csd_root,
        csd=config.csd,
        memory_bytes=memory_bytes,
        durability=config.durability,
        state=config.state,
        keep_steps=(0, _NUM_CHECKPOINTS) if config.checkpoint_every else None,
        export_every=config.checkpoint_every if config.export_to else None,
        export_to=config.export_to,
    )
    if not store.exists:
        store.annotate(0, initial_payload(config))
    return store


def stored_bytes(store: Store) -> int:
    """Returns the bytes of a store on its drives, with both slots."""
    return required_bytes(engine_of(store).directory).total()


def step_costs(
    store: Store, step: int, disk_bytes: int, stream: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns fields of a step's line once it is durable; blocks until then."""
    metrics = store.metrics_of(step)
    if metrics is None:
        return {}
    for name in ("spilled_drive_bytes", "offloaded_drive_bytes"):
        disk_bytes += stream.get(name, 0)
    return {
        "update_s": metrics.update_s,
        "commit_s": metrics.commit_s if metrics.is_committed else None,
        "hit_share": metrics.hit_share,
        **dataclasses.asdict(metrics.traffic),
        "memory": {"buffers": store.peak_memory_bytes, "drives": disk_bytes},
    }
