"""Leases: counters in the store that fence an older copy of the same work.

Correctness rests on create-only records; a lease only tells two holders apart. Each taking of a lease raises its
epoch by compare-and-set, so the holder of a lower epoch knows that it has been replaced.
"""

from __future__ import annotations

import json
import os
import socket
import time

from infra import storage
from infra.errors import StorageError

MAX_ATTEMPTS = 20


def lease_uri(root: str, name: str) -> str:
    return storage.join(root, "leases", f"{name}.json")


def take(root: str, name: str) -> int:
    """Take the lease, whoever held it, and return its new epoch (1 at first).

    Args:
        name: what is leased, `<stage>-<key>`.

    Raises:
        StorageError: other writers kept winning the compare-and-set.
    """
    uri = lease_uri(root, name)
    for _ in range(MAX_ATTEMPTS):
        current = storage.get_many([uri]).get(uri)
        epoch = _epoch(current) + 1
        holder = {"epoch": epoch, "owner": f"{socket.gethostname()}:{os.getpid()}", "taken_at": time.time()}
        if storage.compare_and_set(uri, json.dumps(holder, sort_keys=True).encode(), current):
            return epoch
    raise StorageError(f"{uri} changed {MAX_ATTEMPTS} times while it was being taken")


def current_epoch(root: str, name: str) -> int:
    """The epoch of the present holder; 0 when nobody has taken the lease."""
    uri = lease_uri(root, name)
    return _epoch(storage.get_many([uri]).get(uri))


def _epoch(body: bytes | None) -> int:
    if body is None:
        return 0
    try:
        return int(json.loads(body)["epoch"])
    except (ValueError, KeyError, TypeError):
        return 0
