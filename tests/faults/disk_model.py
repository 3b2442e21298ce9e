"""A disk in memory, and the states that a crash may leave.

A disk is a mapping of keys to values: a name in a directory to an inode, a page of a
file to its bytes, a file to its length. An operation is one or more *pieces*, each of
which sets some keys atomically. Until a barrier covers a piece, it may be on the drive
or not, independently of others; only pieces that set the same key keep their order. So
writes are cut, torn at pages and reordered between barriers as freely as POSIX allows,
and more freely than by a journalling file system.

Invariant: a crash state consists of the durable pieces and a set of the others that has
with each piece all earlier ones of the same keys.
"""

import os
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

PAGE_BYTES = 4096
ROOT = 0


@dataclass(frozen=True)
class Piece:
    """An atomic change of a drive, of values by key.

    Keys are ("name", inode, text), ("page", inode, number), ("size", inode).
    """

    values: Mapping[tuple, Any]
    covers: frozenset[Hashable]  # by whose barriers: inodes, a file system's ("fs", n)


@dataclass(frozen=True)
class Barrier:
    """Makes all earlier pieces that `of` covers durable."""

    of: Hashable


@dataclass
class Log:
    """The operations of a program on a disk, and its knowledge by their number.

    A kind, by inode, is "file", "directory", or a symlink's target after "-> ".
    """

    kinds: dict[int, str] = field(default_factory=lambda: {ROOT: "directory"})
    initial: dict[tuple, Any] = field(default_factory=dict)
    operations: list[list[Piece] | Barrier] = field(default_factory=list)
    marks: list[tuple[int, Any]] = field(default_factory=list)

    def mark(self, value):
        self.marks.append((len(self.operations), value))

    def known_at(self, cut):
        """Returns the last mark before a cut and the next one; None if missing."""
        before = [value for at, value in self.marks if at <= cut]
        after = [value for at, value in self.marks if at > cut]
        return (before[-1] if before else None, after[0] if after else None)

    def cuts(self):
        """Yields every boundary between two operations, and both ends."""
        pieces: list[Piece] = []
        durable: set[int] = set()
        yield Cut(self, 0, (), frozenset())
        for number, operation in enumerate(self.operations):
            if isinstance(operation, Barrier):
                covered = [i for i, p in enumerate(pieces) if operation.of in p.covers]
                durable |= _with_predecessors(pieces, covered)
            else:
                pieces += operation
            yield Cut(self, number + 1, tuple(pieces), frozenset(durable))


@dataclass(frozen=True)
class Cut:
    """The disk after a number of operations: their pieces, and which are durable."""

    log: Log
    number: int
    pieces: tuple[Piece, ...]
    durable: frozenset[int]

    @property
    def pending(self):
        return [i for i in range(len(self.pieces)) if i not in self.durable]

    def state(self, chosen):
        """Returns the disk if only these pending pieces reached it.

        A piece that lacks an earlier one of the same key is left out.
        """
        present = self.durable | _with_all_predecessors(
            self.pieces, self.durable, set(chosen)
        )
        disk = dict(self.log.initial)
        for number in sorted(present):
            disk |= self.pieces[number].values
        return disk

    def extremes(self, *, one_in=1, names=()):
        """Yields nothing, everything, everything except one key, and one key alone.

        Visits one of so many keys, of which the next boundary visits others; these
        names always.
        """
        pending = self.pending
        yield frozenset()
        yield frozenset(pending)
        keys = dict.fromkeys(key for i in pending for key in self.pieces[i].values)
        for position, key in enumerate(keys, self.number):
            if position % one_in and key[-1] not in names:
                continue
            own = {i for i in pending if key in self.pieces[i].values}
            yield frozenset(pending) - own
            yield frozenset(_with_predecessors(self.pieces, own)) - self.durable


def _with_predecessors(pieces, numbers):
    """Returns the pieces and all that they require before them."""
    result, keys = set(numbers), set()
    for number in range(len(pieces) - 1, -1, -1):
        if number in result or keys & pieces[number].values.keys():
            result.add(number)
            keys |= pieces[number].values.keys()
    return result


def _with_all_predecessors(pieces, durable, chosen):
    """Returns the chosen pieces whose required ones are there."""
    lost: set[tuple] = set()
    result = set()
    for number, piece in enumerate(pieces):
        if number in durable:
            continue
        if number in chosen and not lost & piece.values.keys():
            result.add(number)
        else:
            lost |= piece.values.keys()
    return result


def frozen(disk):
    return frozenset(disk.items())


def tree(kinds, disk):
    """Returns inode, kind and content by path, for everything that has a name."""
    children: dict[int, list[tuple[str, int]]] = {}
    for key, inode in disk.items():
        if key[0] == "name" and inode is not None:
            children.setdefault(key[1], []).append((key[2], inode))
    found: dict[str, tuple] = {}
    waiting = [("", ROOT)]
    while waiting:
        above, parent = waiting.pop()
        for name, inode in sorted(children.get(parent, [])):
            path = f"{above}/{name}" if above else name
            kind = kinds[inode]
            found[path] = (inode, kind, content(disk, inode) if kind == "file" else b"")
            if kind == "directory":
                waiting.append((path, inode))
    return found


def content(disk, inode):
    """Returns a file's bytes; pages never written are zeros."""
    size = disk.get(("size", inode), 0)
    pages = [
        (disk.get(("page", inode, n)) or b"").ljust(PAGE_BYTES, b"\0")
        for n in range(-(-size // PAGE_BYTES))
    ]
    return b"".join(pages)[:size]


def materialise(kinds, disk, root):
    made: dict[int, str] = {}
    for name, (inode, kind, data) in tree(kinds, disk).items():
        path = os.path.join(root, name)
        if kind == "directory":
            os.mkdir(path)
        elif kind.startswith("-> "):
            os.symlink(kind[3:], path)
        elif inode in made:
            os.link(made[inode], path)
        else:
            made[inode] = path
            with open(path, "wb") as file:
                file.write(data)
