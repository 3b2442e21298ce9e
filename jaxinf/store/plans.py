"""``stream/<digest>.json``: the cuts with which a program is streamed.

Invariant: a plan is used as it was written, or refused by name.
"""

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from jaxinf.documents import Document
from jaxinf.errors import StoreError, StoreFormatError
from jaxinf.store.documents import read_document
from jaxinf.store.reader import Damage
from jaxinf.transfer import translated

_FOLDER = "stream"
_WHAT = "a plan of a streamed program"
_REMEDY = "remove the file, and the program is planned anew (its bits may differ then)"

_Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**62 - 1)]
_Length: TypeAlias = Annotated[int, Meta(ge=1, le=2**62 - 1)]


class KeptPlan(Document, frozen=True):
    """A plan of a streamed program, as a store keeps it.

    Attributes:
      version: of the plans that jaxinf makes.
      fingerprint: of the program.
      cuts: the nodes at which segments begin, and the number of nodes.
      mesh: devices along each axis of the mesh; empty without one.
    """

    version: _Count
    fingerprint: Annotated[str, Meta(max_length=256)]
    cuts: tuple[_Count, ...]
    mesh: dict[str, _Length] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.cuts[:1] != (0,) or [*self.cuts] != sorted({*self.cuts}):
            raise ValueError("cuts: expected numbers that rise from 0, found others")


def check_plans_folder(store: Path) -> Path:
    """Returns the folder of a store's plans, which may still be missing.

    Raises:
      StoreFormatError: There is something else.
    """
    folder = store / _FOLDER
    if os.path.lexists(folder) and not stat.S_ISDIR(folder.lstat().st_mode):
        raise StoreFormatError(
            f"{folder}: expected the folder of streamed programs, found something "
            "else, which is neither followed nor replaced; move it away"
        )
    return folder


def plans_folder(store: Path) -> Path:
    """Returns the folder of a store's plans; makes it if it is missing."""
    folder = check_plans_folder(store)
    with translated("creation", folder):
        folder.mkdir(exist_ok=True)
    return folder


def drive_of(folder: Path) -> str:
    """Names the drive of a folder for files of a step: a store's, or below a root."""
    return str(folder.parent if folder.name == _FOLDER else folder)


def read_plan(path: Path) -> KeptPlan:
    """Reads a plan; refuses one that is damaged, or something else."""
    return read_document(path, KeptPlan, _WHAT, _REMEDY)


def plan_damages(store: Path) -> Iterator[Damage]:
    """Yields the plans of a store that cannot be used."""
    folder = store / _FOLDER
    try:
        files = sorted(check_plans_folder(store).glob("*.json"))
    except StoreFormatError as error:
        yield Damage(store, folder, "streamed programs", str(error))
        return
    for file in files:
        try:
            read_plan(file)
        except StoreError as error:
            yield Damage(store, file, _WHAT, str(error))
