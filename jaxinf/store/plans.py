"""``stream/<digest>.json``: the cuts with which a program is streamed.

Invariant: a plan is used as it was written, or refused by name.
"""

import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxinf.errors import StoreError, StoreFormatError
from jaxinf.io.failures import translated
from jaxinf.schema import SchemaError
from jaxinf.store.damage import Damage
from jaxinf.store.documents import check_seal, no_document, read_document
from jaxinf.store.schemas import PLAN

_FOLDER = "stream"
_WHAT = "a plan of a streamed program"
_REMEDY = "remove the file, and the program is planned anew (its bits may differ then)"


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
    """Returns the folder of a store's plans; makes it if it is missing.

    Raises:
      StoreFormatError: There is something else.
      StoreError: It cannot be made.
    """
    folder = check_plans_folder(store)
    with translated("creation", folder):
        folder.mkdir(exist_ok=True)
    return folder


def drive_of(folder: Path) -> str:
    """Names the drive of a folder for files of a step: a store's, or below a root."""
    return str(folder.parent if folder.name == _FOLDER else folder)


def read_plan(path: Path) -> Mapping[str, Any]:
    """Reads a plan.

    Raises:
      StoreFormatError: It is damaged, or something else.
    """
    raw, held = read_document(path, _WHAT, _REMEDY)
    check_seal(path, raw, _WHAT, _REMEDY)
    try:
        PLAN.check(held)
        if held["cuts"][:1] != [0] or held["cuts"] != sorted(set(held["cuts"])):
            raise SchemaError("cuts: expected numbers that rise from 0, found others")
    except SchemaError as error:
        raise no_document(path, _WHAT, _REMEDY, error) from error
    return held


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
