"""Resumable checkpoints of a training run: tensors and random state into files, and back.

Saving has two parts: `HostCopies.take` gathers everything in the host memory of rank 0 between two steps, `write`
puts it into files while training goes on (`CheckpointWriter`). Where the files lie and when they count:
`infra.training.checkpoint_files`.
"""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from infra import storage
from infra.errors import StageFailed
from infra.fingerprint import sha256_hex
from infra.training import checkpoint_files
from infra.training.checkpoint_files import (
    COMMIT_FILE,
    METRICS_FILE,
    MODEL_FILE,
    OPTIMIZER_FILE,
    STATE_FILE,
    CheckpointRef,
)
from infra.training.distribution import fit, whole
from infra.training.optimizer import DraftOptimizer

logger = logging.getLogger("draftsmith.training")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files all match its commit."""

    ref: CheckpointRef
    files: dict[str, bytes]

    @property
    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.files[STATE_FILE])
        return found

    @property
    def kept_best(self) -> CheckpointRef | None:
        """The checkpoint that is kept beside this one as the best so far; None where the last is exported."""
        return checkpoint_files.kept_best(self.state)

    @property
    def weights(self) -> dict[str, Tensor]:
        """The trained weights, fp32, by parameter name."""
        return dict(load(self.files[MODEL_FILE]))

    @property
    def metrics(self) -> str:
        return self.files[METRICS_FILE].decode()


def rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.json"


class HostCopies:
    """Buffers in host memory that are filled again at each checkpoint; pinned where a GPU copies into them."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, tensors: Mapping[str, Tensor], *, keep: bool) -> dict[str, Tensor]:
        """Every tensor, whole, on the CPU. All ranks call it with the same names; empty where not `keep`."""
        taken = {}
        for name, held in tensors.items():
            value = whole(held)
            if keep:
                taken[name] = self._copy(name, value)
        if keep and any(value.is_cuda for value in tensors.values()):
            torch.cuda.synchronize()
        return taken

    def _copy(self, name: str, value: Tensor) -> Tensor:
        if name not in self._buffers:
            self._buffers[name] = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
        return self._buffers[name].copy_(value, non_blocking=True)


class CheckpointWriter:
    """Writes one checkpoint at a time, in a thread."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Do `work` in the background; the one before must have been waited for."""
        assert self._pending is None
        self._pending = self._threads.submit(work)

    def wait(self) -> None:
        """Until nothing is being written; raises what went wrong."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()


def write(
    draft_uri: str,
    ref: CheckpointRef,
    weights: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor],
    state: dict[str, Any],
    metrics: str,
    rank_states: Sequence[bytes],
) -> None:
    """Write all files, commit, then delete what is older than the newest two and not the best. Rank 0 only.

    Args:
        weights, optimizer: whole tensors on the CPU.
        rank_states: `rank_state` of every rank.
    """
    uri = ref.uri(draft_uri)
    files = {
        MODEL_FILE: save(dict(weights)),
        OPTIMIZER_FILE: save(dict(optimizer)),
        STATE_FILE: json.dumps({**state, "step": ref.step, "lease_epoch": ref.lease_epoch}, indent=1).encode(),
        METRICS_FILE: metrics.encode(),
        **{rank_file(rank): data for rank, data in enumerate(rank_states)},
    }
    # What an earlier attempt under the same lease left half-written must not be taken for this one.
    storage.delete(storage.join(uri, COMMIT_FILE))
    for name, data in files.items():
        storage.put(storage.join(uri, name), data)
    listed = {name: {"size_bytes": len(data), "sha256": sha256_hex(data)} for name, data in files.items()}
    storage.put(storage.join(uri, COMMIT_FILE), json.dumps({"step": ref.step, "files": listed}, indent=1).encode())
    checkpoint_files.delete_older(draft_uri, ref)


def write_start(draft_uri: str, lease_epoch: int, inputs_sha256: str, weights: Mapping[str, Tensor]) -> None:
    """Write weights as the checkpoint of step 0, so that a run begins from them as it resumes from any other."""
    state = {"inputs_sha256": inputs_sha256, "sums": []}
    write(draft_uri, CheckpointRef(0, lease_epoch), weights, {}, state, "", [])


def read_newest(draft_uri: str, inputs_sha256: str) -> Checkpoint | None:
    """The newest checkpoint whose files match its commit; one that does not is passed over, with a warning.

    So is one whose best checkpoint is not whole (`checkpoint_files`).

    Args:
        inputs_sha256: hash of what is trained on now; checkpoints made from other inputs do not count.
    """
    for ref in checkpoint_files.find(draft_uri):
        try:
            found = Checkpoint(ref, checkpoint_files.read_files(draft_uri, ref))
            if found.state.get("inputs_sha256", "") != inputs_sha256:
                continue
            best = found.kept_best
            if best is not None and best != ref and (problem := checkpoint_files.damage(draft_uri, best)):
                raise ValueError(f"the best one so far, of step {best.step}, is not whole: {problem}")
            return found
        except (FileNotFoundError, ValueError, AttributeError) as error:
            logger.warning("Checkpoint %s is damaged (%s); trying the one before it", ref.uri(draft_uri), error)
    return None


def read_best(draft_uri: str, newest: Checkpoint) -> Checkpoint:
    """The best checkpoint so far, as the newest names it.

    Raises:
        FileNotFoundError, ValueError: it is not whole, or none is named.
    """
    best = newest.kept_best
    if best is None:
        raise ValueError(f"the checkpoint of step {newest.ref.step} names no best one")
    return newest if best == newest.ref else Checkpoint(best, checkpoint_files.read_files(draft_uri, best))


def restore(
    checkpoint: Checkpoint, parameters: dict[str, nn.Parameter], optimizer: DraftOptimizer, rank: int
) -> None:
    """Put weights, optimizer and this rank's random state back.

    Raises:
        StageFailed: the checkpoint is of another model than the config describes.
    """
    weights = checkpoint.weights
    shapes = {name: tuple(value.shape) for name, value in parameters.items()}
    if shapes != {name: tuple(value.shape) for name, value in weights.items()}:
        raise StageFailed(f"checkpoint of step {checkpoint.ref.step} holds other weights than this config's draft")
    with torch.no_grad():
        for name, value in parameters.items():
            value.copy_(fit(weights[name], value))
    optimizer.load_tensors(load(checkpoint.files[OPTIMIZER_FILE]))
    if rank_file(rank) in checkpoint.files:
        _restore_rank_state(checkpoint.files[rank_file(rank)])


def rank_state() -> bytes:
    """Random generator state of this rank."""
    state = {"torch": base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode()}
    if torch.cuda.is_available():
        state["cuda"] = base64.b64encode(torch.cuda.get_rng_state().numpy().tobytes()).decode()
    return json.dumps(state).encode()


def _restore_rank_state(data: bytes) -> None:
    state = json.loads(data)
    torch.set_rng_state(_state_tensor(state["torch"]))
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state(_state_tensor(state["cuda"]))


def _state_tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
