"""Keeps steps to which a program may come back, as checkpoints named by their number.

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


def keep_step(opened: OpenStore) -> None:
    """Keeps the committed step as a checkpoint, and removes the oldest kept one."""
    if not keep_number(opened):
        return
    directory, step = opened.directory, opened.commit.step
    kept = [n for n in _kept(directory, opened.options) if n <= step]
    for old in kept[: -opened.options.num_kept]:
        remove_checkpoint(directory, str(old))


def keep_number(opened: OpenStore) -> bool:
    """Keeps the committed step under its number, unless it is; returns whether it did.

    A checkpoint of that number of a run that was rolled back is replaced.
    """
    directory, name = opened.directory, str(opened.commit.step)
    if name in checkpoint_names(directory):
        held = find_checkpoint(directory, name)
        if held.committed_at == opened.commit.committed_at:
            return False
        remove_checkpoint(directory, name)
    save_checkpoint(directory, name)
    return True


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
    num_steps = options.num_kept - there
    if num_steps <= 0:
        return
    needs = required_bytes(directory).items()
    check_free_space(
        {place: num_bytes // 2 * num_steps for place, num_bytes in needs},
        f"keep_steps={options.keep_steps}: the steps to be kept beside the two slots "
        "need",
        "free some, keep fewer steps, or choose more CSD roots",
    )


def _kept(directory: StoreDirectory, options: StoreOptions) -> list[int]:
    names = checkpoint_names(directory)
    steps = [int(n) for n in names if n.isdecimal() and n == str(int(n))]
    return sorted(step for step in steps if step and options.keeps(step))
