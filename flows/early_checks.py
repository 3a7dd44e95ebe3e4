"""What of a config cannot work, told before anything is started: by `run` and `plan`, and by a flow as it begins.

Each rule stands where its stage applies it, and is only called here. The command line asks before a Prefect server
is up, so nothing here may import Prefect: it would settle on a temporary server of its own, which outlives a killed
run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from flows.config import PipelineConfig
from flows.import_checks import refuse_unfit_import
from infra import manifest
from infra.drafts.start_draft import folder_here, token_ids
from infra.drafts.vocab import check_size
from infra.evaluation.prompts import check_heldout
from infra.extraction.config import resolve_layer_ids
from infra.extraction.process import check_vllm
from infra.manifest import StageRef
from infra.prompts.samples import check_split
from infra.schemas import STAGES
from infra.tracking.trackers import check_trackers
from infra.training.launch import check_ranks
from infra.verifiers.checks import check_chat_template, check_length, check_tokenizer
from infra.verifiers.verifier import VerifierShape, resolve_shape


def refuse_unfit(config: PipelineConfig, stages: Mapping[str, StageRef], until: str = STAGES[-1]) -> None:
    """Raise InputError for what would be refused in hours, when its stage's turn comes.

    Args:
        until: the last stage to be made. Neither those after it nor those that are there are asked about.
    """
    check_trackers(config.train)
    refuse_unfit_import(config, stages)
    shape: VerifierShape | None = None
    for name in STAGES[: STAGES.index(until) + 1]:
        if name in _CHECKS and manifest.read_manifest(stages[name].uri) is None:
            shape = shape or resolve_shape(config.verifier)
            _CHECKS[name](config, shape)


def _check_prompts(config: PipelineConfig, _shape: VerifierShape) -> None:
    check_split(config.prompts)


def _check_generation(config: PipelineConfig, shape: VerifierShape) -> None:
    if config.import_states is not None or config.generate.servers.external:
        return
    check_tokenizer(config.verifier, config.vllm)
    check_chat_template(config.verifier, config.vllm)
    check_length(config.verifier, config.vllm, shape)


def _check_extraction(config: PipelineConfig, shape: VerifierShape) -> None:
    resolve_layer_ids(config.extract, shape)
    if config.import_states is None:
        check_vllm(config.vllm)
        check_tokenizer(config.verifier, config.vllm)
        check_length(config.verifier, config.vllm, shape)


def _check_vocabulary(config: PipelineConfig, shape: VerifierShape) -> None:
    start = config.train.init_from if config.vocab.from_start else None
    folder = None if start is None else folder_here(start)
    num_kept = None if folder is None else len(token_ids(folder, shape.vocab_size))
    check_size(config.vocab, shape.vocab_size, num_kept)


def _check_training(config: PipelineConfig, shape: VerifierShape) -> None:
    check_ranks(config.train)
    if config.train.init_from is None:
        return
    from infra.training.start import check_start  # torch.distributed comes with it: a second

    check_start(config.train, config.verifier, resolve_layer_ids(config.extract, shape), shape.vocab_size)


def _check_evaluation(config: PipelineConfig, shape: VerifierShape) -> None:
    check_heldout(config.evaluate, config.prompts)
    check_tokenizer(config.verifier, config.vllm)
    check_chat_template(config.verifier, config.vllm)
    check_length(config.verifier, config.vllm, shape)


_CHECKS: Mapping[str, Callable[[PipelineConfig, VerifierShape], None]] = {
    "prompts": _check_prompts,
    "responses": _check_generation,
    "hidden_states": _check_extraction,
    "vocab": _check_vocabulary,
    "drafts": _check_training,
    "evaluations": _check_evaluation,
}
