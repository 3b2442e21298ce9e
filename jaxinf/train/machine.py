"""A machine by eight numbers.

Invariant: a number that is not known is None.
"""

import os
from pathlib import Path
from typing import Annotated, TypeAlias

import jax
import msgspec

from jaxinf.command_line import UsageError
from jaxinf.documents import Document, decode, encode

_Number: TypeAlias = Annotated[float, msgspec.Meta(gt=0, lt=1e30)] | None


class Machine(Document, frozen=True):
    """Memory and rates; ``jaxinf doctor --json FILE`` measures them.

    Attributes:
      host_bytes: Memory of the host.
      device_bytes: Memory of the JAX device; None if it computes in the host's.
      drive_bytes_per_s: Of each drive, reads and writes in equal parts.
      drive_rated_write_bytes: That may be written to each drive in its life.
      link_bytes_per_s: Between host and JAX device, each way.
      operations_per_s: Of a model's loss and gradient, in the run's dtype.
      params_per_s: Params that all cores update, by AdamW with float32 state.
      commit_s: Seconds of a commit.
    """

    host_bytes: _Number = None
    device_bytes: _Number = None
    drive_bytes_per_s: _Number = None
    drive_rated_write_bytes: _Number = None
    link_bytes_per_s: _Number = None
    operations_per_s: _Number = None
    params_per_s: _Number = None
    commit_s: _Number = None


def this_machine() -> Machine:
    """Returns this machine's memory; no rate of it is known."""
    device, limit = jax.devices()[0], None
    if device.platform != "cpu":
        limit = (device.memory_stats() or {}).get("bytes_limit")
    return Machine(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), limit)


def read_machine(path: Path) -> Machine:
    """Reads a machine's file: a JSON object with fields of `Machine`.

    Raises:
      UsageError: Names the file, and the field that is wrong.
    """
    try:
        return decode(path.expanduser().read_bytes(), Machine)
    except (OSError, ValueError, RuntimeError) as error:
        found = error.strerror if isinstance(error, OSError) else error
        raise UsageError(
            f"--machine {path}: expected numbers of a machine "
            f"({', '.join(Machine.__struct_fields__)}), found: {found}; "
            "'jaxinf doctor --json FILE' writes them"
        ) from error


def write_machine(machine: Machine, path: Path) -> None:
    """Writes what `read_machine` reads, without what is not known."""
    path.write_bytes(encode(machine))
