"""Byte-level training text: which files, one byte array, and batches out of it.

Invariant: everything is a pure function of the files' content and of (seed, step). No
iterator has state, so resuming a run needs only its step number.
"""

import dataclasses
import glob
import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from jaxinf.typing import Array, PathLikeStr

__all__ = ["ByteCorpus", "Split", "find_files", "standard_library_files"]

Split = Literal["train", "validation"]

SEPARATOR = b"\0"  # after each file; text holds no NUL, so it means "end of file"
_SNIFF_BYTES = 8192
_MIN_LIBRARY_BYTES = 5_000_000
# Not prose or program: tests, and generated tables.
_SKIPPED_LIBRARY_DIRS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    | {"encodings", "pydoc_data"}
)


def find_files(patterns: Sequence[str]) -> list[Path]:
    """Resolve what a user names as data to files.

    Args:
        patterns: each a file (taken as it is), a directory (every text file below it,
            hidden ones left out; text means: not empty, and no NUL among the first
            8,192 bytes), or a glob, where `**` crosses directories (files only).

    Returns:
        Resolved paths, sorted, each once.

    Raises:
        FileNotFoundError: a pattern matches no file.
    """
    found: set[Path] = set()
    for pattern in patterns:
        matched = {path.resolve() for path in _matches(os.path.expanduser(pattern))}
        if not matched:
            raise FileNotFoundError(
                f"data {pattern!r}: expected a file, a directory that holds text "
                "files, or a glob such as 'src/**/*.py' (quoted from the shell), "
                f"found no file (looked from {Path.cwd()})"
            )
        found |= matched
    return sorted(found)


def _matches(pattern: str) -> Iterator[Path]:
    path = Path(pattern)
    if path.is_dir():
        yield from (file for file in _walk(path) if _looks_like_text(file))
    elif path.is_file():
        yield path
    else:
        names = glob.iglob(pattern, recursive=True)
        yield from (Path(name) for name in names if os.path.isfile(name))


def _walk(root: Path, skipped: frozenset[str] = frozenset()) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [
            name
            for name in subfolders
            if not name.startswith(".") and name not in skipped
        ]
        yield from (Path(folder, name) for name in names if not name.startswith("."))


def _looks_like_text(path: Path) -> bool:
    if not path.is_file():  # a socket, a pipe, a dangling link
        return False
    with path.open("rb") as file:
        head = file.read(_SNIFF_BYTES)
    return bool(head) and b"\0" not in head


def standard_library_files() -> list[Path]:
    """Python's own standard library: some 10 MB of source code on every machine.

    Returns:
        Its `*.py` files, sorted, without installed packages, tests, and the tables in
        `encodings` and `pydoc_data`.

    Raises:
        FileNotFoundError: this Python ships less than 5 MB of library source.
    """
    root = Path(sysconfig.get_path("stdlib")).resolve()
    walked = _walk(root, _SKIPPED_LIBRARY_DIRS)
    files = sorted(path for path in walked if path.suffix == ".py" and path.is_file())
    found_bytes = sum(path.stat().st_size for path in files)
    if found_bytes < _MIN_LIBRARY_BYTES:
        raise FileNotFoundError(
            f"standard library at {root}: expected at least {_MIN_LIBRARY_BYTES} bytes "
            f"of *.py to train on, found {found_bytes}; name other text with --data"
        )
    return files


@dataclasses.dataclass(frozen=True, eq=False)
class ByteCorpus:
    """Text as bytes, split for good into train and validation.

    Immutable and safe to share between threads.
    """

    train: Array  # uint8 [n]
    validation: Array  # uint8 [m]

    @classmethod
    def load(
        cls, files: Iterable[PathLikeStr], *, validation_fraction: float = 0.05
    ) -> "ByteCorpus":
        """Read files into memory (blocks), a NUL byte after each.

        Files come in the order of their SHA-256: it depends on nothing but content, and
        it mixes them, so that the tail kept for validation is like the rest.

        Args:
            files: what to read; the order given does not matter.
            validation_fraction: share of all bytes kept for validation, in [0, 1).

        Raises:
            ValueError: no files, only empty ones, or a fraction out of range.
            OSError: a file cannot be read.
        """
        if not 0 <= validation_fraction < 1:
            raise ValueError(
                "ByteCorpus.load: expected validation_fraction in [0, 1), "
                f"got {validation_fraction}"
            )
        texts = [Path(file).read_bytes() for file in files]
        if not any(texts):
            raise ValueError(
                f"ByteCorpus.load: expected text, got {len(texts)} file(s) of 0 bytes"
            )
        texts.sort(key=lambda text: hashlib.sha256(text).digest())
        data = np.frombuffer(b"".join(text + SEPARATOR for text in texts), np.uint8)
        num_train = data.size - int(data.size * validation_fraction)
        return cls(train=data[:num_train], validation=data[num_train:])

    def batch(
        self,
        step: int,
        seed: int,
        *,
        batch_size: int,
        seq_len: int,
        split: Split = "train",
    ) -> tuple[Array, Array]:
        """Random windows: a pure function of its arguments and of the corpus.

        Args:
            step: at least 0.
            seed: at least 0; both are the key of a Philox generator, whose raw stream
                NumPy keeps the same from version to version.
            batch_size: number of windows.
            seq_len: bytes in each.
            split: where the windows come from.

        Returns:
            (tokens, targets), int32 [batch_size, seq_len]; targets are tokens one byte
            later. Both are the caller's to keep.

        Raises:
            ValueError: the split holds fewer than `seq_len + 1` bytes.
        """
        data = self.train if split == "train" else self.validation
        num_starts = data.size - seq_len
        if num_starts < 1:
            raise ValueError(
                f"ByteCorpus.batch: expected at least seq_len + 1 = {seq_len + 1} "
                f"bytes of {split} text, got {data.size}; name more text or shorten "
                "the sequence"
            )
        generator = np.random.Philox(key=np.array([seed, step], np.uint64))
        raw = np.asarray(generator.random_raw(batch_size), np.uint64)
        starts = (raw % np.uint64(num_starts)).astype(np.int64)  # bias below n / 2**64
        index = starts[:, None] + np.arange(seq_len)
        return data[index].astype(np.int32), data[index + 1].astype(np.int32)

    def fingerprint(self) -> str:
        """SHA-256 over both splits and where they part, in hexadecimal.

        Kept with a run, it tells a resume on other data.
        """
        digest = hashlib.sha256(f"{self.train.size},{self.validation.size};".encode())
        for data in (self.train, self.validation):
            digest.update(np.ascontiguousarray(data).data)
        return digest.hexdigest()
