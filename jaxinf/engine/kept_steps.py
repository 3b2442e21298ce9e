"""Keeps the last few steps whose numbers are multiples of a number.

Invariant: a kept step is committed and has its checkpoint before the next step begins;
of all checkpoints only such ones are removed here.
"""

from jaxinf.engine.opened import OpenStore
from jaxinf.engine.options import StoreOptions
from jaxinf.store import (
    StoreDirectory,
    check_free_space,
    checkpoint_names,
    find_checkpoint,
    remove_checkpoint,
    required_bytes,
    save_checkpoint,
)

__all__ = ["archive", "check_room", "is_kept", "keep_step"]


def is_kept(options: StoreOptions, step: int) -> bool:
    """Whether a step must be kept, and therefore committed."""
    return bool(options.keep_every) and step % options.keep_every == 0


def keep_step(opened: OpenStore) -> None:
    """Keeps the committed step as a checkpoint, and removes the oldest kept one.

    A checkpoint of the same name is of a run that was rolled back; it is replaced.
    """
    directory, step = opened.directory, opened.commit.step
    name = str(step)
    if name in checkpoint_names(directory):
        held = find_checkpoint(directory, name)
        if held.committed_at == opened.commit.committed_at:
            return
        remove_checkpoint(directory, name)
    save_checkpoint(directory, name)
    for old in _kept(directory, opened.options, step)[: -opened.options.num_kept]:
        remove_checkpoint(directory, str(old))


def archive(directory: StoreDirectory, step: int) -> str:
    """Keeps the committed step of an ending run under a new name; returns the name."""
    names = set(checkpoint_names(directory))
    number, name = 1, f"step-{step}-before-restart"
    while name in names:
        number += 1
        name = f"step-{step}-before-restart-{number}"
    return save_checkpoint(directory, name)


def check_room(options: StoreOptions, directory: StoreDirectory) -> None:
    """Refuses a store without room for its kept steps beside its two slots.

    Raises:
      StoreSpaceError: gives the bytes needed and the bytes free.
    """
    there = len(_kept(directory, options)) if options.keep_every else 0
    missing = options.num_kept - there
    if missing <= 0:
        return
    needs = required_bytes(directory).items()
    check_free_space(
        {place: num_bytes // 2 * missing for place, num_bytes in needs},
        f"keep_steps={(options.keep_every, options.num_kept)}: the steps to be kept "
        "beside the two slots need",
        "free some, keep fewer steps, or choose more CSD roots",
    )


def _kept(
    directory: StoreDirectory, options: StoreOptions, last: int | None = None
) -> list[int]:
    names = [name for name in checkpoint_names(directory) if name.isdecimal()]
    steps = sorted(int(name) for name in names if name == str(int(name)))
    return [
        s for s in steps if is_kept(options, s) and s and (last is None or s <= last)
    ]
