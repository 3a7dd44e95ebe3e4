"""Export a trained draft as a speculator that vLLM serves."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from infra import manifest, storage
from infra.errors import InfrastructureError
from infra.export import EXPORT_FILES, ExportContract, export_draft
from infra.manifest import Shard, ShardRecord, StageRef
from infra.training import checkpoint
from infra.training.config import TrainConfig
from infra.verifier import Verifier
from infra.vocab import VocabMap
from tasks.policy import in_thread, retried_task

logger = logging.getLogger("draftsmith.export")

EXPORT_FOLDER = "export"
METRICS_FILE = "metrics.jsonl"
EXPORTED_FILES = (*(f"{EXPORT_FOLDER}/{name}" for name in EXPORT_FILES), METRICS_FILE)


@retried_task(name="export-speculator", run_name="export {stage.key}", timeout_seconds=3600)
@in_thread
def export_speculator(
    stage: StageRef,
    plan: Sequence[Shard],
    inputs: Mapping[str, ShardRecord],
    config: TrainConfig,
    verifier: Verifier,
    layer_ids: tuple[int, ...],
    vocab_file: str,
    trust_remote_code: bool,
) -> None:
    """Write the last checkpoint as a speculator, check it against what it was trained from, and commit its files.

    Args:
        layer_ids: the extracted layer ids; the speculator must name all but the last.
        vocab_file: name of the vocabulary map in its stage's folder.

    Raises:
        StageFailed: the export breaks its contract.
        InfrastructureError: there is no whole checkpoint; training resumes with the next run.
    """
    trained = checkpoint.read_newest(stage.uri, manifest.inputs_sha256(inputs))
    if trained is None:
        raise InfrastructureError(f"{stage.uri} has no whole checkpoint to export; run the same command again")
    contract = ExportContract(
        extracted_layer_ids=layer_ids,
        vocab=VocabMap.from_bytes(storage.get(storage.join(stage.upstream_uri("vocab"), vocab_file))),
        verifier_name=verifier.name,
        verifier_revision=verifier.revision,
        hidden_size=verifier.hidden_size,
        num_layers=config.num_layers,
        ttt_steps=config.ttt_steps,
    )
    with tempfile.TemporaryDirectory(prefix="draftsmith-export-") as folder:
        paths = export_draft(
            trained.weights, config, contract, str(verifier.path), Path(folder), trust_remote_code=trust_remote_code
        )
        files: dict[str, Path | bytes] = {f"{EXPORT_FOLDER}/{path.name}": path for path in paths}
        files[METRICS_FILE] = trained.metrics.encode()
        for shard in plan:
            manifest.commit_shard(
                stage,
                shard,
                files[shard.extra["file"]],
                rows=0,
                status_counts={},
                inputs=inputs,
                extra={"num_steps": trained.ref.step},
            )
    logger.info("Exported step %d of %s to %s/%s.", trained.ref.step, stage.key, stage.uri, EXPORT_FOLDER)
