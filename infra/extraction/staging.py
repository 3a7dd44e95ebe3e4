"""Where hidden states lie between vLLM and us: one folder of a stage, and the bytes that may lie in it.

Terabytes pass through a disk of some hundred gigabytes, or through memory (/dev/shm), so every request takes its
bytes here before it is sent, and gives them back as its files are dropped. Full means wait, never fail: who has
something in flight reads that first, and only who has nothing waits here. So somebody always gets on, and of those
who wait the first one comes first.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import threading
from collections import deque
from pathlib import Path

from infra.errors import InfrastructureError

# What is kept free on the disk, beyond the states that are asked for.
RESERVE_BYTES = 256 * 2**20
# By default: some hundred thousand tokens of a large verifier, which keeps eight engines fed.
DEFAULT_LIMIT_BYTES = 8 * 2**30

logger = logging.getLogger("draftsmith.extraction")


class Staging:
    """A folder on the local disk with a bound, for all engines of a stage. Safe to use from any thread.

    Args:
        name: of the folder; a later run of the same stage gives the same, and deletes what a killed one has left.
        parent: folder that it is made in; by default the system's temporary folder.
        limit_bytes: bytes that may lie in it; by default 8 GiB, or half of what its disk has free if that is less.
        num_engines: engines that share it.

    Attributes:
        folder: there from `open` to `close`.
        limit_bytes: the bound; set by `open` where none is given.
        peak_bytes: the most that were taken at one time.
    """

    def __init__(
        self, name: str, parent: str | None = None, limit_bytes: int | None = None, num_engines: int = 1
    ) -> None:
        self.folder = Path(parent or tempfile.gettempdir()).expanduser() / f"draftsmith-extract-{name}"
        self.limit_bytes = limit_bytes or 0
        self.peak_bytes = 0
        self._num_engines = num_engines
        self._taken_bytes = 0
        self._waiting: deque[object] = deque()
        self._changed = threading.Condition()

    def open(self) -> None:
        """Make the folder, empty.

        Raises:
            InfrastructureError: it cannot be made.
        """
        try:
            if self.folder.exists():
                logger.warning("Deleting states in %s, which an earlier run had left behind.", self.folder)
                shutil.rmtree(self.folder)
            self.folder.mkdir(mode=0o700, parents=True)
            free_bytes = shutil.disk_usage(self.folder).free
        except OSError as error:
            raise InfrastructureError(f"The staging folder {self.folder} cannot be used: {error}") from error
        self.limit_bytes = self.limit_bytes or min(DEFAULT_LIMIT_BYTES, free_bytes // 2)

    def close(self) -> None:
        """Delete the folder and all in it. Callable again."""
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def request_bytes(self) -> int:
        """What one request may take, so that each engine has one to work on and one that is read or lies ready."""
        return self.limit_bytes // (2 * self._num_engines)

    def take(self, size_bytes: int, *, wait: bool) -> bool:
        """Take bytes of the bound for files that are about to be written.

        Args:
            size_bytes: at most `limit_bytes`, or nobody could ever have them.
            wait: block until they are free; for callers that hold nothing themselves, or two could wait for
                each other. Without it, nothing is taken while others wait.
        Returns:
            Whether they were taken.
        """
        assert size_bytes <= self.limit_bytes, "larger than the whole bound"
        ticket = object()
        with self._changed:
            if not wait and (self._waiting or not self._fits(size_bytes)):
                return False
            self._waiting.append(ticket)
            try:
                self._changed.wait_for(lambda: self._waiting[0] is ticket and self._fits(size_bytes))
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()
            self._taken_bytes += size_bytes
            self.peak_bytes = max(self.peak_bytes, self._taken_bytes)
        return True

    def give_back(self, size_bytes: int) -> None:
        """Give back bytes whose files are deleted, or will never be written."""
        with self._changed:
            self._taken_bytes -= size_bytes
            self._changed.notify_all()

    def require_room(self, size_bytes: int) -> None:
        """Check that the disk itself has room for files that are about to be written.

        Raises:
            InfrastructureError: it has not; others fill it, or the bound is set too high for it.
        """
        free_bytes = shutil.disk_usage(self.folder).free
        if free_bytes < size_bytes + RESERVE_BYTES:
            raise InfrastructureError(
                f"{self.folder} has {free_bytes / 2**20:.0f} MiB free, but the next states take up to "
                f"{size_bytes / 2**20:.0f} MiB; free some, lower extract.staging_gib, or set "
                "extract.staging_folder."
            )

    def _fits(self, size_bytes: int) -> bool:
        return self._taken_bytes + size_bytes <= self.limit_bytes
