"""Acceptance by context length and by domain, from what vLLM says of each request."""

from __future__ import annotations

import dataclasses

import pytest

from infra.evaluation.config import EvaluateConfig, Way
from infra.evaluation.groups import GROUPS, group_rows, step_contexts, tells_all
from infra.evaluation.measurement import Measurement, RequestResult
from infra.vllm_metrics import RequestFigures, SpeculationCounters
from tests.fakes.measurements import DRAFT

WAY = Way("eagle3", 3, DRAFT)
HEAD = {
    "label": "eagle3",
    "method": "eagle3",
    "draft": "k",
    "dataset": "q",
    "temperature": 0.0,
    "concurrency": 1,
    "num_speculative_tokens": 3,
}
CONFIG = EvaluateConfig(context_bins=(10, 20))


def request(
    name: str, num_prompt_tokens: int, accepted: tuple[int, ...], *, domain: str = "code", tokens: int | None = None
) -> RequestResult:
    """An answer whose every step after the first drafted three tokens, unless `tokens` says otherwise."""
    count = 1 + sum(accepted) + len(accepted) if tokens is None else tokens
    return RequestResult(
        name,
        1.0,
        tuple(range(count)),
        prompt_token_ids=tuple(range(num_prompt_tokens)),
        domain=domain,
        figures=RequestFigures(0.1, 0.01, accepted, (3,) * len(accepted)),
    )


def measured(*requests: RequestResult, round_index: int = 0, way: Way = WAY) -> Measurement:
    steps = [count for one in requests if one.figures for count in one.figures.accepted]
    positions = tuple(sum(count > place for count in steps) for place in range(3))
    counters = SpeculationCounters(len(steps), 3 * len(steps), sum(steps), positions)
    return Measurement(way, "q", 1, round_index, 1.0, counters, requests)


def test_a_steps_context_is_the_prompt_and_all_tokens_before_it() -> None:
    assert step_contexts(request("a", 5, (3, 0, 1))) == [6, 10, 11]
    assert step_contexts(request("a", 5, (3, 0, 2), tokens=7)) == [6, 10, 11], "the last step was cut by the limit"
    assert step_contexts(request("a", 5, (3, 0, 1), tokens=9)) is None, (
        "a step without a draft came somewhere between"
    )
    assert step_contexts(request("a", 5, (3, 0, 1), tokens=6)) is None
    assert step_contexts(request("a", 5, ())) is None


def test_groups_hold_every_draft_once_under_its_context_and_once_under_its_domain() -> None:
    first = [request("a", 5, (3, 0, 1)), request("b", 15, (2, 2, 0, 1), domain="chat")]
    rounds = [measured(*first), measured(*first, round_index=1)]
    rows = group_rows(rounds, HEAD, CONFIG)
    assert [(row["group_by"], row["group"], row["context_from"], row["context_to"]) for row in rows] == [
        ("context", "0-9", 0, 10),
        ("context", "10-19", 10, 20),
        ("context", "20+", 20, None),
        ("domain", "chat", None, None),
        ("domain", "code", None, None),
    ]
    # Contexts of a: 6, 10, 11; of b: 16, 19, 22, 23. Both rounds count.
    assert [row["num_drafts"] for row in rows] == [2, 8, 4, 8, 6]
    assert [row["num_accepted_tokens"] for row in rows] == [6, 10, 2, 10, 8]
    assert [row["num_requests"] for row in rows] == [2, 4, 2, 2, 2]
    assert rows[4]["accepted_per_position"] == [4, 2, 2]
    for row in rows:
        assert row.keys() == set(GROUPS.names)
        assert abs(row["acceptance_length"] - 1 - sum(row["acceptance_rate_per_position"])) < 1e-9
    assert rows[0]["acceptance_length_low"] is None, "one prompt tells nothing of others"
    assert rows[1]["acceptance_length_low"] < rows[1]["acceptance_length"] < rows[1]["acceptance_length_high"]


def test_without_known_places_there_are_domains_only() -> None:
    unknown = request("a", 5, (3, 0, 1), tokens=40)
    rows = group_rows([measured(unknown)], HEAD, CONFIG)
    assert [row["group_by"] for row in rows] == ["domain"]
    known = request("b", 5, (3, 0, 1))
    rows = group_rows([measured(unknown, known)], HEAD, CONFIG)
    assert [row["group_by"] for row in rows] == ["domain"], "half of the drafts would be a choice of their own"
    many = [request(f"c{i}", 5, (3, 0, 1)) for i in range(30)]
    assert {row["group_by"] for row in group_rows([measured(unknown, *many)], HEAD, CONFIG)} == {
        "context",
        "domain",
    }


def test_requests_must_sum_to_the_servers_counters() -> None:
    good = measured(request("a", 5, (3, 0, 1)))
    assert tells_all(good)
    off = dataclasses.replace(good, counters=dataclasses.replace(good.counters, num_drafts=4))
    assert not tells_all(off)
    assert group_rows([good, dataclasses.replace(off, round_index=1)], HEAD, CONFIG) == []
    silent = dataclasses.replace(good.requests[0], figures=None)
    assert not tells_all(dataclasses.replace(good, requests=(silent,)))
    failed = RequestResult("b", 1.0, (), error="refused")
    assert tells_all(dataclasses.replace(off, requests=(*off.requests, failed))), "its steps are in the counters"


@pytest.mark.parametrize("method", ["none", "eagle3"])
def test_nothing_drafted_has_no_groups(method: str) -> None:
    answered = dataclasses.replace(request("a", 5, ()), figures=RequestFigures(0.1, 0.01))
    way = Way("none") if method == "none" else WAY
    assert group_rows([measured(answered, way=way)], HEAD, CONFIG) == []
