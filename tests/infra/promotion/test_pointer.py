"""Which draft is promoted, and that promoted.json is moved by one writer at a time."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infra import schemas, storage
from infra.errors import StageFailed
from infra.evaluation.findings import lowest_load
from infra.evaluation.results import completed
from infra.promotion import pointer as promotion
from infra.promotion.gate import Decision, PromoteConfig, decide
from infra.promotion.pointer import (
    Outcome,
    Promotion,
    figures,
    pointer_uri,
    promote,
    read_pointer,
    rival,
    verifiers,
)
from infra.reports.tables import result_table
from tests.fakes.result_rows import NEW, PROMOTED, beside, measured, result_row

VERIFIER = "Qwen/Qwen3-8B"
GATE = PromoteConfig(min_acceptance_length=1.3, min_speedup={1: 1.1})
RANDOM = {"accepted": [2, 0, 0], "speedup": 0.81, "acceptance_length_low": 1.0, "acceptance_length_high": 1.01}


def entry(draft: str, run_id: str = "run") -> Callable[[Decision], Promotion]:
    def made(decision: Decision) -> Promotion:
        return Promotion(
            draft=draft,
            export=f"drafts/{draft}/export",
            evaluation="eeeeeeeeeeeeeeee",
            verifier_revision="9f3c0ffee",
            num_speculative_tokens=decision.num_speculative_tokens or 0,
            promoted_at="2026-01-01T00:00:00+00:00",
            run_id=run_id,
            reasons=decision.reasons,
            figures=figures(decision.rows),
        )

    return made


def tried(root: str, rows: list[dict[str, Any]], draft: str, gate: PromoteConfig = GATE) -> Outcome:
    return promote(root, VERIFIER, rows, draft, gate, entry(draft))


def test_random_weights_are_not_promoted_and_it_is_said_why(tmp_path: Path) -> None:
    outcome = tried(str(tmp_path), measured(**RANDOM), NEW)
    assert (outcome.promoted, outcome.moved) == (False, False)
    assert outcome.reasons == (
        "acceptance length 1.00 with one request at a time on questions "
        "(its 95 % interval's lower end, 1.00, must reach 1.3)",
        "0.81 times as fast with one request at a time on questions "
        "(its 95 % interval's lower end, 0.78, must reach 1.1)",
    )
    assert not list(tmp_path.iterdir())


def test_a_trained_draft_is_promoted_and_a_slightly_worse_one_after_it_is_not(tmp_path: Path) -> None:
    root, third = str(tmp_path), "3" * 16
    assert tried(root, measured(), NEW).moved
    first = Path(pointer_uri(root, VERIFIER)).read_bytes()
    said = json.loads(first)["promoted"]
    assert (said["draft"], said["export"], said["num_speculative_tokens"]) == (NEW, f"drafts/{NEW}/export", 3)
    assert [row["speedup"] for row in said["figures"]] == [1.25, 0.8]

    worse = beside(measured(third, accepted=[380, 139, 68], speedup=1.24), NEW)
    outcome = tried(root, worse, third)
    assert not outcome.promoted
    assert outcome.reasons == (
        f"acceptance length 1.587 over all (must reach the 1.595 of {NEW}, which is promoted)",
    )
    assert Path(pointer_uri(root, VERIFIER)).read_bytes() == first

    better = beside(measured(third, accepted=[420, 160, 80], speedup=1.3), NEW)
    assert tried(root, better, third).moved
    pointer = read_pointer(root, VERIFIER)
    assert [each.draft for each in pointer.history] == [NEW, third]
    assert pointer.promoted is not None
    assert pointer.promoted.draft == third


def test_the_same_draft_again_changes_nothing(tmp_path: Path) -> None:
    root = str(tmp_path)
    tried(root, measured(), NEW)
    before = Path(pointer_uri(root, VERIFIER)).read_bytes()
    again = promote(root, VERIFIER, measured(**RANDOM), NEW, GATE, entry(NEW, "another run"))
    assert (again.promoted, again.moved) == (True, False)
    assert Path(pointer_uri(root, VERIFIER)).read_bytes() == before


def test_an_interval_that_begins_below_the_minimum_does_not_pass() -> None:
    rows = [result_row(speedup=1.12, speedup_low=1.096, speedup_high=1.2, acceptance_length_low=None)]
    refused = decide(rows, NEW, GATE, None)
    assert not refused.passes
    where = "with one request at a time on questions"
    assert refused.reasons == (
        f"1.12 times as fast {where} (its 95 % interval's lower end, 1.096, must reach 1.1)",
    )
    shown = decide(rows, NEW, PromoteConfig(min_speedup={1: 1.09}, min_acceptance_length=1.5), None)
    assert shown.passes
    assert shown.reasons == (
        f"acceptance length 1.59 {where} (reaches 1.5)",
        f"1.12 times as fast {where} (its 95 % interval's lower end, 1.10, reaches 1.09)",
    )


def test_every_data_set_and_every_load_of_the_gate_counts() -> None:
    rows = [result_row(), result_row(dataset="code", speedup=0.9)]
    decision = decide(rows, NEW, GATE, None)
    assert "on code (its 95 % interval's lower end, 0.86, must reach 1.1)" in decision.reasons[0]
    unmeasured = decide([result_row()], NEW, PromoteConfig(min_speedup={32: 1.0}), None)
    assert unmeasured.reasons == ("not measured with 32 requests in flight (asked for: 1 times as fast)",)


def test_answers_that_near_ties_do_not_explain_are_not_promoted() -> None:
    decision = decide([result_row(losslessness="fault")], NEW, PromoteConfig(), None)
    assert not decision.passes
    assert "by more than near-ties" in decision.reasons[-1]


def test_of_several_draft_lengths_the_fastest_that_passes_is_promoted() -> None:
    lengths = {2: 1.2, 3: 1.3, 5: 1.4}
    rows = [result_row(speedup=speed, num_speculative_tokens=tokens) for tokens, speed in lengths.items()]
    assert decide(rows, NEW, GATE, None).num_speculative_tokens == 5
    rows[-1]["losslessness"] = "fault"
    assert decide(rows, NEW, GATE, None).num_speculative_tokens == 3


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (measured(), f"{PROMOTED}, which is promoted, was not measured beside it (`evaluate.drafts`)"),
        (
            [*measured(), result_row("eagle3 promoted", 4)],
            f"{PROMOTED}, which is promoted, was measured under none of its loads",
        ),
        ([result_row("eagle3 promoted")], "the evaluation has not measured it"),
        (
            beside(measured(accepted=[400, 150, 70], speedup=1.15), PROMOTED),
            f"0.92 times as fast as {PROMOTED}, which is promoted, with one request at a time on questions "
            "(its 95 % interval's upper end, 0.95, must reach 1)",
        ),
    ],
)
def test_what_cannot_be_held_against_the_promoted_one_stays_out(rows: list[dict[str, Any]], said: str) -> None:
    decision = decide(rows, NEW, GATE.model_copy(update={"min_acceptance_length": None}), PROMOTED)
    assert not decision.passes
    assert said in decision.reasons
    alone = PromoteConfig(min_speedup={1: 1.1}, not_worse_than=None)
    assert decide(rows, NEW, alone, PROMOTED).passes == ("has not measured" not in said)


def test_a_speed_that_only_noise_tells_apart_is_no_reason() -> None:
    rows = beside(measured(accepted=[400, 150, 70], speedup=1.24), PROMOTED)
    noisy = [row | {"output_tokens_per_second_by_round": [40.0, 50.0, 60.0]} for row in rows]
    for row in noisy[-2:]:
        row["output_tokens_per_second_by_round"] = [50.0, 51.0, 52.0]
    assert decide(noisy, NEW, GATE, PROMOTED).passes


def test_rows_of_an_earlier_version_can_be_judged() -> None:
    written = set(schemas.EVALUATIONS.names) | {
        "verdict",
        "num_compared_outputs",
        "output_tokens_per_second_by_round",
    }
    old = [completed({name: row[name] for name in written}) for row in measured()]
    assert decide(old, NEW, GATE, None).passes
    assert [row["label"] for row in lowest_load(old)] == ["eagle3"]
    assert result_table(old)[4]["acceptance length"] == "1.595"


def test_the_rival_of_a_draft_that_was_promoted_is_the_one_before(tmp_path: Path) -> None:
    root, gate = str(tmp_path), PromoteConfig(not_worse_than=None)
    assert rival(root, VERIFIER, NEW) is None
    tried(root, measured(), NEW, gate)
    assert rival(root, VERIFIER, NEW) is None
    tried(root, measured(PROMOTED), PROMOTED, gate)
    assert rival(root, VERIFIER, PROMOTED) == NEW
    assert rival(root, VERIFIER, NEW) == rival(root, VERIFIER, "3" * 16) == PROMOTED
    assert verifiers(root) == [VERIFIER]


@pytest.mark.parametrize("body", [b"", b"[]", b'{"promoted": {}, "history": []}', b"\xff"])
def test_a_pointer_that_cannot_be_read_is_left_alone(tmp_path: Path, body: bytes) -> None:
    storage.put(uri := pointer_uri(str(tmp_path), VERIFIER), body)
    with pytest.raises(StageFailed, match="cannot be understood"):
        tried(str(tmp_path), measured(), NEW)
    assert storage.get(uri) == body


def test_the_loser_of_a_race_decides_anew(any_root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two read that nothing is promoted; the slower one must then be held against the faster one's draft."""
    both_have_read = threading.Barrier(2)
    decided = promotion.decide

    def wait_for_the_other(*args: Any) -> Decision:
        if args[-1] is None:
            both_have_read.wait(30)
        return decided(*args)

    monkeypatch.setattr(promotion, "decide", wait_for_the_other)
    outcomes: dict[str, Outcome] = {}

    def run(draft: str, other: str) -> None:
        outcomes[draft] = tried(any_root, beside(measured(draft), other, accepted=[400, 150, 70]), draft)

    threads = [threading.Thread(target=run, args=pair) for pair in ((NEW, PROMOTED), (PROMOTED, NEW))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    (winner,) = [draft for draft, outcome in outcomes.items() if outcome.moved]
    (loser,) = set(outcomes) - {winner}
    pointer = read_pointer(any_root, VERIFIER)
    assert [each.draft for each in pointer.history] == [winner]
    assert not outcomes[loser].promoted
    said = f"acceptance length 1.595 over all (must reach the 1.620 of {winner}, which is promoted)"
    assert outcomes[loser].reasons == (said,)
