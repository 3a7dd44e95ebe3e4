"""Objects on S3 and what speaks its language. Called through `infra.storage`, which says what each function does.

A large object is fetched, and a very large one sent, in parts that are retried each by itself.

A retried write may find its own earlier request, whose answer was lost: whatever is refused is read back and
compared before it counts as refused.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from infra.errors import InputError, StorageError
from infra.stores.local import ObjectInfo, explained
from infra.stores.s3_client import in_parallel, request, run
from infra.stores.s3_errors import Refused
from infra.stores.s3_small import Answers, get_small

# Up to this size an object is written in one request, streamed. Above it goes in parts, each retried by itself, and
# the condition of a write is asked at the end: two such writers at the very same instant may both be told that they
# were first where the store is not careful (SeaweedFS 4.48 is not). What must have one winner is never that large.
ONE_REQUEST_BYTES = 512 * 2**20
PART_BYTES = 16 * 2**20
MAX_PARTS = 10_000  # S3's limit
PARTS_AT_ONCE = 4  # times PART_BYTES is what a large object takes of memory, whatever its size
REQUESTS_AT_ONCE = 32
MANY = 64  # from here on it pays to read small objects without the client


class Place(NamedTuple):
    """Where an object is, as the client wants it named."""

    uri: str
    bucket: str
    key: str

    @property
    def names(self) -> dict[str, str]:
        return {"Bucket": self.bucket, "Key": self.key}


@dataclass(frozen=True)
class Source:
    """What is to be written.

    Args:
        read: a piece of it, by start and length.
        whole: all of it, as bytes or a file that is newly opened (the client closes it).
    """

    size_bytes: int
    read: Callable[[int, int], bytes]
    whole: Callable[[], bytes | IO[bytes]]

    @classmethod
    def of(cls, data: bytes) -> Source:
        return cls(len(data), lambda start, length: data[start : start + length], lambda: data)


def pieces(size_bytes: int) -> list[tuple[int, int]]:
    """Start and length of each part of an object; none of an empty one."""
    length = max(PART_BYTES, -(-size_bytes // MAX_PARTS))
    return [(start, min(length, size_bytes - start)) for start in range(0, size_bytes, length)]


def get(uri: str) -> bytes:
    return bytes(run(_get, _place(uri))["Body"])


def get_many(uris: list[str]) -> dict[str, bytes]:
    return run(_get_many, [_place(uri) for uri in uris])


def get_range(uri: str, start: int, length: int) -> bytes:
    return run(_get_range, _place(uri), start, length)


def chunks(uri: str) -> Iterator[bytes]:
    place = _place(uri)
    size_bytes, etag = run(_head, place)
    for start, length in pieces(size_bytes):
        yield run(_get_piece, place, etag, start, length)


def get_file(uri: str, local_path: Path) -> None:
    place = _place(uri)
    size_bytes, etag = run(_head, place)
    whole = local_path.with_name(f".{local_path.name}.{os.urandom(6).hex()}.partial")
    with explained(local_path, "written"):
        local_path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with whole.open("wb") as file:
                run(_download, place, size_bytes, etag, file.fileno())
            os.replace(whole, local_path)
        finally:
            whole.unlink(missing_ok=True)


def put(uri: str, data: bytes) -> None:
    run(_write, _place(uri), Source.of(data), {})


def put_file(uri: str, local_path: Path) -> None:
    with _file(local_path) as source:
        run(_write, _place(uri), source, {})


def create(uri: str, data: bytes) -> bool:
    return run(_create, _place(uri), Source.of(data))


def create_file(uri: str, local_path: Path) -> bool:
    with _file(local_path) as source:
        return run(_create, _place(uri), source)


def compare_and_set(uri: str, data: bytes, expected: bytes) -> bool:
    return run(_compare_and_set, _place(uri), data, expected)


def size(uri: str) -> int:
    return run(_head, _place(uri))[0]


def list_objects(uri: str) -> dict[str, ObjectInfo]:
    return run(_list, _place(uri, key_needed=False))


def delete(uri: str) -> None:
    place = _place(uri)
    with contextlib.suppress(FileNotFoundError):
        run(request, uri, "delete_object", **place.names)


def reach(uri: str, limit_seconds: float) -> None:
    """Have the store answer one request about the bucket."""
    place = _place(uri, key_needed=False)
    run(request, uri, "list_objects_v2", limit_seconds, Bucket=place.bucket, Prefix=place.key, MaxKeys=1)


# --- what runs on the client's event loop ---


async def _get(fs: Any, place: Place) -> dict[str, Any]:
    return await request(fs, place.uri, "get_object", **place.names)


async def _get_many(fs: Any, places: list[Place]) -> dict[str, bytes]:
    by_key = {place.key: place for place in places}
    known = await get_small(fs, places[0].bucket, by_key) if len(places) >= MANY else Answers({}, set())
    found = {by_key[key].uri: body for key, body in known.found.items()}

    async def one(place: Place) -> None:
        with contextlib.suppress(FileNotFoundError):
            found[place.uri] = (await _get(fs, place))["Body"]

    rest = [place for key, place in by_key.items() if key not in known.found and key not in known.absent]
    await in_parallel(one, rest, REQUESTS_AT_ONCE)
    return found


async def _head(fs: Any, place: Place) -> tuple[int, str]:
    answer = await request(fs, place.uri, "head_object", **place.names)
    return int(answer["ContentLength"]), str(answer["ETag"])


async def _get_range(fs: Any, place: Place, start: int, length: int) -> bytes:
    part = f"bytes={start}-{start + length - 1}"
    return bytes((await request(fs, place.uri, "get_object", **place.names, Range=part))["Body"])


async def _get_piece(fs: Any, place: Place, etag: str, start: int, length: int) -> bytes:
    part = f"bytes={start}-{start + length - 1}"
    try:
        answer = await request(fs, place.uri, "get_object", **place.names, Range=part, IfMatch=etag)
    except Refused:
        raise StorageError(f"{place.uri} was replaced while it was read") from None
    return bytes(answer["Body"])


async def _download(fs: Any, place: Place, size_bytes: int, etag: str, file_descriptor: int) -> None:
    async def one(piece: tuple[int, int]) -> None:
        start, length = piece
        if os.pwrite(file_descriptor, await _get_piece(fs, place, etag, start, length), start) != length:
            raise StorageError(f"{place.uri} was not written whole to the local disk; is it full?")

    await in_parallel(one, pieces(size_bytes), PARTS_AT_ONCE)


async def _create(fs: Any, place: Place, source: Source) -> bool:
    if source.size_bytes > PART_BYTES:  # do not send gigabytes that will be refused
        with contextlib.suppress(FileNotFoundError):
            await _head(fs, place)
            return await _holds(fs, place, source)
    return await _write(fs, place, source, {"IfNoneMatch": "*"})


async def _compare_and_set(fs: Any, place: Place, data: bytes, expected: bytes) -> bool:
    try:
        found = await _get(fs, place)
    except FileNotFoundError:
        return False
    if found["Body"] != expected:
        return bool(found["Body"] == data)
    return await _write(fs, place, Source.of(data), {"IfMatch": found["ETag"]})


async def _write(fs: Any, place: Place, source: Source, condition: dict[str, str]) -> bool:
    """Whether the object now holds the source; False where the condition has refused it."""
    try:
        if source.size_bytes <= ONE_REQUEST_BYTES:
            await request(fs, place.uri, "put_object", **place.names, Body=source.whole, **condition)
        else:
            await _write_in_parts(fs, place, source, condition)
        return True
    except (Refused, FileNotFoundError) as error:
        # Refused, or an upload in parts that is no longer open: either may be the work of an earlier request.
        if await _holds(fs, place, source):
            return True
        if isinstance(error, Refused) or "IfMatch" in condition:
            return False
        raise StorageError(f"{place.uri} was not written: the store forgot the upload") from error


async def _write_in_parts(fs: Any, place: Place, source: Source, condition: dict[str, str]) -> None:
    opened = await request(fs, place.uri, "create_multipart_upload", **place.names)
    upload = {**place.names, "UploadId": opened["UploadId"]}

    async def one(numbered: tuple[int, tuple[int, int]]) -> dict[str, Any]:
        number, (start, length) = numbered
        body = _read(source, start, length)
        answer = await request(fs, place.uri, "upload_part", **upload, PartNumber=number, Body=body)
        return {"PartNumber": number, "ETag": answer["ETag"]}

    try:
        parts = await in_parallel(one, enumerate(pieces(source.size_bytes), 1), PARTS_AT_ONCE)
        listed = {"Parts": parts}
        await request(fs, place.uri, "complete_multipart_upload", **upload, MultipartUpload=listed, **condition)
    except Exception:
        # Best effort: what stays open takes room until the bucket's own rule removes it.
        with contextlib.suppress(Exception):
            await request(fs, place.uri, "abort_multipart_upload", 0.0, **upload)
        raise


async def _holds(fs: Any, place: Place, source: Source) -> bool:
    """Whether the object has the source's very bytes."""
    try:
        size_bytes, etag = await _head(fs, place)
        if size_bytes != source.size_bytes:
            return False
        for start, length in pieces(source.size_bytes):
            if await _get_piece(fs, place, etag, start, length) != source.read(start, length):
                return False
    except FileNotFoundError:
        return False
    return True


async def _list(fs: Any, place: Place) -> dict[str, ObjectInfo]:
    prefix = f"{place.key.rstrip('/')}/" if place.key else ""
    found: dict[str, ObjectInfo] = {}
    rest: dict[str, str] = {}
    while True:
        page = await request(fs, place.uri, "list_objects_v2", Bucket=place.bucket, Prefix=prefix, **rest)
        for item in page.get("Contents", ()):
            name = str(item["Key"])[len(prefix) :]
            if name and not name.endswith("/") and not name.rpartition("/")[2].startswith("."):
                found[name] = ObjectInfo(int(item["Size"]), item["LastModified"].timestamp())
        if not page.get("IsTruncated"):
            return found
        rest = {"ContinuationToken": page["NextContinuationToken"]}


def _place(uri: str, *, key_needed: bool = True) -> Place:
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    if not bucket or (key_needed and not key):
        raise InputError("root", f"{uri} is not of the form s3://bucket/prefix")
    return Place(uri, bucket, key)


@contextlib.contextmanager
def _file(path: Path) -> Iterator[Source]:
    with explained(path, "read"), path.open("rb") as file:
        size_bytes = os.fstat(file.fileno()).st_size
        yield Source(
            size_bytes, lambda start, length: os.pread(file.fileno(), length, start), lambda: path.open("rb")
        )


def _read(source: Source, start: int, length: int) -> bytes:
    body = source.read(start, length)
    if len(body) != length:
        raise StorageError("the local file has shrunk while it was being written to the store")
    return body
