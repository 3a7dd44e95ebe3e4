"""The six stages of one configuration, with their keys: a pure function of the config and resolved revisions.

Nothing is started or converted here, so `plan`, `status` and every flow can call it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flows.config import PipelineConfig
from infra.drafts.start_draft import START, start_revision
from infra.evaluation.config import GENERATION, PROMOTED, Draft
from infra.evaluation.drafts import draft_revisions, new_draft, other_drafts
from infra.evaluation.prompts import source_revisions
from infra.fingerprint import stage_content
from infra.generation.salvage import salvaging
from infra.interchange.importing import IMPORTED, SECTION, import_revision
from infra.manifest import StageRef
from infra.promotion import pointer as promotion
from infra.prompts.samples import dataset_revisions
from infra.provenance import hardware_name
from infra.schemas import SCHEMA_VERSIONS
from infra.verifiers.verifier import resolve_revision, verifier_name
from infra.vllm_server import vllm_version


def resolve(config: PipelineConfig) -> dict[str, StageRef]:
    """Each stage's place and key, by stage name, in the order of the pipeline.

    Raises:
        InputError: a prompt file, the verifier, the start draft or vLLM's interpreter is not there.
    """
    stages: dict[str, StageRef] = {}

    def add(stage: str, content: dict[str, Any], revisions: Mapping[str, str], upstream: tuple[str, ...]) -> None:
        keys = {name: stages[name].key for name in upstream}
        whole = stage_content(stage, SCHEMA_VERSIONS[stage], content, dict(revisions), keys)
        stages[stage] = StageRef(config.root, stage, whole)

    verifier = {"verifier": resolve_revision(config.verifier)}
    engine = {"vllm": config.vllm.content()}
    revisions = dataset_revisions(config.prompts)
    if config.prompts.counts_tokens:  # under a name that no data set can have
        revisions["verifier/tokenizer"] = verifier["verifier"]
    add("prompts", config.prompts.content(), revisions, ())
    if (imported := config.import_states) is None:
        add("responses", {**config.generate.content(), **engine}, verifier, ("prompts",))
        stages["responses"] = salvaging(stages["responses"], config.generate)
        add("hidden_states", {**config.extract.content(), **engine}, verifier, ("responses",))
    else:
        add("responses", {SECTION: imported.content()}, {**verifier, IMPORTED: import_revision(imported)}, ())
        add("hidden_states", config.extract.content(), verifier, ("responses",))
    start = {} if config.train.init_from is None else {START: start_revision(config.train.init_from)}
    add("vocab", config.vocab.content(), verifier | (start if config.vocab.from_start else {}), ("responses",))
    add("drafts", config.train.content(), verifier | start, ("hidden_states", "vocab"))
    measured_with = {
        **verifier,
        "vllm": vllm_version(config.vllm),
        "hardware": hardware_name(),
        **{f"evaluate/{dataset}": revision for dataset, revision in source_revisions(config.evaluate).items()},
        **draft_revisions(measured_drafts(config, stages["drafts"].key)[1:]),
    }
    served_with: dict[str, Any] = {"vllm": config.vllm.how_served()}
    if imported is not None and GENERATION in config.evaluate.temperature:  # else it is in the responses' key
        served_with["generate"] = config.generate.content()
    add("evaluations", {**config.evaluate.content(), **served_with}, measured_with, ("prompts", "drafts"))
    return stages


def measured_drafts(config: PipelineConfig, new_key: str) -> list[Draft]:
    """The speculators that the evaluation measures, the new one first.

    Raises:
        InputError: one that `evaluate.drafts` names is not there.
    """
    new = new_draft(config.root, new_key)
    return [new, *other_drafts(config.evaluate, config.root, new_key, promoted_rival(config, new_key))]


def promoted_rival(config: PipelineConfig, new_key: str) -> str | None:
    """Key of the promoted speculator to measure beside the new one, where that is asked for and there is one."""
    if PROMOTED not in config.evaluate.drafts:
        return None
    return promotion.rival(config.root, verifier_name(config.verifier), new_key)
