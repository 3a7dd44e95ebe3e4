"""Data sets on the Hugging Face hub: the commit behind a name, their files, their rows. Runs no code of theirs.

A data set's files are downloaded once into the hub's cache, at a commit, and read from there, so a second run needs
no hub and can never read another revision than the one in its key.
"""

from __future__ import annotations

import functools
import logging
import re
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from infra.errors import InfrastructureError, InputError
from infra.prompts.files import Entry, read_entries, table_entries

logger = logging.getLogger("draftsmith.prompts")

_COMMIT = re.compile(r"[0-9a-f]{40}")
_TIMEOUT_SECONDS = 30
_BATCH_ROWS = 1000
_MOST_TOLD = 300
# Data and what describes it; never code, images, or the weights that some put beside them.
_WANTED = ["*.parquet", "*.json", "*.jsonl", "*.ndjson", "*.csv", "*.tsv", "*.txt", "*.arrow", "*.gz", "*.zst"]
_DESCRIPTION = ["README.md", ".huggingface.yaml", "dataset_infos.json"]


@functools.cache
def resolve_commit(hub: str, revision: str | None, where: str) -> str:
    """Commit of a hub data set's branch, tag or commit. A full commit is taken as it is, without asking.

    Asked once in a process, so that all stages of a run agree. With HF_HUB_OFFLINE=1, what its cache remembers.

    Raises:
        InputError: there is no such data set or revision, access is refused, or it is not cached while offline.
        InfrastructureError: the hub did not answer.
    """
    if revision and _COMMIT.fullmatch(revision):
        return revision
    from huggingface_hub import HfApi
    from huggingface_hub.errors import OfflineModeIsEnabled

    try:
        commit = HfApi().dataset_info(hub, revision=revision, timeout=_TIMEOUT_SECONDS).sha
    except OfflineModeIsEnabled as error:
        reference = _reference(hub, revision)
        if not reference.is_file():
            raise InputError(
                where,
                f"{hub} is neither pinned to a commit nor in the hub's cache, and HF_HUB_OFFLINE forbids asking "
                "the hub; give `revision: <commit>`, or run once with the hub in reach",
            ) from error
        commit = reference.read_text().strip()
    except Exception as error:
        raise _explained(error, hub, revision, where) from error
    if not commit:
        raise InfrastructureError(f"the Hugging Face hub named no commit for the data set {hub}")
    logger.info("%s is not pinned: its commit is now %s; `revision` would keep it there.", hub, commit)
    return commit


def fetch(hub: str, commit: str, revision: str | None, files: Sequence[str] | None, where: str) -> Path:
    """Folder with a data set at this commit: `files` of it, or all its data files.

    Effects: downloads what is not in the hub's cache. One that is whole there serves also without the hub.

    Args:
        commit: what `resolve_commit` gave for `revision`.

    Raises:
        InputError: access is refused, the commit is unknown, or it is not cached while offline.
        InfrastructureError: the download failed; calling again continues it.
    """
    from huggingface_hub import constants, snapshot_download

    offline = constants.HF_HUB_OFFLINE
    wanted = list(files) if files else [*_WANTED, *_DESCRIPTION]
    try:
        folder = snapshot_download(
            hub, repo_type="dataset", revision=commit, allow_patterns=wanted, local_files_only=offline
        )
    except Exception as error:
        if offline:
            told = "is not whole in the hub's cache; HF_HUB_OFFLINE forbids asking the hub"
            raise InputError(where, f"{hub} at {commit[:12]} {told}") from error
        raise _explained(error, hub, commit, where) from error
    if not offline:
        _remember_commit(hub, revision, commit)
    return Path(str(folder))


def read_split(folder: Path, hub: str, subset: str | None, split: str, where: str) -> Iterator[Entry]:
    """The rows of one split, found by the data set's own description, straight from its files.

    Raises:
        InputError: there is no such subset or split, or the data cannot be read.
    """
    import datasets

    try:
        # Streaming, of local files: the whole would be written a second time, as Arrow, into another cache.
        rows = datasets.load_dataset(str(folder), name=subset, split=split, streaming=True).with_format("arrow")
        for table in rows.iter(batch_size=_BATCH_ROWS):
            yield from table_entries(table)
    except Exception as error:  # Of many kinds, the library's and its readers', and none of them mended by a retry.
        told = str(error).replace(str(folder), hub)[:_MOST_TOLD] or type(error).__name__
        raise InputError(where, f"{hub} cannot be read by the `datasets` library: {told}") from error


def read_files(folder: Path, hub: str, files: Sequence[str], where: str) -> Iterator[Entry]:
    """The rows of some of a data set's files, in the order of the patterns, then of their names.

    Raises:
        InputError: a pattern finds none, or a file is damaged.
    """
    for pattern in files:
        found = sorted(path for path in folder.glob(pattern) if path.is_file())
        if not found:
            raise InputError(where, f"{hub} has no file {pattern}")
        for path in found:
            yield from read_entries(path, path.name, where)


def _remember_commit(hub: str, revision: str | None, commit: str) -> None:
    """Note in the hub's cache what the branch or tag stood for, as its library does for a download by name."""
    reference = _reference(hub, revision)
    if revision == commit or (reference.is_file() and reference.read_text().strip() == commit):
        return
    staged = reference.with_name(f".{reference.name}.{uuid.uuid4().hex[:12]}.partial")
    reference.parent.mkdir(parents=True, exist_ok=True)
    staged.write_text(commit)
    staged.replace(reference)


def _explained(error: Exception, hub: str, revision: str | None, where: str) -> InputError | InfrastructureError:
    """What an error of the hub's client means. Its HTTP errors have no base that is stable over versions."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if isinstance(error, GatedRepoError):
        return InputError(where, f"access to {hub} must be granted on the hub, and HF_TOKEN set")
    if isinstance(error, RevisionNotFoundError):
        return InputError(where, f"{hub} has no revision {revision} on the hub")
    if isinstance(error, RepositoryNotFoundError):
        return InputError(where, f"the hub has no data set {hub}, or it is private and HF_TOKEN is not set")
    if isinstance(error, HFValidationError):
        return InputError(where, f"{hub} is no Hugging Face id")
    return InfrastructureError(f"the Hugging Face hub did not answer about the data set {hub}: {_brief(error)}")


def _reference(hub: str, revision: str | None) -> Path:
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    name = PurePosixPath(revision or "main")
    return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=hub, repo_type="dataset") / "refs" / name


def _brief(error: Exception) -> str:
    return str(error).split("\n")[0] or type(error).__name__
