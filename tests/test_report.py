from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from infra.evaluation import EvaluateConfig
from infra.findings import DataFigures, break_even, headline, warnings
from infra.report import Report, Served, StageLine, report_markdown, result_table, stage_table, summary_line
from tests.fakes.measurements import example_rows

ROWS = example_rows()
SERVED = Served(
    verifier="SmolLM2-135M-Instruct",
    revision="9f3c0ffee",
    draft_key="0123456789abcdef",
    vllm_version="0.32.0",
    flags={"none": "--model SmolLM2-135M-Instruct", "eagle3": "--model SmolLM2-135M-Instruct --k 3"},
    hardware="2x Test GPU",
    versions={"torch": "2.13.0", "prefect": "3.9.1"},
    git_commit="66bd039",
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
REPORT = Report(ROWS, SERVED, STAGES, DATA)


def pick(method: str, concurrency: int) -> dict[str, Any]:
    (row,) = [row for row in ROWS if (row["method"], row["concurrency"]) == (method, concurrency)]
    return row


def test_headline_says_what_came_out_and_where_it_does_not_hold() -> None:
    text = headline(ROWS, "SmolLM2")
    assert text.startswith("**The trained draft makes SmolLM2 1.25 times as fast (95 % interval ")
    assert "with one request at a time.**" in text
    assert "1.59 tokens instead of 1" in text  # 1 + 595 / 1000
    assert "With 8 requests in flight it is slower: 0.80 times as fast" in text


def test_headline_of_other_outcomes() -> None:
    assert "without a draft only" in headline([pick("none", 1)], "V")
    alike = pick("ngram", 1) | {"speedup": 1.01, "speedup_low": 0.97, "speedup_high": 1.05}
    assert "Without a trained draft, ngram makes V neither faster nor slower as far as can be told" in headline(
        [pick("none", 1), alike], "V"
    )
    two = [pick("eagle3", 1), pick("eagle3", 1) | {"dataset": "code", "speedup": 1.5}]
    assert "1.25 to 1.50 times as fast, depending on the dataset" in headline(two, "V")


def test_report_holds_what_it_must() -> None:
    text = report_markdown(REPORT)
    for part in (
        "| in flight | method | output tokens/s | speed-up (95 % interval) | verdict | acceptance length |",
        "| faster | 1.595 | 19.8 % |",
        "| slower |",
        "| 1 (baseline) |",
        "| eagle3 | 38.5 % | 14.1 % | 6.9 % |",
        "![Drafts accepted through each position](acceptance_by_position.png)",
        "(training_loss.png)",
        "| 1 | none | its own first round | 16 of 16 |",
        "| 8 | eagle3 | none, same round | 24 of 24 |",
        "| responses | `aaaa` | Cached | 1,400 | failed 10, ok 1,390 |",
        "| drafts | `bbbb` | made |",
        "3.0 MiB",
        "revision `9f3c0ffee`",
        "Draft: `0123456789abcdef`",
        "Hardware: 2x Test GPU",
        "vLLM 0.32.0, prefect 3.9.1, torch 2.13.0",
        "Git commit: `66bd039`",
        "eagle3: --model SmolLM2-135M-Instruct --k 3",
        "Optimizer steps: 400",
        "123,456, 100,000 of them trained on",
        "8,192 of the verifier's 49,152 tokens, which is 99.1 %",
    ):
        assert part in text, part


def test_report_depends_on_its_inputs_only() -> None:
    assert report_markdown(REPORT) == report_markdown(REPORT)
    assert not re.search(r"\b20\d\d-\d\d-\d\d\b|/home/|/tmp/", report_markdown(REPORT))


def test_report_without_plots_links_no_file() -> None:
    assert "![" not in report_markdown(REPORT, with_plots=False)


def test_report_of_sampled_answers_makes_no_claim_of_equality() -> None:
    rows = example_rows(EvaluateConfig(temperature=0.7))
    assert "Not compared" in report_markdown(dataclasses.replace(REPORT, rows=rows))


def test_report_says_where_answers_part() -> None:
    parted = pick("eagle3", 1) | {
        "num_identical_outputs": 21,
        "num_compared_tokens": 900,
        "first_differences": [80, 9, 40],
    }
    text = report_markdown(dataclasses.replace(REPORT, rows=[pick("none", 1), parted]))
    assert "| 1 | eagle3 | none, same round | 21 of 24 | 40 | 300 |" in text


def test_report_of_little_is_still_a_report() -> None:
    served = dataclasses.replace(SERVED, draft_key=None, git_commit=None, flags={}, versions={})
    text = report_markdown(Report([pick("none", 1)], served))
    assert "Draft: none" in text
    assert "## Training" not in text
    assert "None" not in text


def test_every_table_line_has_as_many_cells_as_its_head() -> None:
    text = report_markdown(dataclasses.replace(REPORT, rows=example_rows(dataset="a|b") + ROWS))
    tables = re.findall(r"(?:^\|.*\|$\n?)+", text, flags=re.MULTILINE)
    assert len(tables) == 4
    for table in tables:
        cells = {len(re.findall(r"(?<!\\)\|", line)) for line in table.strip().splitlines()}
        assert len(cells) == 1, table


def test_tables_for_prefect_are_plain_text() -> None:
    lines = result_table(ROWS)
    assert [(line["in flight"], line["method"]) for line in lines][:3] == [
        ("1", "none"),
        ("1", "ngram"),
        ("1", "eagle3"),
    ]
    for line in lines + stage_table(STAGES):
        assert all(isinstance(value, str) for value in line.values())
    assert "dataset" in result_table(ROWS + example_rows(dataset="other"))[0]


def test_summary_line() -> None:
    assert summary_line(ROWS, "r/report.md") == "acceptance_length=1.595 speedup_c1=1.250 report=r/report.md"
    assert summary_line([pick("none", 1)], "r") == "acceptance_length=- speedup_c1=- report=r"


def test_break_even_lies_where_the_speedup_falls_through_one() -> None:
    def load(concurrency: int, ratio: float) -> dict[str, Any]:
        return {"concurrency": concurrency, "speedup": ratio}

    assert break_even([load(1, 2.0), load(16, 0.5)]) == pytest.approx(4.0)  # halfway on both log scales
    assert break_even([load(64, 0.5), load(1, 1.5), load(8, 1.0)]) == pytest.approx(8.0)
    assert break_even([load(1, 1.5), load(8, 1.2)]) is None
    assert break_even([load(1, 0.9), load(8, 0.8)]) is None


@pytest.mark.parametrize(
    ("method", "changed", "said"),
    [
        ("ngram", {"draft_acceptance_rate": 0.031}, "ngram with one request at a time on questions: 3.1 % of the"),
        ("eagle3", {"draft_acceptance_rate": 0.01}, "compare its auxiliary layers"),
        ("eagle3", {"draft_acceptance_rate": None}, "nothing was drafted"),
        ("eagle3", {"num_failed": 2}, "2 requests failed"),
        ("eagle3", {"num_rounds": 1}, "One round only"),
        ("eagle3", {"num_compared_tokens": 12, "first_differences": [3, 4]}, "every 6 tokens"),
    ],
)
def test_warnings_about_rows(method: str, changed: dict[str, Any], said: str) -> None:
    good = pick(method, 1) | {"draft_acceptance_rate": 0.2}
    assert warnings([good], DATA) == []
    (found,) = warnings([good | changed], DATA)
    assert said in found


def test_now_and_then_a_near_tie_is_no_warning() -> None:
    row = pick("eagle3", 1) | {"num_compared_tokens": 4000, "first_differences": [80, 90, 11]}
    assert warnings([row], DATA) == []


def test_warning_where_speculation_does_not_pay() -> None:
    found = warnings([pick("eagle3", 1), pick("eagle3", 8)], DATA)
    (line,) = found
    assert "eagle3 is slower than none on questions: 0.80x with 8 requests in flight" in line
    assert "Break-even lies near 2.8 requests in flight" in line  # 8 ** (ln 1.25 / (ln 1.25 - ln 0.8)) = 8 ** 0.5


def test_warnings_about_data() -> None:
    bad = dataclasses.replace(DATA, vocabulary_coverage=0.93, trained_length_tokens=200)
    coverage, length = warnings([pick("eagle3", 1)], bad)
    assert "holds 93.0 % of the trained tokens" in coverage
    assert "at most 200 tokens, the evaluation reached 400" in length
    assert warnings([pick("eagle3", 1)], DataFigures()) == []
