from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from infra.evaluation.config import Note
from infra.evaluation.findings import DataFigures, break_even, headline, main_rows, warnings
from infra.promotion.gate import PromoteConfig, decide
from infra.promotion.pointer import Outcome, Promotion
from infra.reports.report import (
    NO_GATE,
    Report,
    Served,
    StageLine,
    report_markdown,
    run_markdown,
    serving_now,
    stage_table,
)
from infra.reports.tables import agreement_table, result_table, verdict_table
from tests.fakes.result_rows import NEW, PROMOTED, beside, group_rows, measured, result_row

ROWS = beside(measured(), PROMOTED, accepted=[330, 120, 50], speedup=1.2)
SERVED = Served(
    verifier="SmolLM2-135M-Instruct",
    revision="9f3c0ffee",
    draft_key=NEW,
    vllm_version="0.32.0",
    flags={"none": "--model SmolLM2-135M-Instruct", "eagle3": "--model SmolLM2-135M-Instruct --k 3"},
    hardware="2x Test GPU",
    versions={"torch": "2.13.0", "prefect": "3.9.1"},
    git_commit="66bd039",
    environment={"VLLM_CPU_KVCACHE_SPACE": "2", "OMP_NUM_THREADS": "2"},
)
STAGES = (
    StageLine("responses", "aaaa", reused=True, num_rows=1400, status_counts={"ok": 1390, "failed": 10}),
    StageLine("drafts", "bbbb", reused=False, size_bytes=3 * 2**20),
)
DATA = DataFigures(
    num_tokens=123_456,
    num_trained_tokens=100_000,
    vocabulary_coverage=0.991,
    draft_vocab_size=8192,
    verifier_vocab_size=49_152,
    num_training_steps=400,
    trained_length_tokens=512,
    evaluated_length_tokens=400,
)
BEFORE = Promotion(
    draft=PROMOTED,
    export=f"drafts/{PROMOTED}/export",
    evaluation="eeeeeeeeeeeeeeee",
    verifier_revision="9f3c0ffee",
    num_speculative_tokens=3,
    promoted_at="2026-01-02T03:04:05+00:00",
    run_id="run",
    reasons=("acceptance length 1.50",),
)
STRICT = PromoteConfig(min_speedup={1: 2.0})
REPORT = Report(
    ROWS,
    SERVED,
    DATA,
    groups=group_rows(),
    notes=[Note("in_turn", "Servers stood one after another.")],
    gate=decide(ROWS, NEW, PromoteConfig(min_speedup={1: 1.1}), PROMOTED),
    history=[BEFORE],
)


def test_headline_says_what_came_out_and_where_it_does_not_hold() -> None:
    text = headline(ROWS, "SmolLM2")
    assert text.startswith("**The trained draft makes SmolLM2 1.25 times as fast (95 % interval 1.20 to 1.30) ")
    assert "with one request at a time.**" in text
    assert "1.59 tokens instead of 1" in text  # 1 + 595 / 1000
    assert "With 8 requests in flight it is slower: 0.80 times as fast" in text


def test_headline_of_other_outcomes() -> None:
    assert "without a draft only" in headline([result_row("none")], "V")
    alike = result_row("ngram", speedup=1.01)
    assert "Without a trained draft, ngram makes V neither faster nor slower as far as can be told" in headline(
        [result_row("none"), alike], "V"
    )
    two = [result_row(), result_row(dataset="code", speedup=1.5), result_row(dataset="chat", speedup=1.02)]
    said = "1.02 to 1.50 times as fast (depending on the data set; no difference on 1 of 3) with one request"
    assert said in headline(two, "V")


def test_the_main_rows_are_the_new_drafts_fastest_and_coldest() -> None:
    warm = [row | {"temperature": 0.7} for row in ROWS]
    longer = [result_row(speedup=1.4, num_speculative_tokens=5)]
    assert main_rows(ROWS + warm + longer) == longer
    assert {row["label"] for row in main_rows(ROWS)} == {"eagle3"}


def test_a_manager_finds_verdict_promotion_and_one_table_before_anything_else() -> None:
    text = report_markdown(REPORT).partition("## ")[0]
    assert "**Fit to be promoted**: 1.25 times as fast with one request at a time on questions (its 95 % " in text
    assert "`speculators/SmolLM2-135M-Instruct/promoted.json` says which one is" in text
    assert "| load | tokens/s without a draft | with eagle3 | speed-up (95 % interval) | verdict |" in text
    assert "| 8 requests in flight | 40.0 | 32.0 | 0.80 (0.77 to 0.83) | slower |" in text
    assert len(text) < 1500


def test_the_report_of_random_weights_says_why_it_is_not_promoted() -> None:
    rows = measured(accepted=[2, 0, 0], speedup=0.81)
    gate = decide(rows, NEW, PromoteConfig(min_speedup={1: 1.1}), None)
    text = report_markdown(dataclasses.replace(REPORT, rows=rows, gate=gate))
    low = "its 95 % interval's lower end, 0.78, must reach 1.1"
    why = f"0.81 times as fast with one request at a time on questions ({low})"
    assert f"**Not promoted:** {why}." in text
    assert "No gate was set" in report_markdown(dataclasses.replace(REPORT, gate=None))


@pytest.mark.parametrize(
    "part",
    [
        "| in flight | method | output tokens/s | speed-up (95 % interval) | verdict | acceptance length |",
        "| 1 | eagle3 | 50.0 (49.5 to 50.5) | 1.25 (1.20 to 1.30) | faster | 1.595 (1.545 to 1.645) | 19.8 % |",
        "| 1 | none | 40.0 (39.8 to 40.2) | 1 (baseline) |",
        "| first token, p95 (ms) |",
        "| 1 | eagle3 | 50.0 (45.0 to 55.0) | 100.0 (90.0 to 110.0) | 20.0 (18.0 to 22.0) |",
        "| eagle3 | 38.5 % | 14.1 % | 6.9 % |",
        "| eagle3 promoted | 33.0 % |",
        "| eagle3 | 512+ | 1.40 (1.27 to 1.53) | 62 |",
        "| eagle3 | math | 1.50 (",
        "![Drafts accepted through each position](acceptance_by_position.png)",
        "(acceptance_by_context.png)",
        "(promoted_history.png)",
        "(training_loss.png)",
        "By its point figures the speed-up falls through 1 near 2.8 requests in flight on questions.",
        "| 1 | none | its own first round | 24 of 24 |",
        "| 8 | eagle3 | none, same round | 24 of 24 |",
        f"| 2026-01-02 | `{PROMOTED}` | 3 | `eeeeeeeeeeeeeeee` | acceptance length 1.50 |",
        "- Servers stood one after another.",
        "revision `9f3c0ffee`",
        f"Draft: `{NEW}`",
        "Hardware: 2x Test GPU",
        "vLLM 0.32.0, prefect 3.9.1, torch 2.13.0",
        "Git commit: `66bd039`",
        "- Environment: `OMP_NUM_THREADS=2`, `VLLM_CPU_KVCACHE_SPACE=2`",
        "eagle3: --model SmolLM2-135M-Instruct --k 3",
        "Optimizer steps: 400",
        "123,456, 100,000 of them trained on",
        "8,192 of the verifier's 49,152 tokens, which is 99.1 %",
    ],
)
def test_report_holds_what_it_must(part: str) -> None:
    assert part in report_markdown(REPORT)


def test_report_depends_on_its_inputs_only() -> None:
    assert report_markdown(REPORT) == report_markdown(REPORT)
    assert not re.search(r"/home/|/tmp/", report_markdown(REPORT))


def test_report_of_sampled_answers_makes_no_claim_of_equality() -> None:
    rows = [row | {"num_compared_outputs": 0, "losslessness": "not compared"} for row in ROWS]
    assert "Not compared" in report_markdown(dataclasses.replace(REPORT, rows=rows))


def test_report_says_where_answers_part_and_how_nearly_the_tokens_tied() -> None:
    parted = {
        "num_identical_outputs": 21,
        "first_differences": [80, 9, 40],
        "first_difference_gaps_nats": [0.01, float("nan"), 0.03],
        "losslessness": "near-ties",
    }
    (line,) = agreement_table([result_row(**parted)])
    assert list(line.values())[2:] == [
        *("none, same round", "21 of 24", "40", "0.020, 0.030", "0", "as near-ties explain")
    ]


def test_report_of_little_is_still_a_report() -> None:
    served = dataclasses.replace(SERVED, draft_key=None, git_commit=None, flags={}, versions={}, environment={})
    text = report_markdown(Report([result_row("none")], served))
    assert "Draft: none" in text
    assert "## Training" not in text
    assert "Environment" not in text
    assert "## Warnings\n\nNone." in text
    assert "Promoted speculators" not in text
    assert " None " not in text.replace("\n", " ").replace("Warnings  None.", "")


def test_a_run_says_what_its_own_gate_says_and_what_serves() -> None:
    refused = report_markdown(dataclasses.replace(REPORT, gate=decide(ROWS, NEW, STRICT, None)))
    assert "**Not promoted:**" in refused
    assert "So judged the gate of the run that measured it; `speculators/" in refused
    after = dataclasses.replace(BEFORE, draft=NEW)
    text = run_markdown("run", Outcome(True, True, ("now",)), serving_now("V", NEW, after), refused, [{"a": "b"}])
    assert text.startswith(
        "# Run run\n\n**Promoted: now.**\n\n`speculators/V/promoted.json` names this run's draft"
    )
    assert "Not promoted" not in text
    assert "So judged" not in text
    assert refused.split("\n\n")[3] in text
    assert "names another draft at the end of this run: `fedc" in serving_now("V", NEW, BEFORE)
    assert "nothing is promoted" in serving_now("V", NEW, None)
    old = refused.replace(" So judged the gate of the run that measured it;", "")
    for earlier in (refused, old, report_markdown(REPORT), report_markdown(dataclasses.replace(REPORT, gate=None))):
        head = run_markdown("run", None, "", earlier, []).partition("## ")[0]
        assert head.count(NO_GATE) == 1
        assert head.count("promot") == 2, "NO_GATE's only"
    assert run_markdown("run", None, "", None, []) == "# Run run\n"


def test_every_table_line_has_as_many_cells_as_its_head() -> None:
    odd = [row | {"dataset": "a|b", "temperature": 0.7} for row in ROWS]
    text = report_markdown(dataclasses.replace(REPORT, rows=odd + ROWS))
    tables = re.findall(r"(?:^\|.*\|$\n?)+", text, flags=re.MULTILINE)
    assert len(tables) == 8
    for table in tables:
        cells = {len(re.findall(r"(?<!\\)\|", line)) for line in table.strip().splitlines()}
        assert len(cells) == 1, table


def test_tables_for_prefect_are_plain_text_and_leave_out_what_is_the_same() -> None:
    lines = result_table(ROWS)
    assert [(line["in flight"], line["method"]) for line in lines][:2] == [("1", "none"), ("1", "ngram")]
    for line in lines + stage_table(STAGES) + verdict_table(ROWS):
        assert all(isinstance(value, str) for value in line.values())
    other = [row | {"dataset": "other", "temperature": 0.7} for row in ROWS]
    assert {"data set", "temperature"} <= result_table(ROWS + other)[0].keys()
    assert not {"data set", "temperature"} & lines[0].keys()
    assert stage_table(STAGES)[0]["by status"] == "failed 10, ok 1,390"
    assert stage_table(STAGES)[1]["size"] == "3.0 MiB"


def test_break_even_lies_where_the_speedup_falls_through_one() -> None:
    def load(concurrency: int, ratio: float) -> dict[str, Any]:
        return {"concurrency": concurrency, "speedup": ratio}

    assert break_even([load(1, 2.0), load(16, 0.5)]) == pytest.approx(4.0)  # halfway on both log scales
    assert break_even([load(64, 0.5), load(1, 1.5), load(8, 1.0)]) == pytest.approx(8.0)
    assert break_even([load(1, 1.5), load(8, 1.2)]) is None
    assert break_even([load(1, 0.9), load(8, 0.8)]) is None


@pytest.mark.parametrize(
    ("label", "changed", "said"),
    [
        ("ngram", {"accepted": [60, 30, 2]}, "ngram on questions: 3.1 % of the drafted tokens accepted, under 5 %"),
        ("eagle3", {"accepted": [30, 0, 0]}, "compare its auxiliary layers"),
        ("eagle3", {"num_draft_tokens": 0}, "nothing was drafted"),
        ("eagle3", {"num_failed": 2}, "2 requests failed"),
        ("eagle3", {"num_rounds": 1}, "One round only"),
        (
            "eagle3",
            {"losslessness": "fault", "num_beyond_ties": 7},
            "7 of 24 answers part from those without a draft where no two tokens nearly tie. The serving stack is at",
        ),
        ("eagle3", {"temperature": 0.7, "num_failed": 1}, "eagle3 on questions at temperature 0.7: 1 requests"),
        (
            "eagle3",
            {"speedup": 1.02},
            "with one request at a time the interval of the speed-up includes 1 (0.98 to 1.06). More `evaluate.rounds`",
        ),
        (
            "eagle3",
            {"speedup": 0.81, "accepted": [120, 30, 10]},
            "where it is faster. Acceptance length 1.16 is low for 3 drafted tokens: train on more data or for more steps",
        ),
        ("ngram", {"speedup": 0.81}, "No load was measured where it is faster. Do not serve it so."),
    ],
)
def test_warnings_about_rows(label: str, changed: dict[str, Any], said: str) -> None:
    assert warnings([result_row(label)], DATA) == []
    (found,) = warnings([result_row(label, **changed)], DATA)
    assert said in found


def test_near_ties_are_no_warning() -> None:
    row = result_row(losslessness="near-ties", first_differences=[80, 90, 11], num_identical_outputs=21)
    assert warnings([row], DATA) == []


def test_warning_where_speculation_does_not_pay_names_the_break_even() -> None:
    (line,) = warnings([row for row in measured() if row["method"] != "ngram"], DATA)
    assert "eagle3 on questions is slower than none: 0.80x with 8 requests in flight" in line
    assert "loads measured: serve it below that." in line
    assert "Break-even lies near 2.8 requests in flight" in line  # 8 ** (ln 1.25 / (ln 1.25 - ln 0.8)) = 8 ** 0.5


def test_warnings_about_data() -> None:
    bad = dataclasses.replace(DATA, vocabulary_coverage=0.93, trained_length_tokens=200)
    coverage, length = warnings([result_row()], bad)
    assert "holds 93.0 % of the trained tokens" in coverage
    assert "at most 200 tokens, the evaluation reached 400" in length
    assert warnings([result_row()], DataFigures()) == []
