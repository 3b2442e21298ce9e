"""Records a program's operations on the files below a directory, for `disk_model`.

Invariant: the recorded model equals the directory, byte for byte and link for link.
`Recorder.check` raises otherwise, so that no operation is missed.
"""

import builtins
import contextlib
import io
import os
import stat
import sys
import threading
from functools import partial
from pathlib import Path

from disk_model import PAGE_BYTES, ROOT, Barrier, Log, Piece, tree

from jaxinf.native import transfers as native_transfers

_FAKE_DEVICE = 1 << 40


class Recorder:
    """Replaces functions of `os` while its context lasts.

    Args:
      root: the recorded directory; quiet and durable on entry.
      filesystems: directories below it that count as separate file systems.
    """

    def __init__(self, root, filesystems=()):
        self.log = Log()
        self.root = root
        self._filesystems = [root, *filesystems]
        self._lock = threading.RLock()
        self._real = {}
        self._undo = contextlib.ExitStack()
        self._inodes: dict[tuple[int, int], int] = {}
        self._of: dict[int, int] = {ROOT: 0}  # inode → its file system
        self._disk: dict[tuple, object] = {}
        self._last = ROOT

    # --- the context ---------------------------------------------------------------

    def __enter__(self):
        self._take_initial()
        for name in _RECORDED:
            self._replace(os, name, getattr(self, f"_{name}"))
        for name, number in {"mkdir": 0, "symlink": 1, "link": 1}.items():
            self._replace(os, name, partial(self._made, name, number))
        for name in ("unlink", "rmdir"):
            self._replace(os, name, partial(self._removed, name))
        for name in ("fsync", "fdatasync"):
            self._replace(os, name, partial(self._synchronise, name))
        self._replace(os, "replace", self._rename)
        self._replace(os, "open", self._open_descriptor, "open_descriptor")
        self._replace(builtins, "open", self._open)
        self._replace(io, "open", self._open)
        # Native code would call the system behind the recorder's back.
        self._replace(native_transfers, "load", lambda: None)
        for name, module in list(sys.modules.items()):
            if name.startswith("jaxinf") and hasattr(module, "sync_filesystem"):
                self._replace(module, "sync_filesystem", self._sync_filesystem)
        return self

    def __exit__(self, *exception):
        self._undo.close()

    def _replace(self, module, name, function, key=None):
        def locked(*arguments, **options):
            with self._lock:
                return function(*arguments, **options)

        real = getattr(module, name)
        self._real[key or name] = real
        setattr(module, name, locked)
        self._undo.callback(setattr, module, name, real)

    def _take_initial(self):
        status = os.stat(self.root)
        self._inodes[status.st_dev, status.st_ino] = ROOT
        for path in self._paths():
            known = self._known(os.lstat(path))
            inode = self._new(path) if known is None else known
            self._disk[self._entry(path)] = inode
            if self.log.kinds[inode] == "file" and known is None:
                data = path.read_bytes()
                self._disk["size", inode] = len(data)
                for number, page in enumerate(range(0, len(data), PAGE_BYTES)):
                    self._disk["page", inode, number] = data[page : page + PAGE_BYTES]
        self.log.initial = dict(self._disk)

    def _paths(self):
        for folder, folders, files in os.walk(self.root):
            yield from (Path(folder, name) for name in [*folders, *files])

    def check(self):
        names: dict[str, tuple] = {}
        for path in self._paths():
            kind = _kind_of(path)
            data = path.read_bytes() if kind == "file" else b""
            found = self._known(os.lstat(path)), kind, data
            names[str(path.relative_to(self.root))] = found
        assert names == tree(self.log.kinds, self._disk)

    # --- inodes --------------------------------------------------------------------

    def _known(self, status):
        return self._inodes.get((status.st_dev, status.st_ino))

    def _inode_of(self, place):
        """Returns the inode of a path or descriptor; None outside the directory."""
        try:
            return self._known(self._real.get("stat", os.stat)(place))
        except OSError:
            return None

    def _new(self, path):
        self._last += 1
        status = os.lstat(path)
        self._inodes[status.st_dev, status.st_ino] = self._last
        self.log.kinds[self._last] = _kind_of(path)
        self._of[self._last] = self._filesystem_of(path)
        return self._last

    def _filesystem_of(self, path):
        path = Path(os.path.abspath(path))
        numbers = range(len(self._filesystems))
        return max(n for n in numbers if path.is_relative_to(self._filesystems[n]))

    def _entry(self, path, dir_fd=None):
        """Returns (inode of the directory, name); None outside the directory."""
        above, name = os.path.split(os.fspath(path))
        if dir_fd is not None:
            assert not above
            parent = self._inode_of(dir_fd)
        else:
            parent = self._inode_of(above or ".")
        return None if parent is None else ("name", parent, name)

    # --- operations ----------------------------------------------------------------

    def _did(self, *changes):
        """Records one operation: mappings of keys to values, each a piece."""
        pieces = []
        for values in changes:
            self._disk |= values
            owners = {key[1] for key in values}
            systems = {("fs", self._of[owner]) for owner in owners}
            pieces.append(Piece(values, frozenset(owners | systems)))
        self.log.operations.append(pieces)

    def _open_descriptor(self, path, flags, mode=0o777, *, dir_fd=None):
        entry = self._entry(path, dir_fd) if flags & os.O_CREAT else None
        is_new = entry is not None and self._disk.get(entry) is None
        fd = self._real["open_descriptor"](path, flags, mode, dir_fd=dir_fd)
        if is_new:
            assert dir_fd is None
            self._did({entry: self._new(path)})
        elif flags & os.O_TRUNC:
            self._resized(fd, 0)
        return fd

    def _open(self, file, mode="r", buffering=-1, encoding=None, *more, **others):
        if not set(mode) & set("wxa+"):
            return self._real["open"](file, mode, buffering, encoding, *more, **others)
        binary = mode.replace("b", "")
        assert binary in ("w", "x"), f"mode {mode!r} is not recorded"
        flags = os.O_TRUNC if binary == "w" else os.O_EXCL
        if not isinstance(file, int):
            flags |= os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
            file = os.open(file, flags, 0o666)
        raw = _RecordedFile(file, "wb", closefd=others.pop("closefd", True))
        buffered = io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding)

    def _pwritev(self, fd, buffers, offset, *flags):
        done = self._real["pwritev"](fd, buffers, offset, *flags)
        data = b"".join(bytes(buffer) for buffer in buffers)
        self._wrote(fd, data[:done], offset)
        return done

    def _pwrite(self, fd, data, offset):
        done = self._real["pwrite"](fd, data, offset)
        self._wrote(fd, bytes(data)[:done], offset)
        return done

    def _write(self, fd, data):
        inode = self._inode_of(fd)
        offset = os.lseek(fd, 0, os.SEEK_CUR) if inode is not None else 0
        done = self._real["write"](fd, data)
        if inode is not None:
            self._wrote(fd, bytes(data)[:done], offset)
        return done

    def _wrote(self, fd, data, offset):
        inode = self._inode_of(fd)
        if inode is None:
            return
        changes, end = [], offset + len(data)
        for number in range(offset // PAGE_BYTES, -(-end // PAGE_BYTES)):
            start = number * PAGE_BYTES
            page = bytearray(self._disk.get(("page", inode, number)) or b"")
            page.extend(bytes(PAGE_BYTES - len(page)))
            low, high = max(offset, start), min(end, start + PAGE_BYTES)
            page[low - start : high - start] = data[low - offset : high - offset]
            changes.append({("page", inode, number): bytes(page)})
        if end > self._disk.get(("size", inode), 0):
            changes.append({("size", inode): end})
        self._did(*changes)

    def _ftruncate(self, fd, length):
        self._real["ftruncate"](fd, length)
        self._resized(fd, length)

    def _resized(self, fd, length):
        inode = self._inode_of(fd)
        if inode is None:
            return
        values = {("size", inode): length}
        for key in self._disk:
            if key[:2] == ("page", inode) and key[2] * PAGE_BYTES >= length:
                values[key] = None
        self._did(values)

    def _posix_fallocate(self, fd, offset, length):
        self._real["posix_fallocate"](fd, offset, length)
        inode = self._inode_of(fd)
        if inode is not None:
            size = max(self._disk.get(("size", inode), 0), offset + length)
            self._did({("size", inode): size})

    def _made(self, how, number, *arguments, dir_fd=None, **others):
        """Makes a name, which is the argument of that number."""
        options = others if dir_fd is None else {"dir_fd": dir_fd, **others}
        self._real[how](*arguments, **options)
        path, entry = arguments[number], self._entry(arguments[number], dir_fd)
        if entry is not None:
            known = self._known(os.lstat(path)) if how == "link" else None
            self._did({entry: self._new(path) if known is None else known})

    def _removed(self, how, path, *, dir_fd=None):
        self._real[how](path, dir_fd=dir_fd)
        entry = self._entry(path, dir_fd)
        if entry is not None:
            self._did({entry: None})

    def _rename(self, source, target, **others):
        self._real["rename"](source, target, **others)
        old, new = self._entry(source), self._entry(target)
        if old is not None and new is not None:
            self._did({new: self._disk[old], old: None})

    # --- barriers ------------------------------------------------------------------

    def _synchronise(self, how, fd):
        self._real[how](fd)
        inode = self._inode_of(fd)
        if inode is not None:
            self.log.operations.append(Barrier(inode))

    def _sync_filesystem(self, directory):
        self._real["sync_filesystem"](directory)
        number = self._filesystem_of(directory)
        self.log.operations.append(Barrier(("fs", number)))

    def _stat(self, path, **others):
        """Returns a status with a different device for each file system."""
        status = self._real["stat"](path, **others)
        inode = None if isinstance(path, int) else self._known(status)
        if inode is None:
            return status
        fields = {n: getattr(status, n) for n in dir(status) if n.startswith("st_")}
        values = list(status)
        values[stat.ST_DEV] = _FAKE_DEVICE + self._of[inode]
        return os.stat_result(values, fields)


_RECORDED = "ftruncate posix_fallocate pwrite pwritev rename stat write".split()


class _RecordedFile(io.FileIO):
    """A file whose writes go through the present `os.write`."""

    def write(self, data):
        return os.write(self.fileno(), data)


def _kind_of(path):
    if os.path.islink(path):
        return "-> " + os.readlink(path)
    return "directory" if stat.S_ISDIR(os.lstat(path).st_mode) else "file"
