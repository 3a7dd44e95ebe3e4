"""Faults planted into true states and text of a small model: each is refused by its name, and nothing else is."""

from __future__ import annotations

import dataclasses
import json
import random
import threading
from collections.abc import Callable

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from infra.errors import StageFailed
from infra.extraction.rows import BuiltShard, ExtractResult, build_shard
from infra.hidden_states import HiddenStatesMeta, decode
from infra.manifest import ShardRecord, StageRef
from infra.schemas import RESPONSES
from infra.state_checks.checks import ChecksConfig, StateChecks, states_problem
from infra.state_checks.verdict import refuse_bad_states
from infra.state_checks.verifier_head import VerifierHead
from tests.fakes.tiny_verifier import (
    HIDDEN_SIZE,
    LAYER_IDS,
    PROMPT_TOKENS,
    Answered,
    answers,
    save,
    states_of,
    tiny_model,
)

pytestmark = pytest.mark.seconds  # a small model writes its own text first

META = HiddenStatesMeta(layer_ids=(2, 15, 27, 30), hidden_size=8, verifier_revision="abc")
TINY = HiddenStatesMeta(layer_ids=LAYER_IDS, hidden_size=HIDDEN_SIZE, verifier_revision="tiny", encoding="bf16")
MODEL = tiny_model()
OTHER_MODEL = 1  # its seed
TEMPERATURES = (0.0, 0.7, 1.0)


def sane(num_tokens: int = 10) -> torch.Tensor:
    return torch.randn(num_tokens, 4, 8, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)


def damaged(kind: str) -> torch.Tensor:
    damage = sane()
    if kind == "nan":
        damage[4, 1, 3] = float("nan")
    elif kind == "inf":
        damage[9, 3, 7] = float("-inf")
    elif kind == "zero everywhere":
        damage[:] = 0
    elif kind == "zero at one token":
        damage[6, 2] = 0
    elif kind == "constant":
        damage[:, 1] = 2.5
    elif kind == "same at every token":
        damage[:, 2] = damage[3, 2]
    elif kind == "short":
        damage = damage[:6]
    elif kind == "layer lost":
        damage = damage[:, :3]
    return damage


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("nan", "not finite: layer 15, token 4 (1 of 10 tokens)"),
        ("inf", "not finite: layer 30, token 9 (1 of 10 tokens)"),
        ("zero everywhere", "all zero: layer 2, token 0 (10 of 10 tokens)"),
        ("zero at one token", "all zero: layer 27, token 6 (1 of 10 tokens)"),
        ("constant", "constant: layer 15, token 0 (10 of 10 tokens)"),
        ("same at every token", "constant: the same at every token of layer 27"),
        ("short", "length: states of shape [6, 4, 8] for 10 tokens and 4 layers"),
        ("layer lost", "length: states of shape [10, 3, 8] for 10 tokens and 4 layers"),
        ("none", None),
    ],
)
def test_states_that_no_model_computes_are_found(kind: str, said: str | None) -> None:
    assert states_problem(damaged(kind), list(range(10)), META.layer_ids) == said


def test_one_token_over_and_over_may_have_one_state() -> None:
    repeated = sane(1).expand(10, 4, 8)
    assert states_problem(repeated, [7] * 10, META.layer_ids) is None
    assert states_problem(sane(1), [7], META.layer_ids) is None


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> VerifierHead:
    return VerifierHead.open(save(MODEL, tmp_path_factory.mktemp("verifier")))


@pytest.fixture(scope="module")
def learned(head: VerifierHead) -> StateChecks:
    """Checks that know the norms of sound samples. What they refuse they do not learn."""
    checks = StateChecks(ChecksConfig(), TINY, head)
    assert errors(built(clean(), checks)) == {}
    return checks


@pytest.fixture
def checks(head: VerifierHead) -> StateChecks:
    return StateChecks(ChecksConfig(), TINY, head)


def clean(count: int = 12) -> list[Answered]:
    return [answer for temperature in TEMPERATURES for answer in answers(temperature, count)]


def built(samples: list[Answered], checks: StateChecks, meta: HiddenStatesMeta = TINY) -> BuiltShard:
    """The shard of these samples, their states checked as the engine checks them."""
    rest = dict.fromkeys(RESPONSES.names, "") | {"num_prompt_tokens": 1, "num_completion_tokens": 1}
    rows = [rest | {"latency_seconds": 0.0} | sample.response for sample in samples]
    problems = [states_problem(each.states, each.response["input_ids"], TINY.layer_ids) for each in samples]
    results = [
        ExtractResult(each.response["sample_id"], problem, None if problem else each.states)
        for each, problem in zip(samples, problems, strict=True)
    ]
    return build_shard(pa.Table.from_pylist(rows, schema=RESPONSES), results, meta, checks)


def errors(shard: BuiltShard) -> dict[str, str]:
    rows = pq.read_table(pa.BufferReader(shard.data)).to_pylist()
    return {row["sample_id"]: row["error"] for row in rows if row["error"]}


def shuffled(answer: Answered) -> Answered:
    ids = answer.response["input_ids"]
    completion = random.Random(0).sample(ids[PROMPT_TOKENS:], len(ids) - PROMPT_TOKENS)
    return Answered({**answer.response, "input_ids": ids[:PROMPT_TOKENS] + completion}, answer.states)


def with_states(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Answered], Answered]:
    return lambda answer: dataclasses.replace(answer, states=change(answer.states.clone()))


def one_nan(states: torch.Tensor) -> torch.Tensor:
    states[20, 1, 3] = float("nan")
    return states


FAULTS: dict[str, tuple[str, Callable[[Answered], Answered]]] = {
    "shifted by one token": ("off-policy", with_states(lambda states: states.roll(1, 0))),
    "shifted by one token back": ("off-policy", with_states(lambda states: states.roll(-1, 0))),
    "two aux layers swapped": ("norms", with_states(lambda states: states[:, [1, 0, 2, 3]])),
    "other two aux layers swapped": ("norms", with_states(lambda states: states[:, [0, 2, 1, 3]])),
    "the last layer swapped": ("norms", with_states(lambda states: states[:, [0, 1, 3, 2]])),
    "all zeros": ("all zero", with_states(torch.zeros_like)),
    "one NaN": ("not finite", with_states(one_nan)),
    "shortened by a prefix cache": ("length", with_states(lambda states: states[16:])),
    "completion shuffled": ("off-policy", shuffled),
}


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_refused_by_its_name(learned: StateChecks, fault: str, temperature: float) -> None:
    name, plant = FAULTS[fault]
    shard = built([plant(sample) for sample in answers(temperature, 6)], learned)
    assert [error.partition(":")[0] for error in errors(shard).values()] == [name] * 6


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_responses_of_another_model_are_refused(checks: StateChecks, temperature: float) -> None:
    shard = built(answers(temperature, 10, seed=OTHER_MODEL), checks)
    assert [error.partition(":")[0] for error in errors(shard).values()] == ["off-policy"] * 10


def test_sound_samples_pass_and_the_record_says_how(checks: StateChecks) -> None:
    shard = built(clean(), checks)
    assert errors(shard) == {}
    assert shard.status_counts == {"ok": 36}
    extra = json.loads(json.dumps(shard.extra))
    assert extra["failed_checks"] == {}
    assert (extra["num_tokens"], extra["num_loss_tokens"], extra["longest_tokens"]) == (36 * 52, 36 * 40, 52)
    assert 36 * 8 <= extra["on_policy"]["positions"] < 36 * 32
    assert len(extra["layer_norms"]["centre"]) == len(LAYER_IDS)
    assert extra["state_bytes"]["raw"] == 36 * 52 * len(LAYER_IDS) * HIDDEN_SIZE * 2


def test_without_a_head_the_other_checks_stand() -> None:
    checks = StateChecks(ChecksConfig(), TINY, None)
    assert "on_policy" not in built(clean(), checks).extra
    assert errors(built(answers(0.7, 5, seed=OTHER_MODEL), checks)) == {}
    swapped = FAULTS["two aux layers swapped"][1](answers(0.7, 1)[0])
    assert "norms: states of layer " in errors(built([swapped], checks))["t0.7-0"]


@pytest.mark.parametrize("encoding", ["bf16", "bf16_split", "fp8_e4m3"])
def test_the_first_shard_is_judged_by_itself_and_written_again(head: VerifierHead, encoding: str) -> None:
    meta = dataclasses.replace(TINY, encoding=encoding)
    samples = clean()
    alone = StateChecks(ChecksConfig(), meta, head)
    sound = samples[:3] + samples[5:]
    swap = FAULTS["two aux layers swapped"][1]
    bad = [*samples[:3], *map(swap, samples[3:5]), *samples[5:]]
    shard = built(bad, alone, meta)
    names = [sample.response["sample_id"] for sample in samples[3:5]]
    assert sorted(errors(shard)) == names
    assert all(error.startswith("norms: ") for error in errors(shard).values())
    assert shard.status_counts == {"ok": 34, "failed": 2}
    assert shard.extra["failed_checks"] == {"norms": {"count": 2, "samples": names}}
    other = built(sound, StateChecks(ChecksConfig(), meta, head), meta)
    # As if the two had never been there, bit for bit.
    for one, two in zip(decode(shard.data), decode(other.data), strict=True):
        assert one.sample_id == two.sample_id
        assert torch.equal(one.aux_hidden_states, two.aux_hidden_states)
        assert torch.equal(one.verifier_last_hidden_states, two.verifier_last_hidden_states)
    assert shard.extra["state_bytes"]["raw"] == other.extra["state_bytes"]["raw"]
    same = ("num_tokens", "num_loss_tokens", "longest_tokens", "layer_norms", "on_policy")
    assert {name: shard.extra[name] for name in same} == {name: other.extra[name] for name in same}
    assert shard.extra.get("encoding_error") == other.extra.get("encoding_error")


def test_a_resumed_stage_knows_what_it_knew(head: VerifierHead, checks: StateChecks) -> None:
    extras = [json.loads(json.dumps(built(answers(t, 10), checks).extra)) for t in TEMPERATURES]
    resumed = StateChecks(ChecksConfig(), TINY, head)
    resumed.learn(extras)
    before, after = checks.norms.known(), resumed.norms.known()
    assert before is not None
    assert after is not None
    assert before.samples == after.samples == 30
    assert after.centre == pytest.approx(before.centre, abs=1e-4)
    assert after.spread == pytest.approx(before.spread, abs=1e-4)
    swapped = FAULTS["two aux layers swapped"][1](answers(0.7, 1)[0])
    assert list(errors(built([swapped], resumed))) == ["t0.7-0"]


def test_a_stage_of_few_samples_has_no_statistics_to_judge_by(checks: StateChecks) -> None:
    swap = FAULTS["two aux layers swapped"][1]
    assert errors(built([*answers(0.7, 6), swap(answers(1.0, 1)[0])], checks)) == {}


def test_short_and_repetitive_samples_pass(checks: StateChecks) -> None:
    built(clean(), checks)
    whole = answers(0.7, 1)[0]
    row = whole.response
    short = [
        Answered(
            {**row, "sample_id": str(n), "input_ids": row["input_ids"][:n], "loss_mask": row["loss_mask"][:n]},
            whole.states[:n],
        )
        for n in (1, 2, 3, PROMPT_TOKENS + 1)
    ]
    ids = row["input_ids"][:4] + [7] * 200
    mask = [False] * len(ids)
    long = Answered(
        {**row, "sample_id": "over and over", "input_ids": ids, "loss_mask": mask},
        states_of(MODEL, torch.tensor([ids]))[0],
    )
    # One token says most of the text, and its states are an attention sink's.
    sinks = Answered(
        {
            **row,
            "sample_id": "sinks",
            "input_ids": row["input_ids"] + [7] * 200,
            "loss_mask": row["loss_mask"] + [False] * 200,
        },
        torch.cat([whole.states, (100 * whole.states[:1]).expand(200, -1, -1)]),
    )
    assert errors(built([*short, long, sinks], checks)) == {}


def test_an_id_outside_the_head_is_refused(checks: StateChecks) -> None:
    sample = answers(0.7, 1)[0]
    sample.response["input_ids"][-1] = 200
    assert errors(built([sample], checks))["t0.7-0"] == "ids: token id 200 is not among the 200 of the verifier"


def test_shards_of_several_threads_share_what_is_known(head: VerifierHead, checks: StateChecks) -> None:
    samples = clean(4)
    found: list[dict[str, str]] = []
    threads = [threading.Thread(target=lambda: found.append(errors(built(samples, checks)))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    known = checks.norms.known()
    assert found == [{}] * 4
    assert known is not None
    assert known.samples == 48


def record(shard: str, built: BuiltShard) -> ShardRecord:
    return ShardRecord(shard, "d", "0", 1, built.rows, built.status_counts, {}, json.loads(json.dumps(built.extra)))


STAGE = StageRef("/root", "hidden_states", {"schema_version": 1, "upstream": {}})


def test_a_refused_stage_names_the_checks_and_samples(checks: StateChecks) -> None:
    def faulty(name: str, temperature: float, count: int) -> list[Answered]:
        plant = FAULTS[name][1]
        return [
            dataclasses.replace(plant(each), response={**plant(each).response, "sample_id": f"{name[:3]}-{index}"})
            for index, each in enumerate(answers(temperature, count))
        ]

    first = built(clean(), checks)
    second = built([*faulty("one NaN", 0.7, 2), *faulty("completion shuffled", 1.0, 5)], checks)
    records = [record("00000", first), record("00001", second)]
    refuse_bad_states(STAGE, records, 0.5, checks.config)
    said = (
        rf"^hidden_states/{STAGE.key}: 7 of 43 rows failed, more than the allowed share 0.02: "
        r"5 off-policy \(com-0, com-1, com-2, …\), 2 not finite \(one-0, one-1\); the column `error` of "
    )
    with pytest.raises(StageFailed, match=said):
        refuse_bad_states(STAGE, records, 0.02, checks.config)


def test_a_stage_of_unlikely_text_is_refused_though_no_sample_is(checks: StateChecks) -> None:
    hot = [Answered({**each.response, "temperature": 0.7}, each.states) for each in answers(1.0, 40)]
    shard = built(hot, checks)
    share = shard.status_counts.get("failed", 0) / shard.rows
    records = [record("00000", built(clean(), checks)), record("00001", shard)]
    with pytest.raises(
        StageFailed, match=r"not the verifier's own text: in 1 of 2 shards, the first of them 00001"
    ):
        refuse_bad_states(STAGE, records, share + 0.1, checks.config)


def test_records_from_before_these_checks_are_accepted() -> None:
    old = ShardRecord("00000", "d", "0", 1, 10, {"ok": 10}, {}, {"num_tokens": 5})
    refuse_bad_states(STAGE, [old], 0.02, ChecksConfig())
    StateChecks(ChecksConfig(), TINY, None).learn([old.extra])


def test_thresholds_enter_the_key_and_defaults_do_not() -> None:
    assert ChecksConfig().content() == {}
    assert ChecksConfig(stage_margin_nats=1.0).content() == {}
    assert ChecksConfig(positions=64, norm_spreads=5).content() == {"positions": 64, "norm_spreads": 5}
