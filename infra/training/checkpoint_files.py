"""Which checkpoints of a training run are there, and whether they are whole. Knows no tensors, needs no torch.

    <drafts uri>/checkpoints/<lease epoch>/step-00000200/
        model.safetensors      trainable weights, fp32
        optimizer.safetensors  what the optimizer remembers of each of them
        state.json             step, schedule position, sums not yet logged, hash of what is trained on, validations
        metrics.jsonl          every line of metrics so far
        rank-00000.json        random generator state of each rank
        COMMITTED.json         names, sizes and sha256 of all of the above; written last

A folder counts only when COMMITTED.json is there and every file matches it. The newest two are kept, so that damage
to the last one costs the steps in between and not the run. Where the best checkpoint is to be exported, each state
names the best one so far (`kept_best`): that one is kept as long, and without it the newer ones do not count, since
training could not come to the same export from them. Nothing is pickled.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from infra import storage
from infra.fingerprint import sha256_hex
from infra.records import is_name

logger = logging.getLogger("draftsmith.training")

FOLDER = "checkpoints"
MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
STATE_FILE = "state.json"
METRICS_FILE = "metrics.jsonl"
COMMIT_FILE = "COMMITTED.json"
SHARED_FILES = {MODEL_FILE, OPTIMIZER_FILE, STATE_FILE, METRICS_FILE}
KEPT_CHECKPOINTS = 2
_PLACE = re.compile(r"^(?P<epoch>\d+)/step-(?P<step>\d+)/(?P<file>[^/]+)$")


@dataclass(frozen=True, order=True)
class CheckpointRef:
    """One checkpoint folder; the greatest is the newest."""

    step: int
    lease_epoch: int

    @property
    def folder(self) -> str:
        """Its place below the stage's `checkpoints` folder."""
        return f"{self.lease_epoch}/step-{self.step:08d}"

    def uri(self, draft_uri: str) -> str:
        return storage.join(draft_uri, FOLDER, self.folder)


def find(draft_uri: str) -> list[CheckpointRef]:
    """Every checkpoint that claims to be committed, newest first, of all leases."""
    return committed(storage.list_sizes(storage.join(draft_uri, FOLDER)))


def committed(names: Iterable[str]) -> list[CheckpointRef]:
    """`find` in a listing of the `checkpoints` folder that is there already."""
    return [ref for ref, files in folders(names).items() if COMMIT_FILE in files]


def folders(names: Iterable[str]) -> dict[CheckpointRef, set[str]]:
    """File names of every checkpoint folder, committed or not, newest first."""
    found: dict[CheckpointRef, set[str]] = {}
    for name in names:
        if match := _PLACE.match(name):
            found.setdefault(CheckpointRef(int(match["step"]), int(match["epoch"])), set()).add(match["file"])
    return dict(sorted(found.items(), reverse=True))


def kept_best(state: Mapping[str, Any]) -> CheckpointRef | None:
    """The checkpoint that one with this state needs besides its own files."""
    named = state.get("kept_best")
    return None if named is None else CheckpointRef(int(named["step"]), int(named["lease_epoch"]))


def with_their_best(draft_uri: str, refs: Iterable[CheckpointRef]) -> set[CheckpointRef]:
    """The checkpoints and those that they need.

    Raises:
        FileNotFoundError, ValueError: the state of one of them cannot be read.
    """
    found = set(refs)
    for ref in tuple(found):
        best = kept_best(read_state(draft_uri, ref))
        found |= {best} if best is not None else set()
    return found


def read_state(draft_uri: str, ref: CheckpointRef) -> dict[str, Any]:
    """A checkpoint's state, not checked against its commit.

    Raises:
        FileNotFoundError, ValueError: it is not there, or is no JSON object.
    """
    state = json.loads(storage.get(storage.join(ref.uri(draft_uri), STATE_FILE)))
    if not isinstance(state, dict):
        raise ValueError(f"{STATE_FILE} is no object")
    return state


def listed_files(draft_uri: str, ref: CheckpointRef) -> dict[str, dict[str, Any]]:
    """Size and sha256 of each file, as the commit says.

    Raises:
        FileNotFoundError: it is not committed.
        ValueError: the commit cannot be read, or does not name all files.
    """
    try:
        files = json.loads(storage.get(storage.join(ref.uri(draft_uri), COMMIT_FILE)))["files"]
        said = {
            name: {"size_bytes": int(one["size_bytes"]), "sha256": str(one["sha256"])}
            for name, one in files.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{COMMIT_FILE} cannot be read: {error}") from None
    if not set(said) >= SHARED_FILES:
        raise ValueError(f"{COMMIT_FILE} does not name all files")
    if foreign := [name for name in said if not is_name(name)]:
        raise ValueError(f"{COMMIT_FILE} names {foreign[0]!r}, which is no file beside it")
    return said


def read_files(draft_uri: str, ref: CheckpointRef) -> dict[str, bytes]:
    """Every file of a checkpoint, checked against its commit.

    Raises:
        FileNotFoundError, ValueError: it is not whole.
    """
    files = {}
    for name, said in listed_files(draft_uri, ref).items():
        files[name] = storage.get(storage.join(ref.uri(draft_uri), name))
        if sha256_hex(files[name]) != said["sha256"]:
            raise ValueError(f"{name} does not match {COMMIT_FILE}")
    return files


def damage(draft_uri: str, ref: CheckpointRef) -> str | None:
    """What is wrong with a checkpoint; None when it is whole. Reads it in pieces and keeps none of it."""
    try:
        for name, said in listed_files(draft_uri, ref).items():
            if storage.sha256(storage.join(ref.uri(draft_uri), name)) != said["sha256"]:
                return f"{name} does not match {COMMIT_FILE}"
    except FileNotFoundError as error:
        return f"a file is missing: {error}"
    except ValueError as error:
        return str(error)
    return None


def newest_whole(draft_uri: str, inputs_sha256: str) -> CheckpointRef | None:
    """The checkpoint that training goes on from, if there is one. Reads it in pieces and keeps none of it.

    Args:
        inputs_sha256: hash of what is trained on now; checkpoints made from other inputs do not count.
    """
    for ref in find(draft_uri):
        if damage(draft_uri, ref) is None:
            state = json.loads(storage.get(storage.join(ref.uri(draft_uri), STATE_FILE)))
            if state.get("inputs_sha256", "") == inputs_sha256:
                return ref
    return None


def withdraw_foreign(draft_uri: str, inputs_sha256: str, lease_epoch: int) -> None:
    """Take back the commits of checkpoints that this or an earlier lease made from other inputs.

    They would stand before the ones to come: a checkpoint's age is told by its step.
    """
    for ref in find(draft_uri):
        try:
            foreign = read_state(draft_uri, ref).get("inputs_sha256", "") != inputs_sha256
        except (FileNotFoundError, ValueError):
            continue  # damaged, and passed over as such
        if foreign and ref.lease_epoch <= lease_epoch:
            logger.warning(
                "%s was trained on inputs that have been made anew since; training does not go on from it.",
                ref.uri(draft_uri),
            )
            storage.delete(storage.join(ref.uri(draft_uri), COMMIT_FILE))


def delete_older(draft_uri: str, newest: CheckpointRef) -> None:
    """Delete all but the newest checkpoints and the best, each one's commit first, and remains of older uncommitted
    ones."""
    root = storage.join(draft_uri, FOLDER)
    listing = storage.list_sizes(root)
    kept: set[CheckpointRef] = set()
    for ref in [ref for ref in committed(listing) if ref <= newest][:KEPT_CHECKPOINTS]:
        try:
            kept |= with_their_best(draft_uri, [ref])
        except (FileNotFoundError, ValueError):
            kept.add(ref)  # damaged: nobody goes on from it
    for ref, files in folders(listing).items():
        # A later lease's folders, and later steps, belong to a run that is ahead of this one.
        if ref not in kept and ref.lease_epoch <= newest.lease_epoch and ref.step <= newest.step:
            for name in sorted(files, key=lambda name: name != COMMIT_FILE):
                storage.delete(storage.join(root, ref.folder, name))
