"""The start draft as the checkpoint of step 0: a run that begins from it and one that is resumed are then alike."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from infra import storage
from infra.drafts.start_draft import folder_here, start_folder
from infra.training import checkpoint, checkpoint_files
from infra.training.algorithms import algorithm
from infra.training.config import DraftSpec, TrainConfig, TrainSpec
from infra.verifiers.verifier import VerifierConfig, small_folder

logger = logging.getLogger("draftsmith.training")


def check_start(train: TrainConfig, verifier: VerifierConfig, layer_ids: Sequence[int], vocab_size: int) -> None:
    """Raise InputError where the start draft does not fit, as far as that can be told without fetching anything.

    Args:
        layer_ids: the extracted layer ids; the draft reads all but the last.
        vocab_size: of the verifier.
    """
    if train.init_from is None or (folder := folder_here(train.init_from)) is None:
        return
    if (config_folder := small_folder(verifier)) is None:
        return
    spec = DraftSpec(
        train=train,
        verifier_path=str(config_folder),
        aux_hidden_state_layer_ids=tuple(layer_ids[:-1]),
        trust_remote_code=verifier.trust_remote_code,
    )
    algorithm(train).check_start(spec, folder, vocab_size)


def write_start(spec: TrainSpec) -> None:
    """Put the start draft's weights where training goes on from; nothing is loaded where it has begun already.

    Raises:
        InputError: the start draft is not there, or does not fit; the line names the config's field.
        InfrastructureError: the hub or the store did not answer.
    """
    start = spec.train.init_from
    if start is None or checkpoint_files.newest_whole(spec.draft_uri, spec.inputs_sha256) is not None:
        return
    folder = start_folder(start)
    weights = algorithm(spec.train).start_weights(spec, folder, storage.get(spec.vocab_uri))
    checkpoint.write_start(spec.draft_uri, spec.lease_epoch, spec.inputs_sha256, weights)
    logger.info("Training starts from the weights of %s.", start.draft)
