"""Objects in a folder or on S3: the only way to artifacts.

A URI is a folder path (`data/smoke`, `file:///data/smoke`) or `s3://bucket/prefix`. Credentials and the endpoint
come from the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_ENDPOINT_URL,
AWS_DEFAULT_REGION), never from a URI. Other stores are refused: a commit is a create-only write, which the common
interface of file systems does not have.

Every write is whole or absent: a reader never sees half an object. Nothing is cached, listings included. Names that
begin with a dot are the storage's own and in no listing.

Errors, the same for both kinds of store:
    FileNotFoundError: there is no such object.
    InputError:        credentials, bucket, folder or rights are wrong; raised at once, a retry cannot mend it.
    StorageError:      the store did not answer for `storage_s3_client.RETRY_SECONDS`, a disk is full.
"""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

from infra.errors import InputError
from infra.stores import local as storage_local
from infra.stores import s3 as storage_s3
from infra.stores.local import ObjectInfo

__all__ = [
    "ObjectInfo",
    "check_answer",
    "check_root",
    "compare_and_set",
    "create",
    "create_file",
    "delete",
    "exists",
    "free_bytes",
    "get",
    "get_file",
    "get_many",
    "get_range",
    "join",
    "list_objects",
    "list_sizes",
    "put",
    "put_file",
    "sha256",
    "size",
]

CHECK_SECONDS = 10.0
# A part of a name that is empty or leads upwards: names read from a store must not lead out of it.
_LEADS_ELSEWHERE = re.compile(r"(^|/)\.{0,2}(/|$)")


class Store(Protocol):
    """What each kind of store can do; `stores.local` and `stores.s3` are two modules of this shape."""

    def get(self, uri: str) -> bytes: ...
    def get_many(self, uris: list[str]) -> dict[str, bytes]: ...
    def get_range(self, uri: str, start: int, length: int) -> bytes: ...
    def chunks(self, uri: str) -> Iterator[bytes]: ...
    def get_file(self, uri: str, local_path: Path) -> None: ...
    def put(self, uri: str, data: bytes) -> None: ...
    def put_file(self, uri: str, local_path: Path) -> None: ...
    def create(self, uri: str, data: bytes) -> bool: ...
    def create_file(self, uri: str, local_path: Path) -> bool: ...
    def compare_and_set(self, uri: str, data: bytes, expected: bytes) -> bool: ...
    def size(self, uri: str) -> int: ...
    def list_objects(self, uri: str) -> dict[str, ObjectInfo]: ...
    def delete(self, uri: str) -> None: ...
    def reach(self, uri: str, limit_seconds: float) -> None: ...


def join(uri: str, *parts: str) -> str:
    """`uri` with `parts` appended, joined by single slashes.

    Raises:
        InputError: a part leads out of `uri`, as `../x` does.
    """
    names = [part.strip("/") for part in parts if part]
    for name in names:
        if _LEADS_ELSEWHERE.search(name):
            raise InputError("root", f"{name!r} is no name of anything below {uri}")
    return "/".join([uri.rstrip("/"), *names])


def check_answer(root: str, limit_seconds: float = CHECK_SECONDS) -> None:
    """Have the root's store answer once, and write nothing; a folder need not be there yet.

    Raises:
        InputError: credentials, bucket or rights are wrong.
        StorageError: the store does not answer.
    """
    if _store(root) is storage_s3:
        storage_s3.reach(root, limit_seconds)


def check_root(root: str, limit_seconds: float = CHECK_SECONDS) -> None:
    """Prove that the root can be reached and written, and that of two creators one is refused.

    Args:
        limit_seconds: how long a store that does not answer is tried; short, so that a wrong address is told soon.

    Raises:
        InputError: credentials, bucket, folder or rights are wrong, or the store cannot do create-only writes.
        StorageError: the store does not answer.
    """
    _store(root).reach(root, limit_seconds)
    probe = join(root, f".probe-{uuid.uuid4().hex}")
    try:
        if not create(probe, b"first") or create(probe, b"second"):
            raise InputError(
                "root",
                f"{root} lets a second writer replace what a first created; use a store with create-only writes",
            )
    finally:
        delete(probe)


def get(uri: str) -> bytes:
    """The whole object. Raises FileNotFoundError when there is none."""
    return _store(uri).get(uri)


def get_range(uri: str, start: int, length: int) -> bytes:
    """`length` bytes (at least one) of the object from `start` on.

    Raises:
        FileNotFoundError: there is no such object.
        ValueError: it ends before.
    """
    data = _store(uri).get_range(uri, start, length)
    if len(data) != length:
        raise ValueError(f"{uri} ends {length - len(data)} bytes too early")
    return data


def get_many(uris: Iterable[str]) -> dict[str, bytes]:
    """Those of the objects that exist, fetched concurrently where the store is remote. All in one bucket."""
    wanted = list(uris)
    return _store(wanted[0]).get_many(wanted) if wanted else {}


def get_file(uri: str, local_path: Path) -> None:
    """Download the object to a local file, which is whole or absent; memory stays bounded whatever its size.

    Raises FileNotFoundError when there is no such object.
    """
    _store(uri).get_file(uri, local_path)


def sha256(uri: str) -> str:
    """Hex digest of an object (or a local file), read in pieces. Raises FileNotFoundError when there is none."""
    digest = hashlib.sha256()
    for chunk in _store(uri).chunks(uri):
        digest.update(chunk)
    return digest.hexdigest()


def put(uri: str, data: bytes) -> None:
    """Write the object, replacing what is there. Atomic."""
    _store(uri).put(uri, data)


def put_file(uri: str, local_path: Path) -> None:
    """Upload a local file, replacing what is there; memory stays bounded whatever its size. Atomic."""
    _store(uri).put_file(uri, local_path)


def create(uri: str, data: bytes) -> bool:
    """Write the object only if there is none.

    Returns:
        True when the object now holds `data`: written here, or found with the same bytes (a refused create after
        a retried PUT may be one's own earlier write). False when it holds something else.
    """
    return _store(uri).create(uri, data)


def create_file(uri: str, local_path: Path) -> bool:
    """`create` from a local file; memory stays bounded whatever its size."""
    return _store(uri).create_file(uri, local_path)


def compare_and_set(uri: str, data: bytes, expected: bytes | None) -> bool:
    """Write `data` only if the object still holds `expected` (None: only if there is none).

    Returns:
        True when the object now holds `data`: written here, or found so, since a refused write may be one's own
        earlier one whose answer was lost. Writers that must tell each other apart write different bytes.
        False when another writer came first, or the object is gone.
    """
    return create(uri, data) if expected is None else _store(uri).compare_and_set(uri, data, expected)


def exists(uri: str) -> bool:
    try:
        size(uri)
    except FileNotFoundError:
        return False
    return True


def size(uri: str) -> int:
    """Size in bytes. Raises FileNotFoundError when there is no such object."""
    return _store(uri).size(uri)


def list_objects(uri: str) -> dict[str, ObjectInfo]:
    """Every object below `uri`, by its name relative to it: size and time of writing. One recursive listing."""
    return _store(uri).list_objects(uri)


def list_sizes(uri: str) -> dict[str, int]:
    """`list_objects` without the times: name relative to `uri`, and size in bytes."""
    return {name: found.size_bytes for name, found in list_objects(uri).items()}


def free_bytes(uri: str) -> int | None:
    """Bytes that a folder's disk has free, whether the folder is there yet or not; None where nobody knows (S3)."""
    return None if _store(uri) is storage_s3 else storage_local.free_bytes(uri)


def delete(uri: str) -> None:
    """Remove the object; no error when there is none."""
    _store(uri).delete(uri)


def _store(uri: str) -> Store:
    if uri.startswith("s3://"):
        return storage_s3
    if "://" in uri and not uri.startswith("file://"):
        raise InputError("root", f"{uri} is not a folder or an s3:// URL")
    return storage_local
