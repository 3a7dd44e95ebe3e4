"""A new draft under the real vLLM, before it is committed; and that a wrong token of an answer would be seen."""

from __future__ import annotations

import json
import shutil
import uuid
from pathlib import Path

import pytest

from flows.cli import EXIT_DONE
from infra.drafts.smoke_serve import GREEDY, NUM_REQUESTS, smoke_prompts
from infra.evaluation.losslessness import PromptScorer
from infra.generation.completion_client import ClientConfig, CompletionClient
from infra.locations import log_file
from infra.processes import process_token
from infra.verifiers.verifier import VerifierConfig, materialize
from infra.vllm_server import VllmConfig, VllmServer
from tests.e2e.conftest import Commands, Finished

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

TIE_NATS = 0.5
UPSTREAM = ("prompts", "responses", "hidden_states", "vocab")


def test_a_draft_is_served_before_it_is_committed(finished: Finished, commands: Commands, tmp_path: Path) -> None:
    root, stage = tmp_path / "root", finished.stages["drafts"]
    for name in UPSTREAM:
        shutil.copytree(finished.root / name, root / name)
    run = commands.start(root, "train.smoke_serve=true", until="drafts")
    assert run.finish() == EXIT_DONE, run.log[-5000:]
    assert run.left_alive({}, 15.0) == {}
    manifest = json.loads((root / "drafts" / stage.key / "manifest.json").read_text())
    served = manifest["smoke_serve"]
    print(served)
    assert served["num_requests"] == NUM_REQUESTS
    assert served["num_tokens"] >= 10 * NUM_REQUESTS
    assert served["largest_gap_nats"] <= TIE_NATS
    assert 1.0 <= served["acceptance_length"] <= 4.0
    assert run.log.index("vLLM serves the speculator: acceptance length") < run.log.index("Exported step 12")
    assert "eagle3" in log_file("drafts", stage.key, "vllm-smoke").read_text()


@pytest.mark.slow
async def test_a_token_that_was_swapped_is_seen(tmp_path: Path) -> None:
    verifier = materialize(VerifierConfig())
    vllm = VllmConfig(environment={"VLLM_CPU_KVCACHE_SPACE": "1"}, max_model_len=512, enforce_eager=True)
    lookup = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 1}
    server = VllmServer(
        vllm,
        model_path=verifier.path,
        served_name="smoke",
        log_path=tmp_path / "log",
        token=process_token("test", uuid.uuid4().hex),
        speculative_config=lookup,
    )
    sound, swapped = list[float](), list[float]()
    async with server, CompletionClient.to(server, ClientConfig()) as client, PromptScorer(server, 120.0) as scorer:
        for messages in smoke_prompts([]):
            answer = await client.complete(messages, GREEDY)
            prompt, ids = answer.prompt_token_ids, answer.completion_token_ids
            sound += await scorer.gaps_nats(prompt, ids)
            place = len(ids) // 2
            other = [*ids[:place], (ids[place] + 1000) % 40_000, *ids[place + 1 :]]
            swapped.append((await scorer.gaps_nats(prompt, other))[place])
    print(f"{len(sound)} tokens, {sum(gap > 0 for gap in sound)} not the likeliest, at most {max(sound):.4f} nats")
    print(f"swapped ones: {min(swapped):.2f} to {max(swapped):.2f} nats")
    assert max(sound) <= TIE_NATS < min(swapped)
