"""Compares a store with the options and the optimizer that it is opened with.

Invariant: nothing is written here, and a refusal names both sides and a remedy.
"""

import logging
from dataclasses import replace

from jaxinf.engine.description import StoreDescription
from jaxinf.engine.options import StoreOptions
from jaxinf.errors import DeviceConfigurationError, StoreMismatchError
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


def check_form(options: StoreOptions, manifest: Manifest) -> None:
    """Refuses a store on other CSDs, or in another format, than is asked for."""
    path, wanted, found = options.path, options.state, store_codecs(manifest)
    given = tuple(str(root) for root in options.csds)
    if given and given != manifest.csds:
        raise StoreMismatchError(
            f"{path}: the store's CSD roots are "
            f"{list(manifest.csds) or 'the store itself'}, given were "
            f"{list(given)}; leave csds out when opening an existing store"
        )
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


def master_codec(options: StoreOptions, description: StoreDescription) -> str:
    """Returns the codec of the master of bfloat16 params in a new store.

    Raises:
      ValueError: no such params are there to do without a master.
    """
    if options.master != "none":
        return "split" if options.csd.codes_params else ""
    dtypes = {leaf.dtype for leaf in description.leaves}
    if "bfloat16" not in dtypes or "float16" in dtypes:
        raise ValueError(
            f"{options.path}: master='none': expected params in bfloat16 (float32 "
            "ones, if any, are their own master), found "
            f"{', '.join(sorted(dtypes)) or 'no params'}; leave it out"
        )
    return "bf16"


def check_same(
    directory: StoreDirectory, description: StoreDescription, remedy: str = ""
) -> None:
    """Refuses a store of another optimizer or tree; shows the difference.

    Args:
      remedy: a further one for the message.
    """
    held, wanted = directory.manifest, description.contents
    _check_average(directory, description)
    lines = held.tree_difference(wanted) or held.kernel_difference(wanted)
    if not lines:
        return
    shown = "\n  ".join(lines[:40])
    is_newer = dict(held.created_by) != dict(wanted.created_by)
    if is_newer and not held.tree_difference(wanted):
        _LOG.warning(
            "%s: the optimizer's equations differ from those the store was made with; "
            "so do the versions of jax or optax (%s then, %s now). The state has the "
            "same form, so training goes on:\n  %s",
            directory.path,
            dict(held.created_by),
            dict(wanted.created_by),
            shown,
        )
        return
    raise StoreMismatchError(
        f"{directory.path}: the store holds the state of another optimizer or model "
        f"than it is opened with:\n  {shown}\nOpen it with the optimizer and the model "
        f"that it was made with, or use another store{remedy}"
    )


def _check_average(directory: StoreDirectory, description: StoreDescription) -> None:
    """Refuses a store with another average than is asked for, or none, or one."""
    path, held = directory.path, directory.manifest
    names = {state.name for leaf in description.leaves for state in leaf.states}
    asked = (description.average or "fp32") if AVERAGE in names else "none"
    found = "none"
    if AVERAGE in held.state_names:
        found = store_codecs(held).average or "fp32"
        coded = (coded_leaf(leaf, Codecs(average="bf16")) for leaf in held.leaves)
        if asked != "none" and not any(leaf.state(AVERAGE).codec for leaf in coded):
            found = asked  # no leaf is large enough for fewer bits
    if found != asked and held.leaves:
        raise StoreMismatchError(
            f"{path}: expected an average of the params in the form {asked!r}, found "
            f"{found!r}; give smart_update(…, average=) as the store was made, or make "
            f'another from it: "jaxinf store copy {path} NEW --average {asked}" (one '
            "that begins is a copy of the params)"
        )


def check_division(directory: StoreDirectory, description: StoreDescription) -> None:
    """Refuses a run whose mesh gives the chunks of a member to other processes."""
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
