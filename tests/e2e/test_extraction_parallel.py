"""A verifier spread over two ranks: each has all states, one writes them, and they are right."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from infra.extraction.engine import ExtractConfig, ExtractionEngine
from infra.processes import living, process_token
from infra.verifiers.verifier import Verifier, VerifierConfig, materialize
from infra.vllm_config import VllmConfig
from tests.reference_states import assert_states_agree, conversations

pytestmark = pytest.mark.e2e


@pytest.fixture
def model(tmp_path: Path) -> LlamaForCausalLM:
    """An untrained verifier whose heads can be shared out, which those of the small one (9 and 3) cannot."""
    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 8, "vocab_size": 49_152}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024}
    model = LlamaForCausalLM(LlamaConfig(**shape, **heads, dtype=torch.bfloat16)).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(materialize(VerifierConfig()).path).save_pretrained(tmp_path / "model")
    return model.float()


def test_two_ranks_give_the_same_states_as_hugging_face(model: LlamaForCausalLM, tmp_path: Path) -> None:
    verifier: Verifier = materialize(VerifierConfig(model=str(tmp_path / "model")))
    vllm = VllmConfig(
        environment={"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"},
        max_model_len=512,
        enforce_eager=True,
        tensor_parallel_size=2,
        startup_timeout_seconds=400,
    )
    samples = conversations(verifier, [5, 40, 200])
    token = process_token("test", uuid.uuid4().hex)
    with ExtractionEngine(ExtractConfig(), vllm, verifier, log_path=tmp_path / "log", token=token) as engine:
        results = engine.extract("00000", samples)
        # Blocks of a request that no rank gave back would be missing to the next ones.
        again = engine.extract("00001", samples)
    assert living(token) == []
    assert_states_agree(model, samples, results, engine.meta.layer_ids)
    assert_states_agree(model, samples, again, engine.meta.layer_ids)
