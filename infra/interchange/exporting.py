"""Export of a hidden_states stage as a speculators data folder (`infra.interchange.folder` says what that is).

One sample is in memory at a time, one shard on disk besides. All is written into `FOLDER.partial`, each file of
states whole by a rename, and takes its name at the end: an export that was cut short goes on where it was, and a
folder that is there is whole.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import torch
from safetensors.torch import save_file
from torch import Tensor

from infra import manifest
from infra.drafts.vocab import VocabConfig, build_map
from infra.errors import InfrastructureError, InputError, StageFailed
from infra.hidden_states import HiddenSample, HiddenStatesFile, HiddenStatesMeta
from infra.interchange.folder import ABOUT_FILE, STATES, STATES_FOLDER, TOKEN_IDS, states_name
from infra.manifest import ShardRecord
from infra.schemas import STATUS_FAILED

FIELD = "FOLDER"
_WORK_FOLDER = ".unfinished"
# Of a file of states beside its tensors, and of a row of ids in the data set, which is on disk twice for a while.
_FILE_BYTES = 4096
_ID_BYTES_PER_TOKEN = 8 + 2 * (8 + 8)

_ROWS = pa.schema(
    [
        pa.field("input_ids", pa.list_(pa.int64())),
        pa.field("loss_mask", pa.list_(pa.int64())),
        pa.field("seq_len", pa.int64()),
        pa.field("sample_id", pa.string()),
        pa.field("status", pa.string()),
    ]
)

logger = logging.getLogger("draftsmith.interchange")


@dataclass(frozen=True)
class Exported:
    """What an export has written.

    Args:
        samples: rows of the data set, each with its file of states.
        left_out: failed rows of the stage, which have no states.
        target_layer_ids: what the trainer must be told; the layers but the last.
        draft_vocab_size: of the vocabulary maps in the folder; None where no token is trained.
    """

    folder: str
    samples: int
    left_out: int
    num_tokens: int
    target_layer_ids: list[int]
    draft_vocab_size: int | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def export_states(
    stage_uri: str, folder: Path, vocab: VocabConfig, verifier_vocab_size: int, kept: Tensor | None = None
) -> Exported:
    """Write a complete hidden_states stage, of any encoding, as a data folder that speculators trains on.

    Args:
        vocab: size of the draft's vocabulary, whose maps the folder gets.
        verifier_vocab_size: number of the verifier's tokens.
        kept: tokens of that vocabulary, where they are not chosen by the samples (`vocab.from_start`).

    Raises:
        InputError: the stage is not complete, the folder is in use, or its disk has no room.
        DamagedShard: a shard is not what was committed.
        InfrastructureError: the folder cannot be written.
    """
    records = _records(stage_uri)
    partial = folder.with_name(f"{folder.name}.partial")
    try:
        _refuse_taken(folder, partial, stage_uri)
        _refuse_no_room(folder.parent, partial, records)
        (partial / STATES_FOLDER).mkdir(parents=True, exist_ok=True)
        with _alone(partial):
            exporter = _Exporter(stage_uri, records, partial, verifier_vocab_size)
            exporter.write_samples()
            draft_vocab_size = exporter.write_vocabulary(vocab, kept)
            exporter.write_dataset()
            shutil.rmtree(partial / _WORK_FOLDER)
            os.replace(partial, folder)
    except OSError as error:
        full = f"; free some room and run the same command again ({partial} is continued)"
        raise InfrastructureError(
            f"{folder} cannot be written: {error}{full if error.errno == errno.ENOSPC else ''}"
        ) from error
    left_out = sum(record.status_counts.get(STATUS_FAILED, 0) for record in records)
    layers = list(exporter.meta.layer_ids[:-1])
    return Exported(str(folder), exporter.samples, left_out, exporter.num_tokens, layers, draft_vocab_size)


def _records(stage_uri: str) -> list[ShardRecord]:
    found = manifest.read_manifest(stage_uri)
    if found is None:
        raise InputError("CONFIG", f"its hidden_states stage {stage_uri} is not complete; run the pipeline first")
    return list(manifest.records_of(found).values())


def _refuse_taken(folder: Path, partial: Path, stage_uri: str) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(FIELD, f"{folder} is not empty; name a new folder")
    if not folder.parent.is_dir():
        raise InputError(FIELD, f"{folder.parent} is not there; make it first")
    if not partial.exists() or not any(partial.glob(f"{STATES_FOLDER}/*")):
        return  # killed before it wrote anything
    about = partial / ABOUT_FILE
    if not about.is_file() or json.loads(about.read_bytes())["stage"] != _place(stage_uri):
        raise InputError(
            FIELD, f"{partial} is left of another export; delete it, or name another folder than {folder}"
        )
    logger.info("Going on with %s, which an earlier export has left.", partial)


def _refuse_no_room(parent: Path, partial: Path, records: list[ShardRecord]) -> None:
    """Raise InputError where the disk cannot take what is still to be written."""
    states = sum(record.extra.get("state_bytes", {}).get("raw", record.size_bytes) for record in records)
    ids = sum(record.extra.get("num_tokens", 0) for record in records) * _ID_BYTES_PER_TOKEN
    needed = states + ids + sum(record.rows for record in records) * _FILE_BYTES
    needed += max(record.size_bytes for record in records)  # the shard that is being read
    there = sum(path.stat().st_size for path in partial.glob(f"{STATES_FOLDER}/*"))
    free = shutil.disk_usage(parent).free
    if needed - there > free:
        raise InputError(
            FIELD,
            f"the states take {needed / 2**30:.3g} GiB as raw bf16, but {parent} has {(free + there) / 2**30:.3g} "
            "GiB; name a folder on a larger disk",
        )


@contextlib.contextmanager
def _alone(partial: Path) -> Iterator[None]:
    """Refuse a second export into the same folder for as long as this one lasts."""
    descriptor = os.open(partial, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(FIELD, f"another export is writing {partial}") from None
        yield
    finally:
        os.close(descriptor)


def _place(stage_uri: str) -> str:
    return "/".join(stage_uri.rstrip("/").split("/")[-2:])


class _Exporter:
    """One export on its way."""

    def __init__(self, stage_uri: str, records: list[ShardRecord], partial: Path, vocab_size: int) -> None:
        self._stage_uri, self._records, self._partial = stage_uri, records, partial
        self._counts = np.zeros(vocab_size, dtype=np.int64)
        work = partial / _WORK_FOLDER
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        self._rows_path = work / "rows.arrow"
        self.meta = self._say_what_it_is()
        self.samples = 0
        self.num_tokens = 0

    def write_samples(self) -> None:
        """Files of states for every usable sample, and the rows of ids beside them."""
        with pa.OSFile(str(self._rows_path), "wb") as sink, pa.ipc.new_stream(sink, _ROWS) as rows:
            for number, record in enumerate(self._records, 1):
                for sample in self._samples(record):
                    self._write_states(sample)
                    rows.write_table(_row(sample))
                    self._count(sample)
                logger.info(
                    "Exported shard %s (%d of %d): %d samples so far.",
                    record.shard,
                    number,
                    len(self._records),
                    self.samples,
                )
        if not self.samples:
            raise StageFailed(f"{self._stage_uri} has no usable sample to export")

    def write_vocabulary(self, vocab: VocabConfig, kept: Tensor | None) -> int | None:
        """The maps that the trainer looks for by `--draft-vocab-size`, made of the exported samples."""
        if not self._counts.any():
            return None
        built = build_map(vocab, [self._counts], len(self._counts), kept)
        size = built.draft_vocab_size
        np.save(self._partial / f"d2t-{size}.npy", built.d2t.numpy(), allow_pickle=False)
        np.save(self._partial / f"t2d-{size}.npy", built.t2d.numpy(), allow_pickle=False)
        return size

    def write_dataset(self) -> None:
        from datasets import Dataset, disable_progress_bars

        disable_progress_bars()
        data = Dataset.from_file(str(self._rows_path))
        data.set_format(type="torch")
        data.save_to_disk(self._partial)

    def _samples(self, record: ShardRecord) -> Iterator[HiddenSample]:
        """The shard's usable samples, read one by one from a checked file on this disk."""
        with self._opened(record) as file:
            shard = HiddenStatesFile(file)
            if shard.meta != self.meta:
                raise StageFailed(f"{self._stage_uri} shard {record.shard} is of {shard.meta}, not {self.meta}")
            for index in range(len(shard)):
                sample = shard.sample(index)
                if sample is not None:
                    yield sample

    def _write_states(self, sample: HiddenSample) -> None:
        path = self._partial / STATES_FOLDER / states_name(self.samples)
        if path.exists():
            return  # whole: it was renamed when it was
        num_tokens, width = len(sample.input_ids), self.meta.hidden_size
        aux = sample.aux_hidden_states.reshape(num_tokens, -1, width)
        states = torch.cat([aux, sample.verifier_last_hidden_states[:, None]], dim=1)  # [tokens, layers, hidden]
        written = path.with_name(f".{path.name}")
        save_file({STATES: states, TOKEN_IDS: sample.input_ids.long()}, written)
        written.replace(path)

    def _count(self, sample: HiddenSample) -> None:
        self.samples += 1
        self.num_tokens += len(sample.input_ids)
        trained = sample.input_ids[sample.loss_mask].numpy()
        self._counts += np.bincount(trained, minlength=len(self._counts))

    def _opened(self, record: ShardRecord) -> BinaryIO:
        """The shard as a file on this disk, checked against its record."""
        path = self._partial / _WORK_FOLDER / "shard"
        manifest.fetch_shard(self._stage_uri, record, path)
        return path.open("rb")

    def _say_what_it_is(self) -> HiddenStatesMeta:
        """What all shards say they are, into the folder: an export that goes on there must be of the same stage."""
        with self._opened(self._records[0]) as file:
            meta = HiddenStatesFile(file).meta
        about: Mapping[str, Any] = {
            "stage": _place(self._stage_uri),
            "layer_ids": list(meta.layer_ids),
            "hidden_size": meta.hidden_size,
            "verifier_revision": meta.verifier_revision,
            "encoding": meta.encoding,
        }
        written = self._partial / _WORK_FOLDER / ABOUT_FILE
        written.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        written.replace(self._partial / ABOUT_FILE)
        return meta


def _row(sample: HiddenSample) -> pa.Table:
    ids = sample.input_ids.tolist()
    values = [[ids], [sample.loss_mask.int().tolist()], [len(ids)], [sample.sample_id], [sample.status]]
    return pa.table(values, schema=_ROWS)
