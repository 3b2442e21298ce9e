"""The symbolic links that the format has in a store.

Invariant: a link's expected target is computed from the manifest; no link is followed.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from jaxinf.store.directory import StoreDirectory
from jaxinf.store.zarr_metadata import ORBAX_ITEM, ORBAX_STATE

__all__ = ["link_problem", "step_links"]


def step_links(directory: StoreDirectory, place: str) -> Iterator[tuple[Path, Path]]:
    """Yields the links of a step, each with its expected target.

    Args:
      directory: the store.
      place: a slot, ``checkpoints/NAME`` or ``snapshots/ID``.
    """
    root = directory.step_path(place)
    if directory.manifest.csds:
        for number, leaf, _ in directory.leaves():
            for state in leaf.states:
                for chunk in leaf.held:
                    key = directory.state_chunk(number, chunk, state).key
                    real = directory.chunk_file(place, number, chunk, state.name)
                    yield root / leaf.array_name(state.name) / key, real
    if place.startswith("checkpoints/"):
        item = root / ORBAX_ITEM
        yield root / ORBAX_STATE, Path(ORBAX_ITEM)
        yield item / "_METADATA", Path("../_METADATA")
        for leaf in directory.manifest.leaves:
            for state in leaf.states:
                name = leaf.array_name(state.name)
                yield item / name, Path("..", name)


def link_problem(link: Path, expected: Path) -> str | None:
    """Describes the error of a link; None if it is correct."""
    try:
        found = os.readlink(link)
    except FileNotFoundError:
        return f"expected a symbolic link to {expected}, found nothing"
    except OSError:
        return f"expected a symbolic link to {expected}, found another file"
    if found != str(expected):
        return f"expected a symbolic link to {expected}, found one to {found}"
    return None
