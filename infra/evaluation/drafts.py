"""The speculators that are measured: the new one, the promoted one, and any other that the config names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from infra import manifest, storage
from infra.errors import InputError
from infra.evaluation.config import EAGLE3, PROMOTED, Draft, EvaluateConfig, Note
from infra.fingerprint import content_sha256
from infra.folders import file_sha256
from infra.schemas import EXPORT_FOLDER

CONFIG_FILE = "config.json"
_KEY = re.compile(r"[0-9a-f]{16}")
_KEY_DIGITS = 16
_SHOWN_DIGITS = 8
FIELD = "evaluate.drafts"


def new_draft(root: str, key: str) -> Draft:
    """The draft of this very run."""
    return _of_stage(root, key, EAGLE3)


def other_drafts(config: EvaluateConfig, root: str, new_key: str, rival: str | None) -> list[Draft]:
    """What `evaluate.drafts` names, each once and without the new draft itself.

    Args:
        rival: key of the drafts stage whose export is promoted; None where none is, which `rival_notes` tells.

    Raises:
        InputError: one is not there or holds no speculator, or two would have the same label.
        StorageError: the object store did not answer.
    """
    found: dict[str, Draft] = {}
    for reference in config.drafts:
        draft = _draft(reference, root, rival)
        if draft is not None and draft.key != new_key:
            found.setdefault(draft.key, draft)
    labels = [draft.label for draft in found.values()]
    if twice := [label for label in labels if labels.count(label) > 1]:
        raise InputError(FIELD, f"two drafts would be called {twice[0]!r}; copy one to a folder of another name")
    return list(found.values())


def rival_notes(config: EvaluateConfig, rival: str | None) -> list[Note]:
    """What is to be said where a promoted speculator is asked for and there is none."""
    if PROMOTED not in config.drafts or rival is not None:
        return []
    return [
        Note("no_promoted", "No other speculator of this verifier is promoted, so none was measured beside it.")
    ]


def _draft(reference: str, root: str, rival: str | None) -> Draft | None:
    if reference == PROMOTED:
        return None if rival is None else _of_stage(root, rival, f"{EAGLE3} {PROMOTED}")
    if _KEY.fullmatch(reference):
        return _of_stage(root, reference, f"{EAGLE3} {reference[:_SHOWN_DIGITS]}")
    hashes = {name: storage.sha256(storage.join(reference, name)) for name in _files(reference)}
    if CONFIG_FILE not in hashes:
        raise InputError(
            FIELD,
            f"{reference} is neither `{PROMOTED}`, nor a key of a drafts stage, nor a folder with {CONFIG_FILE}",
        )
    key = content_sha256(hashes)[:_KEY_DIGITS]
    parts = [part for part in reference.split("/") if part not in ("", EXPORT_FOLDER)]
    name = parts[-1][:_SHOWN_DIGITS] if _KEY.fullmatch(parts[-1]) else parts[-1]
    return Draft(f"{EAGLE3} {name}", key, reference, f"draft:{key}")


def _of_stage(root: str, key: str, label: str) -> Draft:
    portable = f"drafts/{key}/{EXPORT_FOLDER}"
    return Draft(label, key, storage.join(root, portable), portable)


def _files(folder_uri: str) -> list[str]:
    """Names of the speculator's own files, without what lies in folders below."""
    return sorted(name for name in storage.list_sizes(folder_uri) if "/" not in name and not name.startswith("."))


def fetch_draft(draft: Draft, folder: Path) -> None:
    """Copy a speculator that lies in a folder or of which a drafts stage has records; whole files are left alone.

    Raises:
        InputError: it is not there, or not what the evaluation's key was made of.
        DamagedShard: a file of a drafts stage is absent or is not what was committed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if draft.portable.startswith("drafts/"):
        _fetch_of_stage(draft, folder)
    else:
        _fetch_folder(draft, folder)


def _fetch_folder(draft: Draft, folder: Path) -> None:
    hashes = {}
    for name in _files(draft.uri):
        storage.get_file(storage.join(draft.uri, name), folder / name)
        hashes[name] = file_sha256(folder / name)
    if content_sha256(hashes)[:_KEY_DIGITS] != draft.key:
        raise InputError(FIELD, f"{draft.uri} was changed since the run began; run again")


def _fetch_of_stage(draft: Draft, folder: Path) -> None:
    stage_uri = draft.uri.removesuffix(f"/{EXPORT_FOLDER}")
    records = [
        record
        for record in manifest.read_records(stage_uri).values()
        if record.data.startswith(f"{EXPORT_FOLDER}/")
    ]
    if not any(record.data == f"{EXPORT_FOLDER}/{CONFIG_FILE}" for record in records):
        raise InputError(FIELD, f"{draft.uri} holds no speculator")
    for record in records:
        path = folder / record.data.removeprefix(f"{EXPORT_FOLDER}/")
        if not path.exists() or file_sha256(path) != record.sha256:
            manifest.fetch_shard(stage_uri, record, path)


def draft_revisions(drafts: Sequence[Draft]) -> dict[str, str]:
    """What of drafts enters the evaluation's key."""
    return {f"draft/{draft.label}": draft.key for draft in drafts}
