"""The draft that training starts from: which one it is (its revision), and a local folder with its checkpoint.

Three origins, told apart by the form of `train.init_from.draft`:

- `s3://…/drafts/<key>/export` (or `file://…`): what an earlier run exported; its revision is the hash of what the
  stage's records state, and it is fetched once into `$DRAFTSMITH_CACHE/drafts/<revision>`;
- a local folder: used in place; its revision is the hash of its content;
- anything else: an id on the Hugging Face hub; its revision is the resolved commit.

What a draft of one kind must look like to be started from is that kind's own (`infra.training.eagle3_start`).
"""

from __future__ import annotations

import re
import shutil
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from infra import folders, manifest
from infra.config import Config, InputPath
from infra.errors import DamagedShard, InputError
from infra.fingerprint import content_sha256
from infra.locations import cache_folder, project_home
from infra.records import ShardRecord
from infra.schemas import EXPORT_FOLDER
from infra.verifiers import hub as verifier_hub

if TYPE_CHECKING:
    from torch import Tensor

    from infra.drafts.vocab import VocabConfig

FIELD = "train.init_from.draft"
REVISION_FIELD = "train.init_from.revision"
START = "start_draft"
"""Under this name a stage's content has the start draft's revision."""

_CONTENT_HASH = re.compile(r"[0-9a-f]{64}")


class StartConfig(Config):
    """Which draft training starts from. Its resolved revision, not these fields, enters the keys."""

    draft: Annotated[InputPath, Field(min_length=1)]
    """A local folder, a Hugging Face id, or `<root>/drafts/<key>/export` of any root: a speculators checkpoint, or
    one in the original EAGLE-3 layout."""
    revision: str | None = None
    """Hub: branch, tag or commit. Otherwise: the revision that the draft must have, or nothing is run; `draftsmith
    plan` shows it. With all of it given, the draft may be deleted once training has begun."""


def start_revision(config: StartConfig) -> str:
    """The start draft's revision, without fetching it: hub commit, or hash of its files' names and content.

    Raises:
        InputError: it is not there, is not whole, or is not of the revision asked for.
        InfrastructureError: the hub did not answer.
    """
    if config.revision and _CONTENT_HASH.fullmatch(config.revision) and _is_gone(config.draft):
        return config.revision
    if "://" in config.draft:
        files = _exported(config.draft)
        revision = content_sha256({name: record.sha256 for name, record in files.items()})
    elif folder := _local_folder(config.draft):
        if problem := folders.weights_problem(folder):
            raise InputError(FIELD, f"{folder} cannot be used: {problem}")
        revision = folders.folder_sha256(folder)
    else:
        return verifier_hub.resolve_commit(config.draft, config.revision, FIELD, REVISION_FIELD)
    if config.revision and not revision.startswith(config.revision):
        raise InputError(REVISION_FIELD, f"is {config.revision}, but {config.draft} has revision {revision}")
    return revision


def start_folder(config: StartConfig) -> Path:
    """A folder on this machine with the start draft's config.json and safetensors weights, whole.

    Effects: may download into `$DRAFTSMITH_CACHE/drafts` or the hub's cache.

    Raises:
        InputError, InfrastructureError: as `start_revision`; InputError also when an exported draft is damaged.
    """
    revision = start_revision(config)
    if "://" in config.draft:
        return _fetched(config.draft, cache_folder() / "drafts" / revision)
    return _local_folder(config.draft) or verifier_hub.fetch_snapshot(
        config.draft, revision, config.revision, FIELD
    )


def folder_here(config: StartConfig) -> Path | None:
    """`start_folder` where that needs no download; None where it does, or where the draft has been deleted."""
    return None if "://" in config.draft or _is_gone(config.draft) else _local_folder(config.draft)


def token_ids(folder: Path, verifier_vocab_size: int) -> Tensor:
    """[draft_vocab_size] int64, the verifier's id of each token that a draft can propose, in the draft's order.

    Raises:
        InputError: the draft does not say, or says it of another vocabulary.
    """
    import torch
    from safetensors import safe_open

    files = folders.tensor_files(folder)

    def num_rows(name: str) -> int | None:
        if name not in files:
            return None
        with safe_open(folder / files[name], framework="pt") as file:
            return int(file.get_slice(name).get_shape()[0])

    if num_rows("t2d") not in (None, verifier_vocab_size):
        raise InputError(
            FIELD,
            f"the start draft has vocab_size {num_rows('t2d')}, but this verifier's has {verifier_vocab_size}",
        )
    if "d2t" in files:
        with safe_open(folder / files["d2t"], framework="pt") as file:
            offsets: Tensor = file.get_tensor("d2t").long()
        ids = torch.arange(len(offsets)) + offsets
    else:
        ids = torch.arange(num_rows("lm_head.weight") or 0)
        if len(ids) != verifier_vocab_size:
            raise InputError(
                FIELD,
                f"the start draft has no vocabulary map (d2t), and its head of {len(ids)} tokens is not of the "
                f"verifier's {verifier_vocab_size}",
            )
    if not len(ids) or int(ids.min()) < 0 or int(ids.max()) >= verifier_vocab_size:
        raise InputError(
            FIELD, f"the start draft's vocabulary map leads outside the verifier's {verifier_vocab_size} tokens"
        )
    if len(set(ids.tolist())) != len(ids):
        raise InputError(FIELD, "the start draft's vocabulary map names a token twice")
    return ids


def kept_tokens(vocab: VocabConfig, start: StartConfig | None, verifier_vocab_size: int) -> Tensor | None:
    """The start draft's `token_ids` where the config keeps its vocabulary; None where tokens are chosen anew."""
    if not vocab.from_start or start is None:
        return None
    return token_ids(start_folder(start), verifier_vocab_size)


def _local_folder(draft: str) -> Path | None:
    right = "give a folder, a Hugging Face id or <root>/drafts/<key>/export"
    return folders.named_folder(draft, FIELD, right)


def _is_gone(draft: str) -> bool:
    """Whether what the config names has been deleted, as far as it is no hub id."""
    if "://" in draft:
        return manifest.read_manifest(_stage_uri(draft)) is None
    return not (project_home() / Path(draft).expanduser()).exists()


def _stage_uri(uri: str) -> str:
    """Folder of the drafts stage that `uri` is the export of."""
    stage_uri, _, name = uri.rstrip("/").rpartition("/")
    if name != EXPORT_FOLDER or stage_uri.split("/")[-2:-1] != ["drafts"]:
        raise InputError(FIELD, f"{uri} is no exported draft: give <root>/drafts/<key>/{EXPORT_FOLDER}")
    return stage_uri


def _exported(uri: str) -> dict[str, ShardRecord]:
    """The record of each file of an exported draft, by its name there."""
    found = manifest.read_manifest(_stage_uri(uri))
    if found is None:
        raise InputError(FIELD, f"there is no complete drafts stage at {_stage_uri(uri)}")
    records = manifest.records_of(found).values()
    prefix = f"{EXPORT_FOLDER}/"
    return {each.data_path.removeprefix(prefix): each for each in records if each.data_path.startswith(prefix)}


def _fetched(uri: str, folder: Path) -> Path:
    if folders.is_sealed(folder):
        return folder
    staged = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:12]}.partial")
    try:
        staged.mkdir(parents=True)
        for name, record in _exported(uri).items():
            manifest.fetch_shard(_stage_uri(uri), record, staged / name)
        folders.seal(staged)
        shutil.rmtree(folder, ignore_errors=True)
        staged.rename(folder)
    except DamagedShard as error:  # not of a stage that this run could make again
        raise InputError(FIELD, f"{uri} is damaged: {error.problem}; export it again there") from error
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return folder
