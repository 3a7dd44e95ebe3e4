"""A run that is cancelled in the UI ends: nothing of it lives on, and no port of it stays open."""

from __future__ import annotations

import asyncio
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from flows.config import PipelineConfig
from flows.generate import plan_shards as plan_responses
from flows.resolve import resolve
from infra import manifest
from infra.generation.responses import status_counts, to_parquet
from infra.schemas import RESPONSES, STATUS_OK
from tasks.prompts import write_prompts
from tests.e2e.conftest import Finished, tiny_config
from tests.e2e.prefect_stack import PrefectStack, Run, left_alive, left_open

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

END_SECONDS = 60.0
CONFIRM_SECONDS = 120.0
REACH_SECONDS = 420.0  # until the middle of the stage, other work beside it

# Each is long enough for a cancellation to come in its middle: a worker may take some ten seconds to hear of it.
LONG_ANSWERS = ("generate.max_tokens=400", "generate.concurrency=2")
SAMPLE_TOKENS, SAMPLES_PER_SHARD = 480, 40
UNJUDGED = ("extract.checks.on_policy=off",)  # random tokens are nobody's own text
LONG_TRAINING = ("train.num_steps=5000",)


def write_all_prompts(config: PipelineConfig) -> None:
    stage = resolve(config)["prompts"]
    extra = asyncio.run(write_prompts.fn(stage, config.prompts, config.verifier))
    manifest.finish(stage, {}, extra)


def write_long_responses(
    config: PipelineConfig, num_samples: int = SAMPLES_PER_SHARD, num_tokens: int = SAMPLE_TOKENS
) -> None:
    """Responses of random tokens: what is extracted does not matter here, only that it takes a minute."""
    stages = resolve(config)
    stage, numbers = stages["responses"], random.Random(3)
    plan = manifest.write_plan(stage, plan_responses(stages))
    inputs = manifest.input_records(stage, plan)
    for shard in plan:
        rows = [
            {
                **dict.fromkeys(RESPONSES.names),
                "sample_id": f"{shard.shard}-{number}",
                "dataset": "random",
                "domain": "random",
                "messages": "[]",
                "input_ids": [numbers.randrange(1000, 40_000) for _ in range(num_tokens)],
                "loss_mask": [position >= 16 for position in range(num_tokens)],
                "num_prompt_tokens": 16,
                "num_completion_tokens": num_tokens - 16,
                "temperature": 0.0,
                "status": STATUS_OK,
                "token_source": "server",
                "latency_seconds": 0.0,
            }
            for number in range(num_samples)
        ]
        counts = status_counts(rows)
        manifest.commit_shard(stage, shard, to_parquet(rows), rows=len(rows), status_counts=counts, inputs=inputs)
    manifest.finish(stage, {})


def records(config: PipelineConfig, stage: str) -> list[Path]:
    return sorted(Path(resolve(config)[stage].uri, "shards").glob("*.json"))


def checkpoints(config: PipelineConfig) -> list[Path]:
    return list(Path(resolve(config)["drafts"].uri, "checkpoints").glob("*/step-*/COMMITTED.json"))


def serves(run: Run, program: str) -> Callable[[], bool]:
    return lambda: any(program in name for name in run.processes().values())


def cancel_and_see_it_end(run: Run, programs: tuple[str, ...]) -> None:
    """Cancel, and find the run Cancelled and everything that it had started gone within a minute.

    Args:
        programs: parts of command lines that must be among its processes, or the test looks at too little.
    """
    before, ports = run.processes_with(programs, REACH_SECONDS), run.ports()
    run.cancel()
    cancelled = time.monotonic()
    left = left_alive(before, END_SECONDS)
    ended_seconds = time.monotonic() - cancelled
    assert left == {}, f"still alive after {END_SECONDS:.0f} s: {left}"
    left_seconds = END_SECONDS - ended_seconds
    assert run.left_alive(left_seconds) == {}, "it began while the others ended"
    assert left_open(ports, left_seconds) == set()
    # The worker says so after it has looked for on_cancellation hooks, for which it imports the flow.
    run.wait_for("Cancelled", timeout_seconds=CONFIRM_SECONDS)
    print(f"processes={len(before)} ports={sorted(ports)} ended_s={ended_seconds:.1f}")
    print("\n".join(run.timeline()))


def test_generation(prefect_stack: PrefectStack, tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "root", *LONG_ANSWERS)
    write_all_prompts(config)
    prefect_stack.start_worker("one")
    run = prefect_stack.trigger("generate", config)
    run.wait_until(
        lambda: bool(records(config, "responses") and run.ports()),
        "a shard of responses by its server",
        REACH_SECONDS,
    )
    cancel_and_see_it_end(run, ("api_server", "VLLM::"))
    assert len(records(config, "responses")) < len(manifest.read_plan(resolve(config)["responses"].uri))


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["loading", "extracting"])
def test_extraction(prefect_stack: PrefectStack, tmp_path: Path, moment: str) -> None:
    config = tiny_config(tmp_path / "root", *UNJUDGED)
    write_all_prompts(config)
    write_long_responses(config)
    prefect_stack.start_worker("one")
    run = prefect_stack.trigger("extract", config)
    run.wait_until(serves(run, "extract_worker"), "the extraction worker", REACH_SECONDS)
    if moment == "extracting":
        run.wait_until(lambda: bool(records(config, "hidden_states")), "a shard of states", REACH_SECONDS)
    cancel_and_see_it_end(run, ("extract_worker",))
    assert len(records(config, "hidden_states")) < len(manifest.read_plan(resolve(config)["responses"].uri))


@pytest.mark.slow
def test_training(prefect_stack: PrefectStack, finished: Finished, tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "root", *LONG_TRAINING)
    for stage in ("prompts", "responses", "hidden_states", "vocab"):
        shutil.copytree(finished.root / stage, tmp_path / "root" / stage)
    prefect_stack.start_worker("one")
    run = prefect_stack.trigger("train", config)
    run.wait_until(lambda: bool(checkpoints(config)), "a checkpoint", REACH_SECONDS)
    cancel_and_see_it_end(run, ("torch.distributed.run", "-m infra.training"))
    assert not records(config, "drafts")
