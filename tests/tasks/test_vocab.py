"""The vocabulary stage: its coverage is told, and it is made again when the responses are."""

from __future__ import annotations

import asyncio
import io
import logging
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from infra import manifest
from infra.drafts.vocab import FILE_NAME, VocabConfig, VocabMap
from infra.fingerprint import stage_content
from infra.manifest import Shard, ShardRecord, StageRef
from tasks.vocab import build_vocabulary, coverage_figures
from tests.infra.drafts.test_vocab import responses

VOCAB_SIZE = 12


def answer(tokens: list[int]) -> bytes:
    table: pa.Table = responses((tokens, [True] * len(tokens), "ok"))
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()


class Stages:
    """Responses in two shards, and the vocabulary that rests on them."""

    def __init__(self, root: Path, *answers: list[int]) -> None:
        content = stage_content("responses", 1, {}, {}, {})
        self.responses = StageRef(str(root), "responses", content)
        upstream = {"responses": self.responses.key}
        self.vocab = StageRef(str(root), "vocab", stage_content("vocab", 1, {}, {}, upstream))
        shards = [Shard(f"{number:05d}") for number in range(len(answers))]
        manifest.write_plan(self.responses, shards)
        for shard, tokens in zip(shards, answers, strict=True):
            self.answer(shard, tokens)
        manifest.finish(self.responses, {})
        names = tuple(f"responses/{shard.shard}" for shard in shards)
        manifest.write_plan(self.vocab, [Shard("00000", names, {"file": FILE_NAME})])

    def answer(self, shard: Shard, tokens: list[int]) -> None:
        manifest.commit_shard(self.responses, shard, answer(tokens), rows=1, status_counts={"ok": 1}, inputs={})

    def answer_again(self, shard: str, tokens: list[int]) -> None:
        """As after damage: the record is withdrawn, and other tokens are generated in its place."""
        manifest.invalidate(self.responses.uri, shard)
        self.answer(Shard(shard), tokens)
        manifest.finish(self.responses, {})

    def build(self, size: int) -> ShardRecord:
        state = manifest.inspect(self.vocab)
        (shard,) = state.missing
        inputs = manifest.input_records(self.vocab, state.plan)
        record = asyncio.run(
            build_vocabulary.fn(self.vocab, shard, inputs, VocabConfig(draft_vocab_size=size), VOCAB_SIZE)
        )
        manifest.finish(self.vocab, {}, coverage_figures(self.vocab, record))
        return record

    @property
    def token_ids(self) -> list[int]:
        return VocabMap.from_bytes(Path(self.vocab.uri, FILE_NAME).read_bytes()).token_ids.tolist()


def test_it_is_made_again_when_a_shard_of_responses_is(tmp_path: Path) -> None:
    stages = Stages(tmp_path, [3, 3, 3, 5], [5, 5, 7])
    first = stages.build(2)
    assert stages.token_ids == [3, 5]
    assert manifest.inspect(stages.vocab).complete
    stages.answer_again("00001", [8, 8, 8, 8])
    state = manifest.inspect(stages.vocab)
    assert not state.complete
    assert state.problems == {"00000": "its input responses/00001 has changed"}
    again = stages.build(2)
    assert stages.token_ids == [3, 8]
    assert again.sha256 != first.sha256
    assert manifest.inspect(stages.vocab).complete


def test_its_manifest_says_what_it_covers(tmp_path: Path) -> None:
    stages = Stages(tmp_path, [1] * 60 + [2] * 30, [3] * 6 + [4] * 4)
    stages.build(2)
    found = manifest.read_manifest(stages.vocab.uri)
    assert found is not None
    assert found["vocabulary"] == {
        "draft_vocab_size": 2,
        "verifier_vocab_size": VOCAB_SIZE,
        "coverage": pytest.approx(0.9),
        "num_generated_tokens": 100,
        "draft_vocab_size_for_95_percent": 3,
    }
    assert found["shards"][0]["coverage"] == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("size", "level", "said"),
    [
        (
            2,
            "WARNING",
            "The draft's vocabulary of 2 tokens (of 12) holds 90.00 % of the 100 generated tokens, under 95 %: the "
            "rest can never be drafted. vocab.draft_vocab_size=3 would reach that; training goes on with what there "
            "is.",
        ),
        (3, "INFO", "The draft's vocabulary of 3 tokens (of 12) holds 96.00 % of the 100 generated tokens."),
    ],
)
def test_its_coverage_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, size: int, level: str, said: str
) -> None:
    caplog.set_level(logging.INFO, "draftsmith.vocab")
    Stages(tmp_path, [1] * 60 + [2] * 30, [3] * 6 + [4] * 4).build(size)
    told = [(record.levelname, record.message) for record in caplog.records if record.name == "draftsmith.vocab"]
    assert told == [(level, said)]
