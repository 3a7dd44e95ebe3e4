"""The real engine: its states are those of a Hugging Face forward pass, and bad samples do not stop it."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from infra.extraction import ExtractConfig, ExtractionEngine, ExtractSample
from infra.processes import living, process_token
from infra.verifier import Verifier, VerifierConfig, materialize
from infra.vllm_config import VllmConfig

pytestmark = pytest.mark.e2e

MAX_MODEL_LEN = 1024
# The states are bf16; the reference is float32. Relative differences of 0.003 to 0.01 are the rounding's.
TOLERANCE = 0.03
QUESTION = "Why is the sky blue in the daytime, and red at dusk? Explain it to a child. "
logger = logging.getLogger("draftsmith.tests")


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
    assert not running.staging.exists()


@pytest.fixture(scope="module")
def samples(verifier: Verifier) -> list[ExtractSample]:
    """A short, a middling and a long conversation."""
    tokenizer = AutoTokenizer.from_pretrained(verifier.path)
    found = []
    for times in (1, 12, 40):
        messages = [{"role": "user", "content": QUESTION * times}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        found.append(ExtractSample(f"question-{times}", list(ids)))
    return found


@pytest.fixture(scope="module")
def model(verifier: Verifier) -> Any:
    return AutoModelForCausalLM.from_pretrained(verifier.path, dtype=torch.float32)


def reference_states(model: Any, input_ids: list[int], layer_ids: tuple[int, ...]) -> torch.Tensor:
    """[tokens, layers, hidden] float32 of a Hugging Face forward pass; the last layer's before the final norm."""
    before_norm: list[torch.Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda module, args: before_norm.append(args[0]))
    with torch.inference_mode():
        found = model(torch.tensor([input_ids]), output_hidden_states=True).hidden_states
    hook.remove()
    states = [found[layer][0] for layer in layer_ids[:-1]]
    return torch.stack([*states, before_norm[0][0]], dim=1)


def test_states_agree_with_hugging_face(engine: ExtractionEngine, model: Any, samples: list[ExtractSample]) -> None:
    results = engine.extract("00000", samples)
    for asked, result in zip(samples, results, strict=True):
        assert result.error is None
        assert result.hidden_states is not None
        expected = reference_states(model, list(asked.input_ids), engine.meta.layer_ids)
        found = result.hidden_states.float()
        assert found.shape == expected.shape
        for position, layer in enumerate(engine.meta.layer_ids):
            difference = (found - expected)[:, position].norm() / expected[:, position].norm()
            logger.info("%s layer %d: relative difference %.4f", asked.sample_id, layer, difference)
            assert difference < TOLERANCE, f"{asked.sample_id}, layer {layer}"
            # Token by token too: one misplaced slot would drown in the sum.
            apart = (found - expected)[:, position].norm(dim=-1) / expected[:, position].norm(dim=-1)
            assert apart.median() < TOLERANCE
            assert apart.max() < 0.3, f"{asked.sample_id}, layer {layer}, token {int(apart.argmax())}"


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
    assert time.monotonic() - started < 60
    assert [result.error is None for result in results] == [False, True, False, False, True]
    assert results[0].error == f"{MAX_MODEL_LEN} tokens; extraction takes 1 to {MAX_MODEL_LEN - 1}"
    assert "out of vocabulary" in str(results[3].error)
    # The same sample in another company: no prefix was taken from a cache.
    (again,) = engine.extract("00002", [samples[0]])
    assert again.hidden_states is not None
    assert results[1].hidden_states is not None
    assert again.hidden_states.shape == results[1].hidden_states.shape


def test_nothing_stays_staged(engine: ExtractionEngine) -> None:
    assert list(engine.staging.rglob("*")) == []
