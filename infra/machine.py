"""What this process may use of the machine: cores and memory, within the limits of its container.

A container's limits are those of its control group (version 2, which it sees as its own root). Without one, the
machine itself is the limit.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

CONTROL_GROUP = Path("/sys/fs/cgroup")
MEMORY_INFO = Path("/proc/meminfo")


def usable_cores() -> int:
    """Cores that this process may keep busy, at least 1: by its affinity, and by its container's share of time."""
    cores = len(os.sched_getaffinity(0))
    quota, _, period = (_limit("cpu.max") or "max").partition(" ")
    return cores if quota == "max" else max(1, min(cores, math.ceil(int(quota) / int(period))))


def free_memory_bytes() -> int:
    """Memory that can be taken without swapping or, in a container with a limit, without being killed for it."""
    free = _field(MEMORY_INFO.read_text(encoding="utf-8"), "MemAvailable:") * 1024
    limit, used = _limit("memory.max"), _limit("memory.current")
    if limit in (None, "max") or used is None:
        return free
    # Pages of files that were read count as used, and are given up when there is need.
    reclaimable = _field(_limit("memory.stat") or "", "inactive_file")
    return max(0, min(free, int(limit) - int(used) + reclaimable))


def _limit(name: str) -> str | None:
    try:
        return (CONTROL_GROUP / name).read_text(encoding="utf-8").strip()
    except OSError:
        return None


def _field(text: str, name: str) -> int:
    """The number behind a name at the beginning of a line; 0 where there is none."""
    return next((int(line.split()[1]) for line in text.splitlines() if line.split()[:1] == [name]), 0)
