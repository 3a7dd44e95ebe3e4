"""Whether what is to be imported fits, told before anything is started.

The command line asks this before a Prefect server is up, so nothing here may import Prefect: it would settle on a
temporary server of its own, which outlives a killed run.
"""

from __future__ import annotations

from collections.abc import Mapping

from flows.config import PipelineConfig
from infra import manifest
from infra.extraction.config import resolve_layer_ids
from infra.interchange.checks import Wanted, check_import
from infra.interchange.importing import IMPORTED
from infra.manifest import StageRef
from infra.verifiers.verifier import resolve_revision, resolve_shape, verifier_name


def refuse_unfit_import(config: PipelineConfig, stages: Mapping[str, StageRef]) -> None:
    """Raise InputError where a folder that is still to be imported does not fit the verifier."""
    made = (manifest.read_manifest(stages[name].uri) for name in ("responses", "hidden_states"))
    if config.import_states is None or all(each is not None for each in made):
        return
    shape = resolve_shape(config.verifier)
    wanted = Wanted(
        verifier=verifier_name(config.verifier),
        verifier_revision=resolve_revision(config.verifier),
        hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        layer_ids=tuple(resolve_layer_ids(config.extract, shape)),
        max_failed_share=config.extract.max_failed_share,
    )
    check_import(config.import_states, wanted, stages["responses"].content["revisions"][IMPORTED])
