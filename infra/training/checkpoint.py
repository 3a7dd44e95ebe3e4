"""Resumable checkpoints of a training run: tensors and random state into files, and back.

Where the files lie and when they count: `infra.training.checkpoint_files`.
"""

from __future__ import annotations

import base64
import json
import logging
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
    def weights(self) -> dict[str, Tensor]:
        """The trained weights, fp32, by parameter name."""
        return dict(load(self.files[MODEL_FILE]))

    @property
    def metrics(self) -> str:
        return self.files[METRICS_FILE].decode()


def rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.json"


def write_rank_file(draft_uri: str, ref: CheckpointRef, rank: int) -> None:
    """Write one rank's own part; every rank does, before rank 0 commits."""
    storage.put(storage.join(ref.uri(draft_uri), rank_file(rank)), _rank_state())


def write(
    draft_uri: str,
    ref: CheckpointRef,
    parameters: dict[str, nn.Parameter],
    optimizer: DraftOptimizer,
    state: dict[str, Any],
    metrics: str,
    world: int,
) -> None:
    """Write the shared files, commit, then delete what is older than the newest two. Rank 0 only."""
    uri = ref.uri(draft_uri)
    files = {
        MODEL_FILE: save({name: value.detach().cpu().contiguous() for name, value in parameters.items()}),
        OPTIMIZER_FILE: save(optimizer.tensors()),
        STATE_FILE: json.dumps({**state, "step": ref.step, "lease_epoch": ref.lease_epoch}, indent=1).encode(),
        METRICS_FILE: metrics.encode(),
    }
    # What an earlier attempt under the same lease left half-written must not be taken for this one.
    storage.delete(storage.join(uri, COMMIT_FILE))
    for name, data in files.items():
        storage.put(storage.join(uri, name), data)
    ranks = {rank_file(rank): storage.get(storage.join(uri, rank_file(rank))) for rank in range(world)}
    listed = {
        name: {"size_bytes": len(data), "sha256": sha256_hex(data)} for name, data in {**files, **ranks}.items()
    }
    storage.put(storage.join(uri, COMMIT_FILE), json.dumps({"step": ref.step, "files": listed}, indent=1).encode())
    checkpoint_files.delete_older(draft_uri, ref)


def read_newest(draft_uri: str, inputs_sha256: str) -> Checkpoint | None:
    """The newest checkpoint whose files match its commit; one that does not is passed over, with a warning.

    Args:
        inputs_sha256: hash of what is trained on now; checkpoints made from other inputs do not count.
    """
    for ref in checkpoint_files.find(draft_uri):
        try:
            found = Checkpoint(ref, checkpoint_files.read_files(draft_uri, ref))
            if found.state.get("inputs_sha256", "") == inputs_sha256:
                return found
        except (FileNotFoundError, ValueError, AttributeError) as error:
            logger.warning("Checkpoint %s is damaged (%s); trying the one before it", ref.uri(draft_uri), error)
    return None


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
            value.copy_(weights[name])
    optimizer.load_tensors(load(checkpoint.files[OPTIMIZER_FILE]))
    if rank_file(rank) in checkpoint.files:
        _restore_rank_state(checkpoint.files[rank_file(rank)])


def _rank_state() -> bytes:
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
