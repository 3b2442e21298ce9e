"""Retention: the committed steps that a store keeps as checkpoints, and which go.

Invariant: a step that is due is committed and has its checkpoint before the next step
begins; of all checkpoints only those named by their number are removed here.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from jaxinf.store import (
    StoreDirectory,
    check_free_space,
    checkpoint_names,
    remove_checkpoint,
    required_bytes,
    save_checkpoint,
)

KeepSteps: TypeAlias = int | tuple[int, int] | tuple[int, int, int]
"""Interval, number and offset of the kept steps; see `jaxinf.open_store`."""


@dataclass(frozen=True)
class Retention:
    """The steps that are kept as checkpoints named by their number.

    Attributes:
      every: steps between those that the store keeps by itself; 0: it keeps none.
      most: how many stay, the latest ones, whoever made them; 0: all.
      offset: the first that the store keeps by itself.
    """

    every: int = 0
    most: int = 0
    offset: int = 0

    @classmethod
    def of(cls, keep_steps: KeepSteps | None) -> "Retention":
        """Reads the option of `jaxinf.open_store`.

        Raises:
          ValueError: it is no such numbers.
        """
        if keep_steps is None:
            return cls()
        given = (keep_steps, 2) if isinstance(keep_steps, int) else tuple(keep_steps)
        are_numbers = len(given) in (2, 3) and all(type(n) is int for n in given)
        every, most, offset = (*given, 0, 0, 0)[:3]
        is_wrong = not are_numbers or keep_steps == 0 or min(given) < 0
        if is_wrong or offset >= max(1, every):
            raise ValueError(
                f"keep_steps={keep_steps!r}: expected a number k of steps, (k, n) for "
                "the last n multiples of k, or (k, n, offset) for steps offset, offset "
                "+ k, …; k=0 for those alone that the program keeps, n=0 for all, the "
                "offset less than k"
            )
        return cls(every, most, offset)

    def is_due(self, step: int) -> bool:
        """Whether the store keeps a step by itself, and therefore commits it."""
        return bool(self.every) and step % self.every == self.offset

    def surplus(self, names: Iterable[str], step: int) -> list[str]:
        """Returns the checkpoints that go when a step has been kept.

        Those of later steps are of another run, which went back.
        """
        held = [number for number in _numbers(names) if number <= step]
        return [str(number) for number in held[: -self.most]] if self.most else []


def keep_step(directory: StoreDirectory, retention: Retention) -> None:
    """Keeps the committed step under its number, unless it is; removes the surplus."""
    remove_surplus(directory, retention, save_checkpoint(directory, overwrite=True))


def remove_surplus(directory: StoreDirectory, retention: Retention, made: str) -> None:
    """Removes the checkpoints that no longer stay, now that one was made."""
    if made.isdecimal():
        for old in retention.surplus(checkpoint_names(directory), int(made)):
            remove_checkpoint(directory, old)


def archive(directory: StoreDirectory, step: int) -> str:
    """Keeps the committed step of an ending run under a new name; returns the name."""
    names = set(checkpoint_names(directory))
    number, name = 1, f"step-{step}-before-restart"
    while name in names:
        number += 1
        name = f"step-{step}-before-restart-{number}"
    return save_checkpoint(directory, name)


def check_room(retention: Retention, directory: StoreDirectory) -> None:
    """Refuses a store without room for its kept steps beside its two slots.

    Raises:
      StoreSpaceError: gives the bytes needed and the bytes free.
    """
    num_steps = retention.most - len(_numbers(checkpoint_names(directory)))
    if num_steps <= 0:
        return
    needs = required_bytes(directory).items()
    check_free_space(
        {place: num_bytes // 2 * num_steps for place, num_bytes in needs},
        f"keep_steps keeps {retention.most} steps; those to come need, beside the two "
        "slots,",
        "free some, keep fewer steps, or choose more CSD roots",
    )


def _numbers(names: Iterable[str]) -> list[int]:
    return sorted(int(n) for n in names if n.isdecimal() and n == str(int(n)))
