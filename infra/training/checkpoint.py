"""Resumable checkpoints of a training run, on any URI that infra.storage knows.

    <drafts uri>/checkpoints/<lease epoch>/step-00000200/
        model.safetensors      trainable weights, fp32
        optimizer.safetensors  what the optimizer remembers of each of them
        state.json             step, schedule position, sums not yet logged
        metrics.jsonl          every line of metrics so far
        rank-00000.json        random generator state of each rank
        COMMITTED.json         names, sizes and sha256 of all of the above; written last

A folder counts only when COMMITTED.json is there and every file matches it. The newest two are kept, so that damage
to the last one costs the steps in between and not the run. Nothing is pickled.
"""

from __future__ import annotations

import base64
import json
import logging
import re
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from infra import storage
from infra.errors import StageFailed
from infra.fingerprint import sha256_hex
from infra.training.optimizer import DraftOptimizer

logger = logging.getLogger("draftsmith.training")

MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
STATE_FILE = "state.json"
METRICS_FILE = "metrics.jsonl"
COMMIT_FILE = "COMMITTED.json"
KEPT_CHECKPOINTS = 2
_FOLDER = re.compile(r"^(?P<epoch>\d+)/step-(?P<step>\d+)/COMMITTED\.json$")


@dataclass(frozen=True, order=True)
class CheckpointRef:
    """One checkpoint folder; the greatest is the newest."""

    step: int
    lease_epoch: int

    def uri(self, draft_uri: str) -> str:
        return storage.join(draft_uri, "checkpoints", str(self.lease_epoch), f"step-{self.step:08d}")


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
    _delete_older(draft_uri, ref)


def find(draft_uri: str) -> list[CheckpointRef]:
    """Every checkpoint that claims to be committed, newest first, of all leases."""
    listing = storage.list_sizes(storage.join(draft_uri, "checkpoints"))
    matches = (_FOLDER.match(name) for name in listing)
    return sorted((CheckpointRef(int(m["step"]), int(m["epoch"])) for m in matches if m), reverse=True)


def read_newest(draft_uri: str) -> Checkpoint | None:
    """The newest checkpoint whose files match its commit; one that does not is passed over, with a warning."""
    for ref in find(draft_uri):
        problem, found = _read(draft_uri, ref)
        if found is not None:
            return found
        logger.warning("Checkpoint %s is damaged (%s); trying the one before it", ref.uri(draft_uri), problem)
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


def _read(draft_uri: str, ref: CheckpointRef) -> tuple[str, Checkpoint | None]:
    uri = ref.uri(draft_uri)
    try:
        listed = json.loads(storage.get(storage.join(uri, COMMIT_FILE)))["files"]
        files = {name: storage.get(storage.join(uri, name)) for name in listed}
        for name, data in files.items():
            if len(data) != listed[name]["size_bytes"] or sha256_hex(data) != listed[name]["sha256"]:
                return f"{name} does not match {COMMIT_FILE}", None
        found = Checkpoint(ref, files)
        if not {MODEL_FILE, OPTIMIZER_FILE, STATE_FILE, METRICS_FILE} <= set(files):
            return f"{COMMIT_FILE} does not name all files", None
        _ = found.state
        return "", found
    except FileNotFoundError as error:
        return f"a file is missing: {error}", None
    except (ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        return f"{COMMIT_FILE} cannot be read: {error}", None


def _delete_older(draft_uri: str, newest: CheckpointRef) -> None:
    """Delete all but the newest checkpoints, each one's commit first, and remains of older uncommitted ones."""
    kept = [ref for ref in find(draft_uri) if ref <= newest][:KEPT_CHECKPOINTS]
    keep = {f"{ref.lease_epoch}/step-{ref.step:08d}" for ref in kept}
    root = storage.join(draft_uri, "checkpoints")
    listing = storage.list_sizes(root)
    for name in sorted(listing, key=lambda name: not name.endswith(COMMIT_FILE)):
        epoch, _, rest = name.partition("/")
        folder = f"{epoch}/{rest.partition('/')[0]}"
        # A later lease's folders, and later steps, belong to a run that is ahead of this one.
        step = rest.partition("/")[0].removeprefix("step-")
        if not epoch.isdigit() or not step.isdigit() or folder in keep:
            continue
        if int(epoch) <= newest.lease_epoch and int(step) <= newest.step:
            storage.delete(storage.join(root, name))


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
