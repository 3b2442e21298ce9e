"""A run of several processes goes to a step that was exported; lost members are made.

Invariant: as for `jaxinf.store.rebuild_members`.
"""

from collections.abc import Sequence
from pathlib import Path

from jaxinf.errors import ExchangeError
from jaxinf.exchange.own_import import is_own_export, own_step
from jaxinf.exchange.step_files import DEFAULT_MEMORY_BYTES
from jaxinf.exchange.url_import import url_step
from jaxinf.exchange.url_manifest import export_url_at
from jaxinf.store import Rebuilt, rebuild_members
from jaxinf.typing import ProgressCallback


def import_into_run(
    source: str,
    run: Path,
    lost: Sequence[int] = (),
    *,
    csd_roots: Sequence[str] = (),
    may_discard: bool = False,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    progress: ProgressCallback | None = None,
) -> Rebuilt:
    """Makes lost members of a run again from an export, and brings all to its step.

    Args:
      source: the URL or the directory of an `export_url`, or a copy of a checkpoint
        whose state is in float32.
      run: the run's path, where all other members can be seen; it is closed.
      lost, csd_roots, may_discard: as for `jaxinf.store.rebuild_members`.
      memory_bytes: memory for data in transit.
      progress: called with the bytes done and in all, of each member in turn.

    Raises:
      ExchangeError: there is no complete export, or it is damaged.
      ValueError: too little memory, or a number or a root is wrong.
      StoreError, ProcessError: as `jaxinf.store.rebuild_members`.
    """
    url = export_url_at(source)
    if url is not None:
        step = url_step(url, memory_bytes=memory_bytes, progress=progress)
    elif is_own_export(Path(source)):
        step = own_step(Path(source), memory_bytes=memory_bytes, progress=progress)
    else:
        raise ExchangeError(
            f"{source}: expected an export of jaxinf with all state, in a directory or "
            "at a URL, found none; check the path"
        )
    return rebuild_members(
        run, step, lost, csd_roots=csd_roots, may_discard=may_discard
    )
