"""How a process that makes large tensors over and over keeps their memory."""

from __future__ import annotations

import contextlib
import ctypes

import pyarrow as pa

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h


def keep_freed_memory() -> None:
    """Let the allocator keep what is freed. It would give each sample's megabytes back to the kernel, which clears
    every page before the next sample gets it: half of the time that reading and copying bf16 take."""
    with contextlib.suppress(AttributeError):  # another C library than glibc
        mallopt = ctypes.CDLL(None).mallopt
        if mallopt(_M_MMAP_MAX, 0) and mallopt(_M_TRIM_THRESHOLD, 2**31 - 1):
            pa.set_memory_pool(pa.system_memory_pool())
