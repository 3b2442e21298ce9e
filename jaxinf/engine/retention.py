"""Which committed steps stay as checkpoints, and which go.

Invariant: of all checkpoints only those named by their number are removed here.
"""

from collections.abc import Iterable

from jaxinf.store import (
    StoreDirectory,
    check_free_space,
    checkpoint_names,
    remove_checkpoint,
    required_bytes,
    save_checkpoint,
)


def remove_surplus(directory: StoreDirectory, num_kept: int, made: str) -> None:
    """Removes the checkpoints that no longer stay, now that one was made.

    Args:
      num_kept: how many stay of those named by their number; 0 for all.
      made: name of the one just made.
    """
    if made.isdecimal():
        for old in surplus(checkpoint_names(directory), num_kept, int(made)):
            remove_checkpoint(directory, old)


def surplus(names: Iterable[str], num_kept: int, step: int) -> list[str]:
    """Returns the checkpoints that go when a step has been kept.

    Those of later steps are of another run, which went back.
    """
    held = [str(number) for number in _numbers(names) if number <= step]
    return held[:-num_kept] if num_kept else []


def archive(directory: StoreDirectory, step: int) -> str:
    """Keeps the committed step of an ending run under a new name; returns the name."""
    names = set(checkpoint_names(directory))
    number, name = 1, f"step-{step}-before-restart"
    while name in names:
        number += 1
        name = f"step-{step}-before-restart-{number}"
    return save_checkpoint(directory, name)


def check_room(num_kept: int, directory: StoreDirectory) -> None:
    """Refuses a store without room for its kept steps beside its two slots.

    Raises:
      StoreSpaceError: gives the bytes needed and the bytes free.
    """
    num_steps = num_kept - len(_numbers(checkpoint_names(directory)))
    if num_steps <= 0:
        return
    needs = required_bytes(directory).items()
    check_free_space(
        {place: num_bytes // 2 * num_steps for place, num_bytes in needs},
        f"keep_steps keeps {num_kept} steps; those to come need, beside the two slots,",
        "free some, keep fewer steps, or choose more CSD roots",
    )


def _numbers(names: Iterable[str]) -> list[int]:
    return sorted(int(n) for n in names if n.isdecimal() and n == str(int(n)))
