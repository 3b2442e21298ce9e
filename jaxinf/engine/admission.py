"""Checks whether a store can be opened, or its place can get one.

Invariant: nothing is written here.
"""

import fnmatch
import logging
from dataclasses import replace
from pathlib import Path

from jaxinf.engine.description import StoreDescription
from jaxinf.engine.member_opening import division_advice
from jaxinf.engine.options import StoreOptions, check_writable
from jaxinf.errors import (
    DeviceConfigurationError,
    StoreFormatError,
    StoreMismatchError,
)
from jaxinf.store import (
    CODECS,
    Codecs,
    Manifest,
    StoreDirectory,
    chunk_holders,
    coded_leaf,
    store_codecs,
)
from jaxinf.typing import AVERAGE

_LOG = logging.getLogger("jaxinf")

# Files that may be in the directory of a new store.
_HARMLESS = ("lost+found", "lock", "publish.lock", "checkpoints.lock")
_HARMLESS += ("current.tmp", ".jaxinf*")


def check_place(path: Path) -> None:
    """Refuses a path that is neither a store nor a place for one."""
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(
            f"store {path}: expected a directory or nothing there yet, found a file; "
            "give another path"
        )
    check_writable(path)
    if not path.exists() or (path / "jaxinf.json").exists():
        return
    if any(path.glob("process-[0-9]*/jaxinf.json")):
        num = len(list(path.glob("process-[0-9]*")))
        raise StoreFormatError(
            f"store {path}: expected the store of one process, found the members of a "
            f"run of several ({num} of them); start as many processes, and call "
            "jax.distributed.initialize before open_store, or "
            + division_advice(path, 1)
        )
    foreign = sorted(
        entry.name
        for entry in path.iterdir()
        if not any(fnmatch.fnmatchcase(entry.name, known) for known in _HARMLESS)
    )
    # A second look, since another process may have begun to make the store.
    if foreign and not (path / "jaxinf.json").exists():
        raise StoreFormatError(
            f"store {path}: expected a jaxinf store or an empty directory, found "
            f"neither jaxinf.json nor emptiness ({', '.join(foreign[:3])}, …); give "
            "another path"
        )


def check_roots(options: StoreOptions, manifest: Manifest) -> None:
    """Refuses CSD roots that differ from the store's."""
    given = tuple(str(root) for root in options.csd_roots)
    if given and given != manifest.csds:
        raise StoreMismatchError(
            f"{options.path}: the store's CSD roots are "
            f"{list(manifest.csds) or 'the store itself'}, given were "
            f"{list(given)}; leave csds out when opening an existing store"
        )


def check_format(options: StoreOptions, manifest: Manifest) -> None:
    """Refuses a store with its state in another format than requested."""
    path, wanted = options.path, options.state
    found = store_codecs(manifest)
    asked = replace(found, state=wanted if wanted in CODECS else "")
    if wanted is not None and any(
        leaf != coded_leaf(leaf, asked) for leaf in manifest.leaves
    ):
        raise StoreMismatchError(
            f"{path}: the store holds its state as {found.state or 'fp32'}, asked for "
            f"was state={wanted!r}; leave it out, or make a store of the other kind "
            f'from this one ("jaxinf store copy {path} NEW --state {wanted}")'
        )
    if options.master == "none" and found.master != "bf16":
        raise StoreMismatchError(
            f"{path}: the store has master params, asked for was master='none'; leave "
            "it out, or make a store without from this one "
            f'("jaxinf store copy {path} NEW --master none")'
        )


def check_division(directory: StoreDirectory, description: StoreDescription) -> None:
    """Refuses a run whose mesh gives the chunks of a member to other processes.

    Raises:
      StoreMismatchError: a chunk's owner has no JAX device with it.
      DeviceConfigurationError: the run has no mesh of several processes.
    """
    if directory.manifest.member is None:
        return
    for record, leaf in zip(directory.manifest.leaves, description.leaves, strict=True):
        if not leaf.holders:
            raise DeviceConfigurationError(
                f"{directory.path}: expected params on a mesh of all processes of the "
                "run, found none; put them on one"
            )
        places = chunk_holders(record, leaf.shard_counts, leaf.holders)
        for number, holders in enumerate(places):
            if record.owners[number] not in holders:
                raise StoreMismatchError(
                    f"{directory.path}: leaf {leaf.name}: chunk {number} is process "
                    f"{record.owners[number]}'s, and on this run's mesh its params are "
                    f"in process {', '.join(map(str, holders))}; use the mesh and the "
                    "shardings that the store was made with"
                )


def check_same(directory: StoreDirectory, description: StoreDescription) -> None:
    """Refuses a store of another optimizer or tree; shows the difference."""
    held, wanted = directory.manifest, description.contents
    _check_average(directory, description)
    lines = held.tree_difference(wanted)
    if not lines:
        lines = held.kernel_difference(wanted)
        if lines and dict(held.created_by) != dict(wanted.created_by):
            _LOG.warning(
                "%s: the optimizer's equations differ from those the store was made "
                "with; so do the versions of jax or optax (%s then, %s now). The state "
                "has the same form, so training goes on:\n  %s",
                directory.path,
                dict(held.created_by),
                dict(wanted.created_by),
                "\n  ".join(lines),
            )
            return
    if lines:
        shown = "\n  ".join(lines[:40])
        raise StoreMismatchError(
            f"{directory.path}: the store holds the state of another optimizer or "
            f"model than it is opened with:\n  {shown}\nOpen it with the optimizer and "
            "the model that it was made with, or use another store"
        )


def _check_average(directory: StoreDirectory, description: StoreDescription) -> None:
    """Refuses a store with an average where none is asked for, and the reverse."""
    path, held = directory.path, directory.manifest
    forms = {"": "fp32", "bf16": "bf16"}
    found = forms[store_codecs(held).average] if AVERAGE in held.state_names else None
    names = {state.name for leaf in description.leaves for state in leaf.states}
    asked = forms[description.average] if AVERAGE in names else None
    is_same = found == asked or (None not in (found, asked) and _is_small(held))
    if is_same or not held.leaves:
        return
    choice = asked or "none"
    remedy = f'"jaxinf store copy {path} NEW --average {choice}" makes a store with'
    if found is None:
        remedy += " one, which begins as a copy of the params; or leave average out"
    elif asked is None:
        remedy += "out; or give average=jaxinf.ema(…)"
    else:
        remedy += f" this form; or give form={found!r}"
    raise StoreMismatchError(
        f"{path}: the store has {_average_text(found)} of the params, asked for was "
        f"{_average_text(asked)}; {remedy}"
    )


def _is_small(held: Manifest) -> bool:
    """Whether no leaf is large enough for an average in fewer bits."""
    coded = [coded_leaf(leaf, Codecs(average="bf16")) for leaf in held.leaves]
    return all(leaf.state(AVERAGE).codec == "" for leaf in coded)


def _average_text(form: str | None) -> str:
    return "no average" if form is None else f"an average in {form}"
