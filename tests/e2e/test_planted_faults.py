"""Faults planted in the real states of the real verifier's own answers: each is refused by its name."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from infra.extraction.config import states_meta
from infra.extraction.engine import BuiltShard, ExtractConfig, ExtractResult, build_shard
from infra.hidden_states import HiddenStatesMeta, decode
from infra.manifest import read_records
from infra.schemas import RESPONSES, STATUS_FAILED
from infra.state_checks.checks import ChecksConfig, StateChecks, open_head, states_problem
from infra.verifiers.verifier import Verifier, VerifierConfig, materialize
from tests.e2e.conftest import Finished
from tests.reference_states import conversations, reference_states

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]  # the first one may have to wait for the whole run

LEAST_WRITTEN_TOKENS = 24  # of a completion that is changed: a few tokens prove nothing
NUM_CHANGED = 8


@dataclass(frozen=True)
class Sample:
    """A response's row and its states [tokens, layers, hidden]."""

    response: dict[str, Any]
    states: Tensor

    @property
    def num_prompt_tokens(self) -> int:
        return int(self.response["num_prompt_tokens"])


@pytest.fixture(scope="module")
def verifier() -> Verifier:
    return materialize(VerifierConfig())


@pytest.fixture(scope="module")
def meta(verifier: Verifier) -> HiddenStatesMeta:
    return states_meta(ExtractConfig(), verifier)


@pytest.fixture(scope="module")
def samples(finished: Finished, meta: HiddenStatesMeta) -> list[Sample]:
    """All that the undisturbed run has extracted."""
    responses = {row["sample_id"]: row for path in shards(finished, "responses") for row in rows_of(path)}
    found = [sample for path in shards(finished, "hidden_states") for sample in decode(path.read_bytes())]
    layers = len(meta.layer_ids)
    return [
        Sample(
            responses[sample.sample_id],
            torch.cat([sample.aux_hidden_states, sample.verifier_last_hidden_states], dim=1).unflatten(
                1, (layers, meta.hidden_size)
            ),
        )
        for sample in found
    ]


@pytest.fixture(scope="module")
def checks(samples: list[Sample], meta: HiddenStatesMeta, verifier: Verifier) -> StateChecks:
    """Checks that have seen the sound samples, and refused none of them."""
    config = ChecksConfig()
    found = StateChecks(config, meta, open_head(config, verifier))
    assert STATUS_FAILED not in built(samples, found, meta).status_counts
    assert found.norms.known()
    return found


def shards(finished: Finished, stage: str) -> list[Path]:
    folder = finished.folder(stage)
    return [folder / "shards" / record.data for record in read_records(str(folder)).values()]


def rows_of(path: Path) -> list[dict[str, Any]]:
    return pq.read_table(path).to_pylist()


def built(samples: list[Sample], checks: StateChecks, meta: HiddenStatesMeta) -> BuiltShard:
    """The shard of these samples, their states checked as the engine checks them."""
    problems = [states_problem(each.states, each.response["input_ids"], meta.layer_ids) for each in samples]
    results = [
        ExtractResult(each.response["sample_id"], problem, None if problem else each.states)
        for each, problem in zip(samples, problems, strict=True)
    ]
    table = pa.Table.from_pylist([each.response for each in samples], schema=RESPONSES)
    return build_shard(table, results, meta, checks)


def refusals(shard: BuiltShard) -> list[str]:
    """The name of the check that refused each row; "" where none did."""
    return [
        (row["error"] or "").partition(":")[0] for row in pq.read_table(pa.BufferReader(shard.data)).to_pylist()
    ]


def with_states(change: Callable[[Tensor], Tensor]) -> Callable[[Sample], Sample]:
    return lambda sample: dataclasses.replace(sample, states=change(sample.states.clone()))


def one_nan(states: Tensor) -> Tensor:
    states[len(states) // 2, 1, 3] = float("nan")
    return states


def shuffled(sample: Sample) -> Sample:
    ids, start = sample.response["input_ids"], sample.num_prompt_tokens
    completion = random.Random(0).sample(ids[start:], len(ids) - start)
    return Sample({**sample.response, "input_ids": ids[:start] + completion}, sample.states)


FAULTS: dict[str, tuple[str, Callable[[Sample], Sample]]] = {
    "shifted by one token": ("off-policy", with_states(lambda states: states.roll(1, 0))),
    "shifted by one token back": ("off-policy", with_states(lambda states: states.roll(-1, 0))),
    "two layers swapped": ("norms", with_states(lambda states: states[:, [1, 0, 2, 3]])),
    "all zeros": ("all zero", with_states(torch.zeros_like)),
    "one NaN": ("not finite", with_states(one_nan)),
    "shortened by a prefix cache": ("length", with_states(lambda states: states[16:])),
    "completion shuffled": ("off-policy", shuffled),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_refused_by_its_name(
    fault: str, samples: list[Sample], checks: StateChecks, meta: HiddenStatesMeta
) -> None:
    name, plant = FAULTS[fault]
    long = [each for each in samples if each.response["num_completion_tokens"] >= LEAST_WRITTEN_TOKENS]
    changed = [plant(sample) for sample in long[:NUM_CHANGED]]
    assert len(changed) == NUM_CHANGED
    assert refusals(built(changed, checks, meta)) == [name] * NUM_CHANGED


def test_text_of_another_author_is_refused(
    samples: list[Sample], checks: StateChecks, meta: HiddenStatesMeta, verifier: Verifier
) -> None:
    model = AutoModelForCausalLM.from_pretrained(verifier.path, dtype=torch.float32)
    written = conversations(verifier, [120] * NUM_CHANGED)
    foreign = []
    for like, text in zip(samples, written, strict=False):
        ids = list(text.input_ids)
        mask = [position >= len(ids) // 2 for position in range(len(ids))]
        row = {**like.response, "sample_id": text.sample_id, "input_ids": ids, "loss_mask": mask}
        foreign.append(Sample(row, reference_states(model, ids, meta.layer_ids).bfloat16()))
    assert refusals(built(foreign, checks, meta)) == ["off-policy"] * NUM_CHANGED
