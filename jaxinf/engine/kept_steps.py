"""Keeps steps to which a program may come back, as checkpoints of the store.

Steps at an interval, by `keep_steps`, are named by their number; the steps of a
program's own checkpoints ``program-STEP``. Invariant: a kept step is committed and has
its checkpoint before the next step begins; of all checkpoints only such ones are
removed here.
"""

import logging
from functools import cached_property

from jaxinf.engine.opened import OpenStore
from jaxinf.engine.options import StoreOptions
from jaxinf.errors import StoreError, StoreSpaceError
from jaxinf.store import (
    SAVED_PREFIX,
    StoreDirectory,
    can_link,
    check_free_space,
    checkpoint_names,
    find_checkpoint,
    remove_checkpoint,
    required_bytes,
    save_checkpoint,
)

__all__ = ["SavedSteps", "archive", "check_room", "keep_step"]

_LOG = logging.getLogger("jaxinf")


def keep_step(opened: OpenStore) -> None:
    """Keeps the committed step as a checkpoint, and removes the oldest kept one."""
    directory, step = opened.directory, opened.commit.step
    if not _is_new(opened, str(step)):
        return
    save_checkpoint(directory, str(step))
    kept = [n for n in _kept(directory, opened.options) if n <= step]
    for old in kept[: -opened.options.num_kept]:
        remove_checkpoint(directory, str(old))


class SavedSteps:
    """The steps of a program's own checkpoints, kept since a store was opened.

    Args:
      opened: the open store, at the step from which the run goes on.
    """

    def __init__(self, opened: OpenStore) -> None:
        self._opened = opened
        self._first = opened.commit.step
        self._made: set[int] = set()
        self._has_warned = False

    @cached_property
    def _can_link(self) -> bool:
        directory = self._opened.directory
        return all(
            can_link(directory.csd_directory(csd)) for csd in range(directory.num_csds)
        )

    def tell_room(self) -> None:
        """Logs a lack of room for these steps."""
        opened = self._opened
        num = opened.options.keep_saved
        if not num:
            return
        if not self._can_link:
            self._warn("the file system has no hard links, so each would be a copy")
            return
        missing = num - len(self._held())
        try:
            _check_free(opened.directory, missing, f"keep_saved={num}: the steps of")
        except StoreSpaceError as error:
            self._warn(str(error))

    def keep(self) -> None:
        """Keeps the committed step, for which no bytes are copied.

        What prevents it is logged, since the step itself is committed.
        """
        try:
            self._keep()
        except (StoreError, ValueError) as error:
            self._warn(str(error))

    def _keep(self) -> None:
        opened, directory = self._opened, self._opened.directory
        step, num = opened.commit.step, opened.options.keep_saved
        if step in self._made or not num or not self._can_link:
            return
        if not _is_new(opened, _name(step)):
            return
        # Before its first step the run may still go back to one of the others.
        others = self._held() if step != self._first else []
        while True:
            try:
                save_checkpoint(directory, _name(step), is_own=True)
                break
            except StoreSpaceError:
                if not others:
                    raise
                remove_checkpoint(directory, _name(others.pop(0)))
        self._made.add(step)
        for old in others[: max(0, len(others) + 1 - num)]:
            remove_checkpoint(directory, _name(old))

    def _held(self) -> list[int]:
        """Returns the kept steps; those that the run has left behind come first."""
        steps = _numbers(self._opened.directory, SAVED_PREFIX)
        return sorted(steps, key=lambda n: (n <= self._first or n in self._made, n))

    def _warn(self, why: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            options = self._opened.options
            _LOG.warning(
                "%s: not all of the last %d steps that the program's own checkpoints "
                "are of can be kept: %s. After a kill the program can go on from the "
                "store alone (store.params, tx.init), or from a checkpoint whose step "
                "is kept; keep_saved=0 keeps none",
                options.path,
                options.keep_saved,
                why,
            )


def _name(step: int) -> str:
    return f"{SAVED_PREFIX}{step}"


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
    _check_free(
        directory,
        options.num_kept - there,
        f"keep_steps={options.keep_steps}: the steps to be kept",
    )


def _check_free(directory: StoreDirectory, num_steps: int, what: str) -> None:
    if num_steps <= 0:
        return
    needs = required_bytes(directory).items()
    check_free_space(
        {place: num_bytes // 2 * num_steps for place, num_bytes in needs},
        f"{what} beside the two slots need",
        "free some, keep fewer steps, or choose more CSD roots",
    )


def _is_new(opened: OpenStore, name: str) -> bool:
    """Whether no checkpoint of a name has the committed step.

    One of a run that was rolled back is removed.
    """
    if name not in checkpoint_names(opened.directory):
        return True
    held = find_checkpoint(opened.directory, name)
    if held.committed_at == opened.commit.committed_at:
        return False
    remove_checkpoint(opened.directory, name)
    return True


def _kept(directory: StoreDirectory, options: StoreOptions) -> list[int]:
    return [s for s in _numbers(directory, "") if s and options.keeps(s)]


def _numbers(directory: StoreDirectory, prefix: str) -> list[int]:
    """Returns the numbers that follow a prefix in names of checkpoints."""
    names = checkpoint_names(directory)
    ends = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
    return sorted(int(n) for n in ends if n.isdecimal() and n == str(int(n)))
