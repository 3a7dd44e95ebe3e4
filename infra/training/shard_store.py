"""The shards of a hidden_states stage on this machine: checked once, then read sample by sample.

A shard in a folder is read where it lies. One on S3 is fetched whole into `$DRAFTSMITH_CACHE/shards`, since its
samples are read in another order in each epoch; what was used longest ago is deleted when the folder is full.

Before anything of a shard is trained on, all of it is read once and compared with its record, in one process of all
those that train together on this machine: the first to need the shard locks it, checks, and leaves a mark (who has
checked, and which file by its size and time stamps) that the others believe.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

import pyarrow as pa

from infra import manifest, storage
from infra.errors import DamagedShard, StageFailed
from infra.guard import process_start
from infra.hidden_states import EncodedSample, HiddenSample, HiddenStatesFile
from infra.locations import cache_folder
from infra.manifest import ShardRecord
from infra.training.ranged_file import RangedFile

T = TypeVar("T")

DEFAULT_CACHE_BYTES = 200 * 2**30
DISK_SHARE = 0.8
"""Of what the disk would have free without the copies: they take no more, whatever they may."""


def process_group() -> str:
    """Names the processes that train together on this machine: one torchrun and its ranks, or this one alone."""
    pid = os.getppid() if "LOCAL_RANK" in os.environ else os.getpid()
    return f"{pid}:{process_start(pid)}"


@dataclass
class ShardFiles:
    """Where each shard lies as a local file that was checked. May be given to other processes.

    Args:
        stage_uri: folder of the stage.
        records: of its shards.
        cache_bytes: what copies of an S3 root's shards may take, beside those being fetched; less on a small disk
            (`DISK_SHARE`).
        group: which processes share their checks.
    """

    stage_uri: str
    records: Sequence[ShardRecord]
    cache_bytes: int = DEFAULT_CACHE_BYTES
    group: str = field(default_factory=process_group)

    def uri(self, shard: int) -> str:
        return storage.join(self.stage_uri, self.records[shard].data_path)

    def open(self, shard: int) -> pa.NativeFile:
        """The shard's file, after its bytes were compared with its record; waits where another process does so.

        Raises:
            DamagedShard: the object is absent, or its bytes are not those that were committed.
        """
        with self._checked(shard) as path:
            # Mapped: a copy less than reading, a fifth of the time that an uncompressed sample takes.
            return pa.memory_map(str(path))

    def prepare(self, shard: int) -> None:
        """Have the shard here, checked, and on its way from the disk into memory. Raises as `open`."""
        with self._checked(shard) as path, path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)

    @contextlib.contextmanager
    def _checked(self, shard: int) -> Iterator[Path]:
        record, path = self.records[shard], self._path(shard)
        with _locked(_mark_of(record.sha256)) as mark:
            os.utime(mark.fileno())  # used now
            if not path.exists() or mark.read() != self._said(path):
                self._check(record, path)
                mark.seek(0)
                mark.truncate()
                mark.write(self._said(path))
                mark.flush()
            yield path

    def _check(self, record: ShardRecord, path: Path) -> None:
        if not self._remote:
            manifest.check_shard(self.stage_uri, record)
        elif not path.exists() or storage.sha256(str(path)) != record.sha256:
            path.unlink(missing_ok=True)
            for left in path.parent.glob(f".{path.name}*"):  # by a process that was killed
                left.unlink()
            self._make_room(record.size_bytes)
            manifest.fetch_shard(self.stage_uri, record, path)

    @property
    def _remote(self) -> bool:
        return self.stage_uri.startswith("s3://")

    def _path(self, shard: int) -> Path:
        if self._remote:
            return _mark_of(self.records[shard].sha256).with_suffix(".parquet")
        return Path(self.uri(shard).removeprefix("file://"))

    def _said(self, path: Path) -> str:
        """What a mark says: who has checked which file."""
        stat = path.stat()
        stamp = [stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
        return json.dumps({"checked_by": self.group, "file": stamp})

    def _make_room(self, size_bytes: int) -> None:
        """Delete copies, the longest unused first, until one more fits. Who has one open reads on."""
        with _locked(_folder() / "room.lock"):
            copies = [(_used_at(path), path, path.stat().st_size) for path in _folder().glob("*.parquet")]
            taken = sum(size for _, _, size in copies)
            most = min(self.cache_bytes, int(DISK_SHARE * (taken + (storage.free_bytes(str(_folder())) or 0))))
            taken += size_bytes
            for _, path, size in sorted(copies):
                if taken <= most:
                    return
                with contextlib.suppress(BlockingIOError), _locked(path.with_suffix(".mark"), fcntl.LOCK_NB):
                    path.unlink(missing_ok=True)
                    taken -= size


class ShardStore:
    """Reads samples of a stage's shards; the last few shards stay open, of which only the footers are in memory.

    Args:
        stage_uri: folder of the stage.
        max_open: files that stay open.
        cache_bytes: see ShardFiles.
        files: known already, in a process that was given them.

    Raises (from its methods):
        DamagedShard: a shard does not match its record.
        StageFailed: the stage is not complete.
    """

    def __init__(
        self,
        stage_uri: str,
        max_open: int,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        files: ShardFiles | None = None,
    ) -> None:
        if files is None:
            found = manifest.read_manifest(stage_uri)
            if found is None:
                raise StageFailed(f"{stage_uri} has no manifest; finish that stage before training")
            records = manifest.records_of(found)
            files = ShardFiles(stage_uri, [records[shard] for shard in sorted(records)], cache_bytes)
        self.stage_uri = stage_uri
        self.files = files
        self.records = files.records
        self.max_open = max_open
        self._open: OrderedDict[int, HiddenStatesFile] = OrderedDict()
        self._lock = Lock()

    def sample(self, shard: int, row: int) -> HiddenSample | None:
        """The decoded sample; None where it failed."""
        return self._told(shard, lambda: self._file(shard).sample(row))

    def encoded(self, shard: int, row: int) -> EncodedSample | None:
        """The sample, not decoded yet; None where it failed."""
        return self._told(shard, lambda: self._file(shard).encoded(row))

    def read_unchecked(self, shard: int, read: Callable[[HiddenStatesFile], T]) -> T:
        """What `read` takes of a shard by ranges, before the rest of it is fetched or checked."""
        size_bytes = self.records[shard].size_bytes
        return self._told(shard, lambda: read(HiddenStatesFile(RangedFile(self.files.uri(shard), size_bytes))))

    def _file(self, shard: int) -> HiddenStatesFile:
        with self._lock:
            if shard not in self._open:
                self._open[shard] = HiddenStatesFile(self.files.open(shard))
                while len(self._open) > self.max_open:
                    self._open.popitem(last=False)
            self._open.move_to_end(shard)
            return self._open[shard]

    def _told(self, shard: int, read: Callable[[], T]) -> T:
        """What cannot be read as a file of hidden states is a damaged shard, by name."""
        try:
            return read()
        except FileNotFoundError:
            problem = f"{self.records[shard].data} is not there"
        except ValueError as error:
            problem = str(error)
        except OSError as error:
            if error.errno is not None:  # of the file system, not of Parquet's reader
                raise
            problem = str(error)
        raise DamagedShard(self.stage_uri, self.records[shard].shard, problem)


def _folder() -> Path:
    return cache_folder() / "shards"


def _mark_of(sha256: str) -> Path:
    return _folder() / f"{sha256[:32]}.mark"


def _used_at(path: Path) -> float:
    with contextlib.suppress(FileNotFoundError):
        return path.with_suffix(".mark").stat().st_mtime
    return 0.0


@contextlib.contextmanager
def _locked(path: Path, flags: int = 0) -> Iterator[Any]:
    """The file, open for reading and writing, for one process at a time; the kernel frees it when that one dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX | flags)
        file.seek(0)
        yield file
