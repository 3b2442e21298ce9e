"""The options of a store, checked before a file is touched.

Invariant: no option is ignored, and the error for a bad one names it.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from jaxinf.csd import CsdSpec, parse_csd
from jaxinf.errors import ExchangeError
from jaxinf.exchange import ObjectStore
from jaxinf.store import (
    StateFormat,
    StoreDirectory,
    check_roots,
    checkpoint_names,
    remove_checkpoint,
)
from jaxinf.terminal import check_choice
from jaxinf.transfer import existing_parent

# Arguments of `jaxinf.open_store`, which describes them.
Durability: TypeAlias = Literal["step", "checkpoint"] | int
MasterChoice: TypeAlias = Literal["auto", "none"]
KeepSteps: TypeAlias = int | tuple[int, int]

MIN_WORKERS, WORKERS_PER_DRIVE = 4, 2
"""Workers, each of which has one request at a drive at a time."""

DEFAULT_MEMORY_BYTES = 512 << 20


@dataclass(eq=False)
class StoreOptions:
    """The options of `jaxinf.open_store`. Checked on construction.

    Attributes:
      steps_per_commit: Steps from commit to commit; None if only calls commit.
      rewrites_steps: Whether a step may overwrite one that is not committed.
      keep_every: Interval of the steps that are kept as checkpoints; 0 for none.
      num_kept: Number of checkpoints named by their step that stay; 0 for all.

    Raises:
      ValueError: An option is invalid; names it.
    """

    path: Path
    csds: tuple[Path, ...] = ()
    csd: CsdSpec = field(default_factory=lambda: parse_csd("host"))
    memory_bytes: int = DEFAULT_MEMORY_BYTES
    durability: Durability = "step"
    restore: str | None = None
    master: MasterChoice = "auto"
    state: StateFormat | None = None
    keep_steps: KeepSteps | None = None
    export_every: int = 0
    export_to: str | None = None

    def __post_init__(self) -> None:
        check_roots(self.csds)
        for root in self.csds:
            check_writable(root)
        check_choice("master", self.master, MasterChoice)
        if self.state is not None:
            check_choice("state", self.state, StateFormat)
        self.keep_every, self.num_kept = _parse_keep_steps(self.keep_steps)
        self.steps_per_commit = _parse_durability(self.durability)
        self.rewrites_steps = self.steps_per_commit != 1
        if self.export_every != 0 or self.export_to is not None:
            _check_exports(self.export_every, self.export_to)

    def keeps(self, step: int) -> bool:
        """Whether a step is kept as a checkpoint, and therefore committed."""
        return self.keep_every > 0 and step % self.keep_every == 0

    def exports(self, step: int) -> bool:
        """Whether a step is due for export, and therefore committed."""
        return self.export_every > 0 and step > 0 and step % self.export_every == 0

    def num_workers_for(self, num_csds: int) -> int:
        return max(MIN_WORKERS, WORKERS_PER_DRIVE * num_csds)

    def remove_surplus_checkpoints(self, directory: StoreDirectory, new: str) -> None:
        """Removes old checkpoints beyond `num_kept`, once a new one is made.

        Only those named by their step go. Those of later steps stay: they are of a run
        that has gone back.
        """
        if new.isdecimal() and self.num_kept:
            names = checkpoint_names(directory)
            names = [n for n in names if n.isdecimal() and n == str(int(n))]
            steps = sorted(step for step in map(int, names) if step <= int(new))
            for step in steps[: -self.num_kept]:
                remove_checkpoint(directory, str(step))


def _parse_keep_steps(keep_steps: KeepSteps | None) -> tuple[int, int]:
    if keep_steps is None:
        return 0, 0
    pair = (keep_steps, 2) if isinstance(keep_steps, int) else tuple(keep_steps)
    are_numbers = len(pair) == 2 and all(type(n) is int and n >= 0 for n in pair)
    if keep_steps == 0 or not are_numbers:
        raise ValueError(
            f"keep_steps={keep_steps!r}: expected a number k of steps, or (k, n) for "
            "the last n multiples of k; k=0 for those alone that the program keeps, "
            "n=0 for all"
        )
    return pair[0], pair[1]


def _parse_durability(durability: Durability) -> int | None:
    if durability in ("step", "checkpoint"):
        return 1 if durability == "step" else None
    if type(durability) is not int or durability < 1:
        raise ValueError(
            f'durability={durability!r}: expected "step", "checkpoint", or a number '
            "of steps, at least 1"
        )
    return durability


def _check_exports(every: int, url: str | None) -> None:
    if type(every) is not int or every < 1 or url is None:
        raise ValueError(
            "expected export_every and export_to together, at least 1 step between "
            f"exports and their URL, found export_every={every!r}, export_to="
            f"{'none' if url is None else 'a URL'}"
        )
    try:
        ObjectStore(url)
    except ExchangeError as error:
        raise ValueError(f"export_to: {error}") from None


def check_writable(path: Path) -> None:
    """Refuses a path that is not a writable directory and cannot become one."""
    parent = existing_parent(path)
    if not parent.is_dir():
        raise NotADirectoryError(
            f"{path}: expected a directory, or a place for one, found the file {parent}"
            "; give another path"
        )
    if not os.access(parent, os.W_OK | os.X_OK):
        raise PermissionError(
            f"{path}: expected a place that can be written to, found {parent} "
            "read-only for this user; change its permissions, remount it, or give "
            "another path"
        )
