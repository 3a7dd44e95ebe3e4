"""Rows of results.parquet and acceptance.parquet as the tests of report and promotion want them."""

from __future__ import annotations

import math
from typing import Any

NEW, PROMOTED = "0123456789abcdef", "fedcba9876543210"


def result_row(label: str = "eagle3", concurrency: int = 1, **changed: Any) -> dict[str, Any]:
    """One row: three rounds of three drafted tokens, 1.25 times as fast as without a draft (1.2 to 1.3).

    Its counts follow from `accepted` (per position, of 1000 drafts), its speeds from `speedup`, unless given.
    """
    method = label.split()[0]
    accepted = [] if method == "none" else changed.pop("accepted", [385, 141, 69])
    ratio = 1.0 if method == "none" else changed.get("speedup", 1.25)
    low, high = (1.0, 1.0) if method == "none" else (ratio * 0.96, ratio * 1.04)
    tokens = 0 if method == "none" else changed.get("num_speculative_tokens", len(accepted))
    drafts = 1000 if accepted else 0
    length = 1 + sum(accepted) / drafts if drafts else None
    rates = [count / drafts for count in accepted]
    wobbles = (1.0, 1.01, 0.99) if label == "eagle3" else (1.0, 0.995, 1.005)
    by_round = [40.0 * ratio * wobble for wobble in wobbles]
    keys = {"eagle3": NEW, "eagle3 promoted": PROMOTED}
    verdict = "faster" if low > 1 else "slower" if high < 1 else "no difference"
    row = {
        "method": method,
        "draft": keys.get(label, "aaaaaaaaaaaaaaaa") if method == "eagle3" else None,
        "dataset": "questions",
        "temperature": 0.0,
        "concurrency": concurrency,
        "num_speculative_tokens": tokens,
        "num_requests": 24,
        "num_drafts": drafts,
        "num_draft_tokens": drafts * len(accepted),
        "num_accepted_tokens": sum(accepted),
        "accepted_per_position": accepted,
        "acceptance_length": length,
        "acceptance_rate_per_position": rates,
        "output_tokens_per_second": 40.0 * ratio,
        "speedup": ratio,
        "speedup_low": low,
        "speedup_high": high,
        "vllm_version": "0.32.0",
        "flags": f"--model verifier --{method}",
        "verdict": verdict,
        "draft_acceptance_rate": sum(rates) / len(rates) if rates else None,
        "num_failed": 0,
        "output_tokens": 2400,
        "num_rounds": 3,
        "output_tokens_per_second_by_round": by_round,
        "speedup_by_round": [ratio] * 3,
        "num_compared_outputs": 24,
        "num_identical_outputs": 24,
        "num_compared_tokens": 2400,
        "first_differences": [],
        "label": label,
        "draft_uri": f"drafts/{keys[label]}/export" if label in keys else None,
        "output_tokens_per_second_low": min(by_round),
        "output_tokens_per_second_high": max(by_round),
        "acceptance_length_low": length and length - 0.05,
        "acceptance_length_high": length and length + 0.05,
        "acceptance_rate_per_position_low": [rate * 0.95 for rate in rates],
        "acceptance_rate_per_position_high": [rate * 1.05 for rate in rates],
        "draft_acceptance_rate_low": None,
        "draft_acceptance_rate_high": None,
        "longest_tokens": 400,
        "first_difference_gaps_nats": [],
        "num_beyond_ties": 0,
        "losslessness": "identical",
    }
    for name, seconds in (("ttft", 0.05), ("tpot", 0.025 / ratio)):
        for figure, factor in (("median", 1.0), ("p95", 2.0)):
            row[f"{name}_seconds_{figure}"] = seconds * factor
            row[f"{name}_seconds_{figure}_low"] = seconds * factor * 0.9
            row[f"{name}_seconds_{figure}_high"] = seconds * factor * 1.1
    return row | changed


def measured(draft: str = NEW, **changed: Any) -> list[dict[str, Any]]:
    """The rows of none, ngram and a draft under one and eight requests in flight; there it is slower."""
    slow = {**changed, "speedup": changed.get("speedup", 1.25) * 0.64}
    rows = [result_row(label, load) for load in (1, 8) for label in ("none", "ngram")]
    return [*rows, result_row(draft=draft, **changed), result_row(concurrency=8, draft=draft, **slow)]


def beside(rows: list[dict[str, Any]], draft: str, **changed: Any) -> list[dict[str, Any]]:
    """The same evaluation with the promoted draft measured too."""
    slow = {**changed, "speedup": changed.get("speedup", 1.25) * 0.64}
    theirs = [result_row("eagle3 promoted", load, draft=draft, **more) for load, more in ((1, changed), (8, slow))]
    return rows + theirs


def group_rows(label: str = "eagle3", **changed: Any) -> list[dict[str, Any]]:
    """Acceptance by context bin and by domain."""
    bins = [
        ("0-127", 0, 128, 1.72),
        ("128-255", 128, 256, 1.6),
        ("256-511", 256, 512, 1.48),
        ("512+", 512, None, 1.4),
    ]
    domains = [("code", None, None, 1.8), ("math", None, None, 1.5)]
    rows = []
    for group_by, groups in (("context", bins), ("domain", domains)):
        for index, (group, start, end, length) in enumerate(groups):
            drafts = 4000 // 4**index
            spread = 1.0 / math.sqrt(drafts)
            row = {
                "label": label,
                "method": label.split()[0],
                "dataset": "questions",
                "draft": NEW,
                "num_speculative_tokens": 3,
                "concurrency": 1,
                "temperature": 0.0,
                "group_by": group_by,
                "group": group,
                "context_from": start,
                "context_to": end,
                "num_requests": 24,
                "num_drafts": drafts,
                "num_draft_tokens": 3 * drafts,
                "num_accepted_tokens": round((length - 1) * drafts),
                "accepted_per_position": [round((length - 1) * drafts), 0, 0],
                "acceptance_length": length,
                "acceptance_length_low": length - spread,
                "acceptance_length_high": length + spread,
                "acceptance_rate_per_position": [length - 1, 0.0, 0.0],
            }
            rows.append(row | changed)
    return rows
