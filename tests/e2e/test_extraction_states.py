"""The real engine: its states are those of a Hugging Face forward pass, and bad samples do not stop it."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from infra.extraction.engine import ExtractConfig, ExtractionEngine, ExtractSample, StreamTimes
from infra.processes import living, process_token
from infra.verifiers.verifier import Verifier, VerifierConfig, materialize
from infra.vllm_config import VllmConfig
from tests.reference_states import assert_states_agree, conversations

pytestmark = pytest.mark.e2e

MAX_MODEL_LEN = 1024
LENGTHS = range(30, 630, 30)  # 20 samples


@pytest.fixture(scope="module")
def verifier() -> Verifier:
    return materialize(VerifierConfig())


@pytest.fixture(scope="module")
def engine(verifier: Verifier, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExtractionEngine]:
    vllm = VllmConfig(
        environment={"VLLM_CPU_KVCACHE_SPACE": "1"},
        max_model_len=MAX_MODEL_LEN,
        enforce_eager=True,
        # Fewer than the longest sample has, so that its states come out of several steps.
        extra_args=["--max-num-batched-tokens=256"],
        startup_timeout_seconds=400,
    )
    token = process_token("test", uuid.uuid4().hex)
    log_path = tmp_path_factory.mktemp("logs") / "engine.log"
    with ExtractionEngine(ExtractConfig(), vllm, verifier, log_path=log_path, token=token) as running:
        yield running
    assert living(token) == []
    assert not running.staging.folder.exists()


@pytest.fixture(scope="module")
def samples(verifier: Verifier) -> list[ExtractSample]:
    return conversations(verifier, LENGTHS)


@pytest.fixture(scope="module")
def model(verifier: Verifier) -> Any:
    return AutoModelForCausalLM.from_pretrained(verifier.path, dtype=torch.float32)


def test_states_agree_with_hugging_face(engine: ExtractionEngine, model: Any, samples: list[ExtractSample]) -> None:
    results = engine.extract("00000", samples)
    assert_states_agree(model, samples, results, engine.meta.layer_ids)


def test_bad_samples_are_their_own_errors_and_the_engine_goes_on(
    engine: ExtractionEngine, samples: list[ExtractSample]
) -> None:
    longest = ExtractSample("longest", [5 + n % 90 for n in range(MAX_MODEL_LEN - 1)])
    asked = [
        ExtractSample("too long", [5] * MAX_MODEL_LEN),
        samples[0],
        ExtractSample("empty", []),
        ExtractSample("outside the vocabulary", [5, 10**7]),
        longest,
    ]
    started = time.monotonic()
    results = engine.extract("00001", asked)
    assert time.monotonic() - started < 300, "none waited for the time limit of a request, an hour"
    assert [result.error is None for result in results] == [False, True, False, False, True]
    assert results[0].error == f"vllm: {MAX_MODEL_LEN} tokens; extraction takes 1 to {MAX_MODEL_LEN - 1}"
    assert "out of vocabulary" in str(results[3].error)
    # The same sample in another company: no prefix was taken from a cache.
    (again,) = engine.extract("00002", [samples[0]])
    assert again.hidden_states is not None
    assert results[1].hidden_states is not None
    assert again.hidden_states.shape == results[1].hidden_states.shape


def test_requests_that_are_in_the_engine_together_keep_apart(
    engine: ExtractionEngine, model: Any, samples: list[ExtractSample]
) -> None:
    shards = {"00003": samples[:7], "00004": samples[7:], "00005": samples[5:6]}
    times = {shard: StreamTimes() for shard in shards}
    started = time.monotonic()
    with ThreadPoolExecutor(len(shards)) as pool:
        streams = {
            shard: pool.submit(list, engine.stream(shard, asked, times[shard])) for shard, asked in shards.items()
        }
        found = {shard: stream.result() for shard, stream in streams.items()}
    for shard, asked in shards.items():
        assert_states_agree(model, asked, found[shard], engine.meta.layer_ids)
    assert sum(each.engine_seconds for each in times.values()) < time.monotonic() - started, "none counts twice"


def test_nothing_stays_staged(engine: ExtractionEngine) -> None:
    assert [path for path in engine.staging.folder.rglob("*") if path.is_file()] == []
