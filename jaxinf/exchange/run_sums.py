"""The checksum of a file whose runs are written in any order.

Invariant: it is of the bytes given to be written, not of bytes read back from a drive.
"""

from jaxinf.errors import ExchangeError
from jaxinf.io import crc32c, crc32c_combine
from jaxinf.typing import Array

__all__ = ["RunSums"]


class RunSums:
    """Checksums of a file's runs; those that lie one behind the other become one."""

    def __init__(self) -> None:
        self._by_end: dict[int, tuple[int, int]] = {}  # start and checksum, by end

    def add(self, offset_bytes: int, data: Array) -> None:
        """Notes a run; no byte comes twice."""
        start, checksum = offset_bytes, crc32c(data)
        before = self._by_end.pop(offset_bytes, None)
        if before is not None:
            start, known = before
            parts = ((known, offset_bytes - start), (checksum, data.nbytes))
            checksum = crc32c_combine(parts)
        self._by_end[offset_bytes + data.nbytes] = start, checksum

    def of(self, num_bytes: int) -> int:
        """The checksum of the file's first bytes, once all of them have come.

        Raises:
          ExchangeError: some have not, or came twice: the source's boxes are no grid.
        """
        runs = sorted((start, end, crc) for end, (start, crc) in self._by_end.items())
        place = 0
        for start, end, _ in runs:
            if start != place:
                break
            place = end
        if place != num_bytes:
            raise ExchangeError(
                f"expected {num_bytes} bytes of a chunk, one behind the other, found "
                f"them up to byte {place}; the checkpoint's arrays are incomplete"
            )
        return crc32c_combine((crc, end - start) for start, end, crc in runs)
