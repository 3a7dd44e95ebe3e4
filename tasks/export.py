"""Export a trained draft as a speculator that vLLM serves: written and checked first, committed afterwards."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra import manifest, storage
from infra.drafts.export import EXPORT_FILES, ExportContract, export_draft
from infra.drafts.vocab import VocabMap
from infra.errors import InfrastructureError
from infra.manifest import Shard, ShardRecord, StageRef
from infra.schemas import EXPORT_FOLDER
from infra.training import checkpoint
from infra.training.best import why_exported
from infra.training.checkpoint import Checkpoint
from infra.training.config import TrainConfig
from infra.verifiers.verifier import Verifier
from tasks.policy import in_thread, retried_task

logger = logging.getLogger("draftsmith.export")

METRICS_FILE = "metrics.jsonl"
EXPORTED_FILES = (*(f"{EXPORT_FOLDER}/{name}" for name in EXPORT_FILES), METRICS_FILE)


@dataclass(frozen=True)
class Exported:
    """`EXPORTED_FILES` in a local folder, and what they are.

    Args:
        step: whose weights they hold.
        why: that one, in words.
        num_steps: after how many training ended; the metrics are of all of them.
        predicted_acceptance_length: of that step on the validation samples; None where it was not measured.
    """

    folder: Path
    step: int
    why: str
    num_steps: int
    predicted_acceptance_length: float | None

    @property
    def speculator(self) -> Path:
        return self.folder / EXPORT_FOLDER

    def said(self) -> dict[str, Any]:
        """What each file's record says of it."""
        return {"num_steps": self.num_steps, "exported_step": self.step, "exported_because": self.why}


@retried_task(name="export-speculator", run_name="export {stage.key}", timeout_seconds=3600)
@in_thread
def export_speculator(
    stage: StageRef,
    inputs: Mapping[str, ShardRecord],
    config: TrainConfig,
    verifier: Verifier,
    layer_ids: tuple[int, ...],
    vocab_file: str,
    trust_remote_code: bool,
    folder: Path,
) -> Exported:
    """Write the last or the best checkpoint as a speculator and check it against what it was trained from.

    Args:
        layer_ids: the extracted layer ids; the speculator must name all but the last.
        vocab_file: name of the vocabulary map in its stage's folder.
        folder: local; gets `EXPORTED_FILES`.

    Raises:
        StageFailed: the export breaks its contract.
        InfrastructureError: there is no whole checkpoint; training resumes with the next run.
    """
    trained = checkpoint.read_newest(stage.uri, manifest.inputs_sha256(inputs))
    if trained is None:
        raise InfrastructureError(f"{stage.uri} has no whole checkpoint to export; run the same command again")
    chosen = _chosen(stage, trained, config)
    contract = ExportContract(
        extracted_layer_ids=layer_ids,
        vocab=VocabMap.from_bytes(storage.get(storage.join(stage.upstream_uri("vocab"), vocab_file))),
        verifier_name=verifier.name,
        verifier_revision=verifier.revision,
        hidden_size=verifier.hidden_size,
        num_layers=config.num_layers,
        ttt_steps=config.ttt_steps,
        norm_before_residual=config.norm_before_residual,
        fc_norm=config.fc_norm,
        norm_output=config.norm_output,
    )
    step, why = chosen.ref.step, why_exported(trained.state, config)
    exported = Exported(folder, step, why, trained.ref.step, _predicted(trained.metrics, step))
    export_draft(
        chosen.weights,
        config,
        contract,
        str(verifier.path),
        exported.speculator,
        trust_remote_code=trust_remote_code,
    )
    (folder / METRICS_FILE).write_text(trained.metrics, encoding="utf-8")
    logger.info("The speculator is of step %d of %d: %s.", step, trained.ref.step, why)
    return exported


@retried_task(name="commit-speculator", run_name="commit {stage.key}", timeout_seconds=3600)
@in_thread
def commit_speculator(
    stage: StageRef, plan: Sequence[Shard], inputs: Mapping[str, ShardRecord], exported: Exported
) -> None:
    """Commit the exported files."""
    for shard in plan:
        manifest.commit_shard(
            stage,
            shard,
            exported.folder / shard.extra["file"],
            rows=0,
            status_counts={},
            inputs=inputs,
            extra=exported.said(),
        )
    logger.info("Exported step %d of %s to %s/%s.", exported.step, stage.key, stage.uri, EXPORT_FOLDER)


def _chosen(stage: StageRef, trained: Checkpoint, config: TrainConfig) -> Checkpoint:
    if config.export_checkpoint == "last":
        return trained
    try:
        return checkpoint.read_best(stage.uri, trained)
    except (FileNotFoundError, ValueError) as error:
        raise InfrastructureError(
            f"the best checkpoint of {stage.uri} is not whole ({error}); run the same command again, which trains "
            "from the newest one that is"
        ) from error


def _predicted(metrics: str, step: int) -> float | None:
    """Predicted acceptance length of a step, where it was validated."""
    for text in metrics.splitlines():
        line = json.loads(text)
        if line["kind"] == "validation" and line["step"] == step:
            return float(line["acceptance_length"])
    return None
