"""Models on the Hugging Face hub, verifiers and drafts: the commit behind a name, and a snapshot of it on disk."""

from __future__ import annotations

import re
import uuid
from pathlib import Path

from infra.errors import InfrastructureError, InputError
from infra.folders import weights_problem
from infra.locations import not_there

_COMMIT = re.compile(r"[0-9a-f]{40}")
_TIMEOUT_SECONDS = 30
# Safetensors only: other weight files are pickles, or a second copy in another format.
_WANTED = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py"]
_UNWANTED = ["original/*", "consolidated*", "onnx/*"]
_NO_HUB = "HF_HUB_OFFLINE forbids asking the hub"


def resolve_commit(model: str, revision: str | None, field: str, revision_field: str) -> str:
    """Commit of a hub model's branch, tag or commit. Asks the hub, or its cache with HF_HUB_OFFLINE=1.

    A full commit is taken as it is, without asking.

    Args:
        field, revision_field: config fields that gave `model` and `revision`, to name in errors.

    Raises:
        InputError: there is no such model or revision, or access is refused, or it is not cached while offline.
        InfrastructureError: the hub did not answer.
    """
    if revision and _COMMIT.fullmatch(revision):
        return revision
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        commit = HfApi().model_info(model, revision=revision, timeout=_TIMEOUT_SECONDS).sha
    except OfflineModeIsEnabled:
        return _cached_commit(model, revision, field)
    except HFValidationError as error:
        raise InputError(field, f"{model} is no folder here and no Hugging Face id") from error
    except RepositoryNotFoundError as error:
        raise InputError(
            field, f"the hub has no model {model}, or it is private and HF_TOKEN is not set"
        ) from error
    except RevisionNotFoundError as error:
        raise InputError(revision_field, f"{model} has no revision {revision} on the hub") from error
    except Exception as error:  # The errors of the hub's HTTP client have no base that is stable over versions.
        raise InfrastructureError(
            f"{field}: {not_there(model)}; and the Hugging Face hub did not answer about it: {_brief(error)}"
        ) from error
    if not commit:
        raise InfrastructureError(f"the Hugging Face hub named no commit for {model}")
    return commit


def fetch_config(model: str, commit: str, field: str) -> Path:
    """Folder that holds at least the model's config.json at this commit; a few KB, from the cache where possible.

    Raises:
        InputError: there is none, access is refused, or it is not cached while offline.
        InfrastructureError: the hub did not answer.
    """
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError

    offline = constants.HF_HUB_OFFLINE
    try:
        return Path(hf_hub_download(model, "config.json", revision=commit, local_files_only=offline)).parent
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise InputError(field, f"the hub gives no {model} at commit {commit[:12]}: {_brief(error)}") from error
    except EntryNotFoundError as error:
        raise InputError(field, f"{model} at {commit[:12]} has no config.json{_told(offline)}") from error
    except Exception as error:  # as in resolve_commit
        raise InfrastructureError(f"the Hugging Face hub did not answer about {model}: {_brief(error)}") from error


def fetch_snapshot(model: str, commit: str, revision: str | None, field: str) -> Path:
    """Folder with the model at this commit, downloaded as far as it is not in the hub's cache.

    A cached snapshot that is whole serves also when the hub may not be asked (HF_HUB_OFFLINE=1) or does not answer
    (its library sees to that): a commit cannot change.

    Args:
        model: hub id.
        commit: what `resolve_commit` gave.
        revision: the branch or tag it was resolved from, None for the default branch.
        field: config field to name in errors.

    Raises:
        InputError: access is refused, the commit is unknown, there are no safetensors weights, or the model is not
            cached while offline.
        InfrastructureError: the download failed; calling again continues it.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    offline = constants.HF_HUB_OFFLINE
    try:
        # Offline the filters do nothing; online they spare pickled and doubled weights.
        found = snapshot_download(
            model,
            revision=commit,
            allow_patterns=_WANTED,
            ignore_patterns=_UNWANTED,
            local_files_only=offline,
        )
    except GatedRepoError as error:
        raise InputError(field, f"access to {model} must be granted on the hub, and HF_TOKEN set") from error
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise InputError(field, f"the hub has no {model} at commit {commit[:12]}") from error
    except Exception as error:  # as in resolve_commit
        if offline:
            raise InputError(field, f"{model} at {commit[:12]} is not in the hub's cache; {_NO_HUB}") from error
        raise InfrastructureError(
            f"{model} could not be fetched from the Hugging Face hub: {_brief(error)}"
        ) from error
    folder = Path(str(found))
    if problem := weights_problem(folder):
        raise InputError(field, f"{model} at {commit[:12]} cannot be used: {problem}{_told(offline)}")
    if not offline and revision != commit:
        _remember_commit(folder, revision, commit)
    return folder


def _remember_commit(folder: Path, revision: str | None, commit: str) -> None:
    """Note in the hub's cache what the branch or tag stood for, as its library does for a download by name.

    Without it the snapshot, which was downloaded by commit, could not be found offline by its branch.
    """
    reference = folder.parent.parent / "refs" / (revision or "main")
    staged = reference.with_name(f".{reference.name}.{uuid.uuid4().hex[:12]}.partial")
    reference.parent.mkdir(parents=True, exist_ok=True)
    staged.write_text(commit)
    staged.replace(reference)


def _brief(error: Exception) -> str:
    return str(error).split("\n")[0] or type(error).__name__


def _told(offline: bool) -> str:
    return f"; {_NO_HUB}" if offline else ""


def _cached_commit(model: str, revision: str | None, field: str) -> str:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model, "config.json", revision=revision or "main")
    if not isinstance(found, str):
        raise InputError(field, f"{model} is no folder here and not in the hub's cache; {_NO_HUB}")
    return Path(found).parent.name  # .../snapshots/<commit>/config.json
