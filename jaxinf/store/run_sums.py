"""The checksum of a file whose runs are written in any order.

Invariant: the checksum is that of the bytes to be written, not of bytes read back.
"""

from jaxinf.errors import ExchangeError
from jaxinf.io import crc32c, crc32c_combine
from jaxinf.typing import Array


class RunSums:
    """Checksums of a file's runs; those of adjacent runs are combined."""

    def __init__(self) -> None:
        self._by_end: dict[int, tuple[int, int]] = {}  # start and checksum, by end

    def add(self, offset_bytes: int, data: Array) -> None:
        start, checksum = offset_bytes, crc32c(data)
        before = self._by_end.pop(offset_bytes, None)
        if before is not None:
            start, known = before
            parts = ((known, offset_bytes - start), (checksum, data.nbytes))
            checksum = crc32c_combine(parts)
        self._by_end[offset_bytes + data.nbytes] = start, checksum

    def of(self, num_bytes: int) -> int:
        """Returns the checksum of the file's first bytes, all of which were added.

        Raises:
          ExchangeError: some bytes are missing or were added twice, because the
            source's boxes do not form a grid.
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
