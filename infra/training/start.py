"""The start draft as the checkpoint of step 0: a run that begins from it and one that is resumed are then alike."""

from __future__ import annotations

import logging

from infra import storage
from infra.start_draft import start_folder
from infra.training import checkpoint, checkpoint_files
from infra.training.algorithm import algorithm
from infra.training.config import TrainSpec

logger = logging.getLogger("draftsmith.training")


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
