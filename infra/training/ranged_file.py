"""A stored object as a seekable file of which only the parts that are read are fetched."""

from __future__ import annotations

import io
from typing import Any

from infra import storage

# A sample's small columns take some 10 to 50 KB together, before megabytes of states.
BLOCK_BYTES = 64 * 2**10


class RangedFile(io.RawIOBase):
    """Reads whole blocks and keeps them: for many small reads near to one another.

    Args:
        uri: of the object, which does not change.
        size_bytes: of the object.
    """

    def __init__(self, uri: str, size_bytes: int) -> None:
        super().__init__()
        self._uri = uri
        self._size_bytes = size_bytes
        self._place = 0
        self._blocks: dict[int, bytes] = {}

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size_bytes}[whence]
        self._place = start + offset
        return self._place

    def readinto(self, target: Any) -> int:
        wanted = memoryview(target).cast("B")
        end = min(self._place + len(wanted), self._size_bytes)
        if end <= self._place:
            return 0
        first, last = self._place // BLOCK_BYTES, (end - 1) // BLOCK_BYTES
        self._fetch(first, last)
        found = b"".join(self._blocks[number] for number in range(first, last + 1))
        start = self._place - first * BLOCK_BYTES
        wanted[: end - self._place] = memoryview(found)[start : start + end - self._place]
        read, self._place = end - self._place, end
        return read

    def _fetch(self, first: int, last: int) -> None:
        """Have the blocks from `first` to `last`: one request for all from the first to the last absent one."""
        absent = [number for number in range(first, last + 1) if number not in self._blocks]
        if not absent:
            return
        start = absent[0] * BLOCK_BYTES
        length = min((absent[-1] + 1) * BLOCK_BYTES, self._size_bytes) - start
        data = storage.get_range(self._uri, start, length)
        for number in range(absent[0], absent[-1] + 1):
            place = number * BLOCK_BYTES - start
            self._blocks[number] = data[place : place + BLOCK_BYTES]
