"""Objects on any fsspec URL: the only module that touches fsspec or s3fs.

A URI is a folder path (`data/smoke`, `file:///data/smoke`) or `s3://bucket/prefix`. Credentials and the endpoint
come from the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL), never from a URI.

Every write is whole or absent: a reader never sees half an object. Nothing is cached, listings included.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import uuid
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from infra.errors import InputError, StorageError

T = TypeVar("T")

# Objects above this size go to S3 in parts.
MULTIPART_BYTES = 32 * 2**20
CONNECT_TIMEOUT_SECONDS = 10
READ_TIMEOUT_SECONDS = 60


def join(uri: str, *parts: str) -> str:
    """`uri` with `parts` appended, joined by single slashes."""
    return "/".join([uri.rstrip("/"), *(part.strip("/") for part in parts if part)])


def get(uri: str) -> bytes:
    """The whole object. Raises FileNotFoundError when there is none."""
    if (path := _local(uri)) is not None:
        return path.read_bytes()
    return _remote(uri, lambda fs, key: bytes(fs.cat_file(key)))


def get_many(uris: Iterable[str]) -> dict[str, bytes]:
    """Those of the objects that exist, fetched concurrently where the store is remote."""
    wanted = list(uris)
    if not wanted:
        return {}
    if _local(wanted[0]) is not None:
        found: dict[str, bytes] = {}
        for uri in wanted:
            with contextlib.suppress(FileNotFoundError):
                found[uri] = get(uri)
        return found
    keys = {_key(uri): uri for uri in wanted}
    bodies = _remote(wanted[0], lambda fs, _: fs.cat(list(keys), on_error="return"))
    for body in bodies.values():
        if isinstance(body, Exception) and not isinstance(body, FileNotFoundError):
            raise StorageError(f"{wanted[0]} and others could not be read: {body}") from body
    return {keys[key]: bytes(body) for key, body in bodies.items() if not isinstance(body, Exception)}


def put(uri: str, data: bytes) -> None:
    """Write the object, replacing what is there. Atomic."""
    if (path := _local(uri)) is not None:
        with _staged(path, data) as staged:
            os.replace(staged, path)
        return
    _remote(uri, lambda fs, key: fs.pipe_file(key, data, chunksize=MULTIPART_BYTES))


def create(uri: str, data: bytes) -> bool:
    """Write the object only if there is none.

    Returns:
        True when the object now holds `data`: written here, or found with the same bytes (a refused create after
        a retried PUT may be one's own earlier write). False when it holds something else.
    """
    if (path := _local(uri)) is not None:
        with _staged(path, data) as staged:
            try:
                os.link(staged, path)
                return True
            except FileExistsError:
                return path.read_bytes() == data
    try:
        _remote(uri, lambda fs, key: fs.pipe_file(key, data, chunksize=MULTIPART_BYTES, mode="create"))
        return True
    except FileExistsError:
        return get(uri) == data


def compare_and_set(uri: str, data: bytes, expected: bytes | None) -> bool:
    """Write `data` only if the object still holds `expected` (None: only if there is none).

    Returns:
        True when the object now holds `data`, False when another writer came first.
    """
    if expected is None:
        return create(uri, data)
    if (path := _local(uri)) is not None:
        with _locked(path):
            if not path.exists() or path.read_bytes() != expected:
                return False
            put(uri, data)
            return True

    def swap(fs: Any, key: str) -> bool:
        etag = fs.info(key)["ETag"]
        if bytes(fs.cat_file(key)) != expected:
            return False
        fs.pipe_file(key, data, IfMatch=etag)
        return True

    try:
        return bool(_remote(uri, swap))
    except (FileExistsError, FileNotFoundError):
        return False


def put_file(uri: str, local_path: Path) -> None:
    """Upload a local file; memory stays bounded whatever its size. Atomic."""
    if (path := _local(uri)) is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        staged = _staging_name(path)
        try:
            with local_path.open("rb") as source, staged.open("wb") as target:
                while chunk := source.read(MULTIPART_BYTES):
                    target.write(chunk)
                target.flush()
                os.fsync(target.fileno())
            os.replace(staged, path)
        finally:
            staged.unlink(missing_ok=True)
        return
    _remote(uri, lambda fs, key: fs.put_file(str(local_path), key, chunksize=MULTIPART_BYTES))


def get_file(uri: str, local_path: Path) -> None:
    """Download the object to a local file. Raises FileNotFoundError when there is none."""
    local_path.parent.mkdir(parents=True, exist_ok=True)
    if (path := _local(uri)) is not None:
        with path.open("rb") as source, local_path.open("wb") as target:
            while chunk := source.read(MULTIPART_BYTES):
                target.write(chunk)
        return
    _remote(uri, lambda fs, key: fs.get_file(key, str(local_path)))


def exists(uri: str) -> bool:
    try:
        size(uri)
    except FileNotFoundError:
        return False
    return True


def size(uri: str) -> int:
    """Size in bytes. Raises FileNotFoundError when there is no such object."""
    if (path := _local(uri)) is not None:
        return path.stat().st_size
    return int(_remote(uri, lambda fs, key: fs.info(key)["size"]))


def list_sizes(uri: str) -> dict[str, int]:
    """Every object below `uri`: name relative to it, and size in bytes. One recursive listing."""
    if (path := _local(uri)) is not None:
        return {
            str(file.relative_to(path)): file.stat().st_size
            for file in _walk(path)
            if not file.name.startswith(".")
        }
    prefix = _key(uri).rstrip("/") + "/"
    try:
        listed = _remote(uri, lambda fs, key: fs.find(key, detail=True))
    except FileNotFoundError:
        return {}
    return {key[len(prefix) :]: int(info["size"]) for key, info in listed.items() if key.startswith(prefix)}


def delete(uri: str) -> None:
    """Remove the object; no error when there is none."""
    if (path := _local(uri)) is not None:
        path.unlink(missing_ok=True)
        return
    with contextlib.suppress(FileNotFoundError):
        _remote(uri, lambda fs, key: fs.rm_file(key))


# --- local folders ---


def _local(uri: str) -> Path | None:
    if uri.startswith("file://"):
        return Path(uri.removeprefix("file://"))
    return None if "://" in uri else Path(uri)


def _walk(folder: Path) -> Iterator[Path]:
    for parent, _, names in os.walk(folder):
        yield from (Path(parent, name) for name in names)


def _staging_name(path: Path) -> Path:
    # Hidden, and with an ending of its own, so that no reader's pattern takes it for an object.
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.partial")


@contextlib.contextmanager
def _staged(path: Path, data: bytes) -> Iterator[Path]:
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = _staging_name(path)
    try:
        with staged.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        yield staged
    finally:
        staged.unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Serialize compare-and-set on one object; the kernel drops the lock when its holder dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f".{path.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


# --- remote stores ---


def _key(uri: str) -> str:
    return uri.split("://", 1)[1]


@lru_cache(maxsize=8)
def _filesystem(protocol: str, process_id: int) -> Any:
    """One client per process: s3fs hangs in a forked child that uses its parent's."""
    import fsspec

    options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
    if protocol == "s3":
        options["config_kwargs"] = {
            "s3": {"addressing_style": "path" if os.environ.get("AWS_ENDPOINT_URL") else "auto"},
            "connect_timeout": CONNECT_TIMEOUT_SECONDS,
            "read_timeout": READ_TIMEOUT_SECONDS,
            "retries": {"max_attempts": 5, "mode": "adaptive"},
        }
    return fsspec.filesystem(protocol, **options)


def _remote(uri: str, action: Callable[[Any, str], T]) -> T:
    """Run one action on a remote store and turn its errors into this project's."""
    protocol = uri.split("://", 1)[0]
    if protocol != "s3":
        raise InputError("root", f"{uri} is not a folder or an s3:// URL")
    from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

    try:
        return action(_filesystem(protocol, os.getpid()), _key(uri))
    except (FileNotFoundError, FileExistsError) as error:
        if isinstance(error, FileNotFoundError) and "bucket" in str(error).lower():
            raise InputError("root", f"the bucket of {uri} does not exist; create it first") from error
        raise
    except NoCredentialsError as error:
        raise InputError(
            "root", f"no credentials for {uri}; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        ) from error
    except PermissionError as error:
        raise InputError("root", f"access to {uri} is refused; check the credentials and their rights") from error
    except OSError as error:
        if "pre-condition" in str(error).lower() or "precondition" in str(error).lower():
            raise FileExistsError(uri) from error
        raise StorageError(f"{uri}: {error}") from error
    except (BotoCoreError, ClientError, TimeoutError) as error:
        raise StorageError(f"{uri}: {error}") from error
