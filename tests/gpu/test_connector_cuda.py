"""The connector's CUDA path: an engine's states against a Hugging Face forward pass on the same GPU.

Runs where this interpreter's torch sees a GPU and vLLM is there: in this interpreter, or in `.venv-vllm`. Needs no
Prefect. `DRAFTSMITH_TEST_VERIFIER` may name the folder of a small verifier, where the demo's package is not installed.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import time
import uuid
from pathlib import Path

import pytest
import torch

from infra.extraction.engine import ExtractConfig, ExtractionEngine
from infra.locations import project_home
from infra.processes import living, process_token
from infra.verifiers.verifier import VerifierConfig, materialize
from infra.vllm_config import VllmConfig

pytestmark = pytest.mark.gpu

LENGTHS = range(75, 1575, 75)  # 20 samples
logger = logging.getLogger("draftsmith.tests")


@pytest.fixture
def vllm() -> VllmConfig:
    """The vLLM of this interpreter, else that of `.venv-vllm`."""
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA GPU here")
    config = VllmConfig(
        max_model_len=2048,
        gpu_memory_utilization=0.3,
        # Fewer than all samples have, so that some are prefilled in pieces and beside others.
        extra_args=["--max-num-batched-tokens=2048"],
        startup_timeout_seconds=400,
    )
    if importlib.util.find_spec("vllm"):
        found_at = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        return config.model_copy(update={"python": sys.executable, "environment": found_at})
    if not (project_home() / ".venv-vllm/bin/python").exists():
        pytest.skip(f"neither {sys.executable} nor .venv-vllm has vLLM")
    return config


def test_states_agree_with_hugging_face_on_the_gpu(vllm: VllmConfig, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from tests.reference_states import assert_states_agree, conversations

    folder = os.environ.get("DRAFTSMITH_TEST_VERIFIER")
    verifier = materialize(VerifierConfig(model=folder) if folder else VerifierConfig())
    samples = conversations(verifier, LENGTHS)
    num_tokens = sum(len(sample.input_ids) for sample in samples)
    token = process_token("test", uuid.uuid4().hex)
    with ExtractionEngine(ExtractConfig(), vllm, verifier, log_path=tmp_path / "engine.log", token=token) as engine:
        results = engine.extract("00000", samples)
        began = time.monotonic()
        again = engine.extract("00001", samples)
        rate = num_tokens / (time.monotonic() - began)
    assert living(token) == []
    layer_ids = engine.meta.layer_ids
    model = AutoModelForCausalLM.from_pretrained(verifier.path, dtype=torch.float32).to("cuda")
    assert_states_agree(model, samples, results, layer_ids)
    assert_states_agree(model, samples, again, layer_ids)
    found_bytes = sum(result.hidden_states.nbytes for result in results if result.hidden_states is not None)
    assert found_bytes == num_tokens * len(layer_ids) * verifier.hidden_size * 2
    logger.info("%d tokens, %d bytes of states, at %.0f tokens/s.", num_tokens, found_bytes, rate)
