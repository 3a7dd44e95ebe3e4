"""The command line that serves a speculator with its verifier, as the run that made it has served them."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from infra import storage
from infra.errors import DamagedShard, InputError, StageFailed
from infra.evaluation.drafts import CONFIG_FILE, fetch_draft, new_draft
from infra.locations import cache_folder
from infra.promotion.pointer import Promotion, read_pointer, verifiers
from infra.schemas import EXPORT_FOLDER
from infra.shards import load_object
from infra.verifiers.verifier import VerifierConfig, tokenizer_origin, verifier_name
from infra.vllm_config import VllmConfig, server_flags

_EXPORT = re.compile(r"(?:(?P<root>.+)/)?drafts/(?P<key>[0-9a-f]{16})(?:/" + EXPORT_FOLDER + r")?")
# As the pipeline's own servers are started: the `vllm` command fails where the CPU build is installed (vLLM 0.32).
SERVER = ("python", "-m", "vllm.entrypoints.openai.api_server")
# vLLM by itself listens on every interface and asks for no key. Of two flags it takes the later one.
CLOSED = ("--host", "127.0.0.1")


@dataclass(frozen=True)
class ServeCommand:
    """A command and the variables to set for it; as a string, one line for a shell."""

    draft: str
    environment: Mapping[str, str]
    arguments: tuple[str, ...]

    def __str__(self) -> str:
        variables = [f"{name}={shlex.quote(value)}" for name, value in sorted(self.environment.items())]
        return " ".join([*variables, shlex.join(self.arguments)])


def serve_command(uri: str, verifier: str | None = None) -> ServeCommand:
    """How a root's promoted speculator is served, or any export of a root.

    The flags of vLLM are those of the run that promoted it, or else of the newest that it belongs to: as it was
    measured, but with prefix caching on and without the other flags that only measuring needs. Those that change
    what is written (parsers, chat template) are the generation's that it was trained on: its key fixes them.

    Effects: may convert or copy into the cache folder what vLLM can read from a local folder only.

    Args:
        uri: an artifact root, or `<root>/drafts/<key>/export`.
        verifier: which of several verifiers with a promoted speculator.

    Raises:
        InputError: there is no promoted speculator, no such export, or no run that says how it was served.
        StageFailed: the export or the pointer is damaged.
    """
    found = _EXPORT.fullmatch(uri.rstrip("/"))
    promoted = None if found else _promoted(uri, verifier)
    root, draft = (found["root"] or ".", found["key"]) if found else (uri, promoted.draft if promoted else "")
    run = _run_of(root, draft, promoted.run_id if promoted else None)
    try:
        vllm = VllmConfig.model_validate(run["config"]["vllm"])
        model = VerifierConfig.model_validate(run["config"]["verifier"])
    except (ValidationError, KeyError, TypeError) as error:
        raise InputError(
            f"runs/{run.get('run_id')}.json", f"its config is not one of this version: {error}"
        ) from error
    folder, exported = _local_export(root, draft)
    tokens = promoted.num_speculative_tokens if promoted else _trained_for(exported)
    revision = exported["speculators_config"]["verifier"]["revision"]
    place, commit = tokenizer_origin(model.model_copy(update={"revision": revision}))
    pinned = () if commit is None else ("--revision", commit)
    flags = server_flags(vllm, model_path=place, trust_remote_code=model.trust_remote_code)
    speculation = {"method": "eagle3", "model": str(folder), "num_speculative_tokens": tokens}
    named = ("--served-model-name", verifier_name(model), "--speculative-config", json.dumps(speculation))
    return ServeCommand(draft, vllm.environment, (*SERVER, *flags, *pinned, *named, *CLOSED))


def _promoted(root: str, verifier: str | None) -> Promotion:
    names = verifiers(root)
    if verifier is None and len(names) > 1:
        raise InputError("--verifier", f"must be given, as {root} serves several: {', '.join(names)}")
    chosen = verifier or next(iter(names), None)
    promoted = read_pointer(root, chosen).promoted if chosen else None
    if promoted is None:
        whose = f" of {verifier}" if verifier else ""
        raise InputError(
            root, f"has no promoted speculator{whose}; name another one's export: ROOT/drafts/KEY/export"
        )
    return promoted


def _run_of(root: str, draft: str, run_id: str | None) -> dict[str, Any]:
    """The run that promoted the draft, else the newest that made or used it."""
    names = [name for name in storage.list_sizes(storage.join(root, "runs")) if name.endswith(".json")]
    chosen = [name for name in names if name == f"{run_id}.json"] or names
    bodies = storage.get_many(storage.join(root, "runs", name) for name in chosen).values()
    runs = [run for run in map(load_object, bodies) if run and run.get("keys", {}).get("drafts") == draft]
    if not runs:
        raise InputError(root, f"no run in {storage.join(root, 'runs')} says how drafts/{draft} was served")
    return max(runs, key=lambda run: str(run.get("started_at")))


def _local_export(root: str, draft: str) -> tuple[Path, dict[str, Any]]:
    """The export as a folder on this machine, every file checked, and its config."""
    found = new_draft(root, draft)
    remote = root.startswith("s3://")
    folder = cache_folder() / "speculators" / draft if remote else Path(found.uri.removeprefix("file://")).resolve()
    try:
        fetch_draft(found, folder)
    except InputError as error:
        raise InputError(root, error.problem) from error
    except DamagedShard as damage:
        raise StageFailed(f"{damage}; the same run again makes it anew") from damage
    return folder, json.loads((folder / CONFIG_FILE).read_bytes())


def _trained_for(exported: Mapping[str, Any]) -> int:
    return int(exported["speculators_config"]["proposal_methods"][0]["speculative_tokens"])
