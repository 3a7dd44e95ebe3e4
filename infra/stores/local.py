"""Objects as files of a local or shared folder. Called through `infra.storage`, which says what each function does.

A write goes to a hidden name beside its place, is synced, and is then renamed (or linked, where it must be the
first) into it. What a killed write leaves is such a hidden file, which nobody reads.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from infra.errors import InputError, StorageError

CHUNK_BYTES = 16 * 2**20

# What a person has to put right; every other error of the operating system may be over the next time.
_WRONG_INPUT = {
    errno.EACCES,
    errno.EEXIST,
    errno.EISDIR,
    errno.ELOOP,
    errno.EMLINK,
    errno.ENAMETOOLONG,
    errno.ENOTDIR,
    errno.ENOTSUP,
    errno.EPERM,
    errno.EROFS,
    errno.EXDEV,
}


@dataclass(frozen=True)
class ObjectInfo:
    """One line of a listing.

    Args:
        size_bytes: size of the object.
        modified_at: when it was written, by the store's clock; seconds since the epoch (UTC).
    """

    size_bytes: int
    modified_at: float


def get(uri: str) -> bytes:
    path = _path(uri)
    with explained(path, "read"):
        return path.read_bytes()


def get_many(uris: list[str]) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for uri in uris:
        with contextlib.suppress(FileNotFoundError):
            found[uri] = get(uri)
    return found


def get_range(uri: str, start: int, length: int) -> bytes:
    path = _path(uri)
    with explained(path, "read"), path.open("rb", buffering=0) as file:
        return os.pread(file.fileno(), length, start)


def chunks(uri: str) -> Iterator[bytes]:
    path = _path(uri)
    with explained(path, "read"), path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


def get_file(uri: str, local_path: Path) -> None:
    with staged(local_path, chunks(uri)) as whole:
        os.replace(whole, local_path)


def put(uri: str, data: bytes) -> None:
    path = _path(uri)
    with staged(path, [data]) as whole:
        os.replace(whole, path)


def put_file(uri: str, local_path: Path) -> None:
    get_file(str(local_path), _path(uri))


def create(uri: str, data: bytes) -> bool:
    return _link(_path(uri), [data]) or get(uri) == data


def create_file(uri: str, local_path: Path) -> bool:
    return _link(_path(uri), chunks(str(local_path))) or _same(_path(uri), local_path)


def compare_and_set(uri: str, data: bytes, expected: bytes) -> bool:
    with _locked(_path(uri)):
        try:
            found = get(uri)
        except FileNotFoundError:
            return False
        if found == expected:
            put(uri, data)
            return True
        return found == data


def size(uri: str) -> int:
    path = _path(uri)
    with explained(path, "read"):
        return path.stat().st_size


def list_objects(uri: str) -> dict[str, ObjectInfo]:
    folder = _path(uri)
    found: dict[str, ObjectInfo] = {}
    with explained(folder, "listed"):
        for parent, _, names in os.walk(folder, onerror=_raise_unless_absent):
            below = os.path.relpath(parent, folder)  # once for thousands of names
            for name in names:
                if name.startswith("."):
                    continue
                with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                    stat = os.stat(os.path.join(parent, name))
                    relative = name if below == "." else f"{below}/{name}"
                    found[relative] = ObjectInfo(stat.st_size, stat.st_mtime)
    return found


def free_bytes(uri: str) -> int:
    path = _path(uri).absolute()
    with explained(path, "looked at"):
        return shutil.disk_usage(next(folder for folder in (path, *path.parents) if folder.is_dir())).free


def delete(uri: str) -> None:
    path = _path(uri)
    with explained(path, "deleted"):
        path.unlink(missing_ok=True)


def reach(uri: str, limit_seconds: float) -> None:
    """Make the folder if it is not there; a folder needs no time to be reached."""
    try:
        with explained(_path(uri), "made"):
            _path(uri).mkdir(parents=True, exist_ok=True)
    except FileNotFoundError as error:  # as below /proc
        raise InputError("root", f"{uri} cannot be made: {error.strerror}") from error


@contextlib.contextmanager
def explained(path: Path, doing: str) -> Iterator[None]:
    """Turn errors of the operating system into this project's, except that a file is not there."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        line = f"{path} cannot be {doing}: {error.strerror or error}"
        if error.errno in _WRONG_INPUT:
            raise InputError("root", line) from error
        raise StorageError(line) from error


@contextlib.contextmanager
def staged(path: Path, parts: Iterable[bytes]) -> Iterator[Path]:
    """A synced file with these bytes, on the way to `path`; gone afterwards unless the caller has moved it."""
    # Hidden, and with an ending of its own, so that no reader's pattern takes it for an object.
    whole = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.partial")
    with explained(path, "written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with whole.open("wb") as file:
                for part in parts:
                    file.write(part)
                file.flush()
                os.fsync(file.fileno())
            yield whole
        finally:
            whole.unlink(missing_ok=True)


def _path(uri: str) -> Path:
    return Path(uri.removeprefix("file://"))


def _link(path: Path, parts: Iterable[bytes]) -> bool:
    """Whether there was no file at `path` and now is one with these bytes."""
    with staged(path, parts) as whole:
        try:
            os.link(whole, path)
        except FileExistsError:
            return False
        return True


def _same(one: Path, other: Path) -> bool:
    if size(str(one)) != size(str(other)):
        return False
    return all(mine == theirs for mine, theirs in zip(chunks(str(one)), chunks(str(other)), strict=True))


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Serialize compare-and-set on one object; the kernel drops the lock when its holder dies."""
    with explained(path, "locked"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_name(f".{path.name}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _raise_unless_absent(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error
