"""Two stores in memory that fail as drawn from a seed: one as `infra.storage` sees it, one as an S3 client.

A store that reports an error may or may not have done what it was asked; a write may stay torn; a read may end
early; a delete may come twice, or late.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from botocore.exceptions import ClientError, EndpointConnectionError

from infra.errors import StorageError
from infra.storage import ObjectInfo

READ_FAULTS = ("error before", "short read")
WRITE_FAULTS = ("error before", "error after", "torn with error", "torn in silence")
WRITE_WEIGHT = 3.0  # there are fewer writes than reads
DELETE_FAULTS = ("error before", "error after", "again later", "only later")


class Draw:
    """Faults by a seed, for each thread its own: what one writer meets does not depend on the others' pace."""

    def __init__(self, seed: int, rate: float) -> None:
        self.rate = rate
        self.met: Counter[str] = Counter()
        self._seed = seed
        self._of_thread: dict[str, random.Random] = {}
        self._lock = threading.Lock()

    def fault(self, kinds: tuple[str, ...], weight: float = 1.0) -> str:
        """One of the kinds, or "" for none."""
        with self._lock:
            name = threading.current_thread().name
            source = self._of_thread.setdefault(name, random.Random(f"{self._seed} {name}"))
            if source.random() >= self.rate * weight:
                return ""
            kind = source.choice(kinds)
            self.met[kind] += 1
            return kind


class FaultyStore:
    """A `storage.Store` whose calls fail after its own retries have given up."""

    def __init__(self, draw: Draw) -> None:
        self.draw = draw
        self.objects: dict[str, bytes] = {}
        self._late: list[str] = []
        self._lock = threading.RLock()

    def get(self, uri: str) -> bytes:
        fault = self.draw.fault(READ_FAULTS)
        if fault == "error before":
            raise StorageError("503")
        with self._lock:
            if uri not in self.objects:
                raise FileNotFoundError(uri)
            body = self.objects[uri]
        return body[: len(body) // 2] if fault else body

    def get_many(self, uris: list[str]) -> dict[str, bytes]:
        return {uri: self.get(uri) for uri in uris if uri in self.objects}

    def chunks(self, uri: str) -> Iterator[bytes]:
        yield self.get(uri)

    def get_file(self, uri: str, local_path: Path) -> None:
        local_path.write_bytes(self.get(uri))

    def put(self, uri: str, data: bytes) -> None:
        self._write(uri, data)

    def put_file(self, uri: str, local_path: Path) -> None:
        self._write(uri, local_path.read_bytes())

    def create(self, uri: str, data: bytes) -> bool:
        with self._lock:
            if uri in self.objects:
                return self.get(uri) == data
            self._write(uri, data)
            return True

    def create_file(self, uri: str, local_path: Path) -> bool:
        return self.create(uri, local_path.read_bytes())

    def compare_and_set(self, uri: str, data: bytes, expected: bytes) -> bool:
        with self._lock:
            if self.get(uri) != expected:
                return False
            self._write(uri, data)
            return True

    def size(self, uri: str) -> int:
        with self._lock:
            if uri not in self.objects:
                raise FileNotFoundError(uri)
            return len(self.objects[uri])

    def list_objects(self, uri: str) -> dict[str, ObjectInfo]:
        if self.draw.fault(("error before",)):
            raise StorageError("503")
        with self._lock:
            prefix = f"{uri}/"
            found = {
                name[len(prefix) :]: len(body) for name, body in self.objects.items() if name.startswith(prefix)
            }
        return {name: ObjectInfo(size_bytes, time.time()) for name, size_bytes in found.items()}

    def delete(self, uri: str) -> None:
        fault = self.draw.fault(DELETE_FAULTS, WRITE_WEIGHT)
        with self._lock:
            if fault in ("again later", "only later"):
                self._late.append(uri)
            if fault not in ("error before", "only later"):
                self.objects.pop(uri, None)
        if fault not in ("", "again later"):
            raise StorageError("the answer to a delete was lost")

    def reach(self, uri: str, limit_seconds: float) -> None: ...

    def deliver_late(self) -> None:
        """Deletes that were under way arrive."""
        with self._lock:
            while self._late:
                self.objects.pop(self._late.pop(), None)

    def _write(self, uri: str, data: bytes) -> None:
        fault = self.draw.fault(WRITE_FAULTS, WRITE_WEIGHT)
        if fault == "error before":
            raise StorageError("503")
        with self._lock:
            self.objects[uri] = data[: len(data) // 2] if fault.startswith("torn") else data
        if fault.endswith(("after", "with error")):
            raise StorageError("the answer to a write was lost")


class FlakyS3Client:
    """The methods of an S3 client that `infra.stores.s3` uses, over a wire that fails; the store itself is right."""

    def __init__(self, draw: Draw) -> None:
        self.draw = draw
        self.objects: dict[str, bytes] = {}
        self._uploads: dict[str, dict[int, bytes]] = {}

    async def get_object(self, Key: str, Range: str | None = None, IfMatch: str | None = None, **_: Any) -> Any:
        self._before()
        body = self._present(Key, IfMatch)
        if Range is not None:
            first, last = Range.removeprefix("bytes=").split("-")
            body = body[int(first) : int(last) + 1]
        cut = body[: len(body) // 2] if body and self.draw.fault(("short read",)) else body
        return {"Body": _Stream(cut), "ContentLength": len(body), "ETag": _etag(self.objects[Key])}

    async def head_object(self, Key: str, **_: Any) -> Any:
        self._before()
        body = self._present(Key, None)
        return {"ContentLength": len(body), "ETag": _etag(body)}

    async def put_object(
        self, Key: str, Body: bytes, IfNoneMatch: str = "", IfMatch: str | None = None, **_: Any
    ) -> Any:
        self._before()
        self._refuse(Key, IfNoneMatch, IfMatch)
        self.objects[Key] = Body
        self._after()
        return {"ETag": _etag(Body)}

    async def delete_object(self, Key: str, **_: Any) -> Any:
        self._before()
        self.objects.pop(Key, None)
        self._after()
        return {}

    async def list_objects_v2(self, Prefix: str, ContinuationToken: str = "", **_: Any) -> Any:
        self._before()
        names = sorted(name for name in self.objects if name.startswith(Prefix) and name > ContinuationToken)
        page = [
            {"Key": name, "Size": len(self.objects[name]), "LastModified": datetime.now(UTC)} for name in names[:7]
        ]
        more = {"IsTruncated": True, "NextContinuationToken": names[6]} if len(names) > 7 else {}
        return {"Contents": page, **more}

    async def create_multipart_upload(self, **_: Any) -> Any:
        self._before()
        upload = f"upload-{len(self._uploads)}"
        self._uploads[upload] = {}
        return {"UploadId": upload}

    async def upload_part(self, UploadId: str, PartNumber: int, Body: bytes, **_: Any) -> Any:
        self._before()
        self._uploads[UploadId][PartNumber] = Body
        self._after()
        return {"ETag": _etag(Body)}

    async def complete_multipart_upload(
        self, Key: str, UploadId: str, MultipartUpload: Any, IfNoneMatch: str = "", **_: Any
    ) -> Any:
        self._before()
        if UploadId not in self._uploads:
            raise _refusal(404, "NoSuchUpload")
        self._refuse(Key, IfNoneMatch, None)
        parts = self._uploads.pop(UploadId)
        self.objects[Key] = b"".join(parts[part["PartNumber"]] for part in MultipartUpload["Parts"])
        self._after()
        return {}

    async def abort_multipart_upload(self, UploadId: str, **_: Any) -> Any:
        self._uploads.pop(UploadId, None)
        return {}

    def _before(self) -> None:
        fault = self.draw.fault(("503", "SlowDown", "no connection"))
        if fault == "no connection":
            raise EndpointConnectionError(endpoint_url="http://store.example")
        if fault:
            raise _refusal(503, fault)

    def _after(self) -> None:
        if self.draw.fault(("lost answer",)):
            raise EndpointConnectionError(endpoint_url="http://store.example")

    def _present(self, key: str, etag: str | None) -> bytes:
        if key not in self.objects:
            raise _refusal(404, "NoSuchKey")
        if etag is not None and etag != _etag(self.objects[key]):
            raise _refusal(412, "PreconditionFailed")
        return self.objects[key]

    def _refuse(self, key: str, if_none_match: str, if_match: str | None) -> None:
        if if_none_match and key in self.objects:
            raise _refusal(412, "PreconditionFailed")
        if if_match is not None:
            self._present(key, if_match)


class _Stream:
    def __init__(self, body: bytes) -> None:
        self._body = body

    async def __aenter__(self) -> _Stream:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def read(self) -> bytes:
        return self._body


def _etag(body: bytes) -> str:
    return f"{hash(body):x}"


def _refusal(status: int, code: str) -> ClientError:
    answer = {"Error": {"Code": code, "Message": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return ClientError(answer, "call")
