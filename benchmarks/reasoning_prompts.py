"""Thousands of real questions without a network: the prompts that `deployments/smoke-gpu.yaml` adds to the demo's.

    python benchmarks/reasoning_prompts.py [FILE] [--each N]     # by default deployments/prompts/reasoning.jsonl.gz

Needs the package `reasoning-gym` in the interpreter that runs it (nothing else in this project does, so it is not
among the pins; the file was made by 0.1.25). Each kind of task gives N questions by one seed, so the same version
writes the same questions. A small verifier answers some of them with one word; all are asked for the steps.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Iterator
from pathlib import Path

# Quickly made, in words rather than grids, and short enough for a small context.
KINDS = (
    "advanced_geometry",
    "aiw",
    "base_conversion",
    "calendar_arithmetic",
    "chain_sum",
    "coin_flip",
    "count_primes",
    "dice",
    "family_relationships",
    "fraction_simplification",
    "gcd",
    "gsm_symbolic",
    "knights_knaves",
    "lcm",
    "leg_counting",
    "letter_counting",
    "number_sorting",
    "prime_factorization",
    "propositional_logic",
    "sentence_reordering",
    "simple_equations",
    "simple_geometry",
    "syllogism",
    "time_intervals",
    "word_sorting",
)
LONGEST_CHARACTERS = 900
STEPS = "\nExplain each step."
SEED = 9


def questions(each: int) -> Iterator[dict[str, str]]:
    """Rows of `prompt` and `domain`, kind after kind."""
    import reasoning_gym

    for kind in KINDS:
        made = reasoning_gym.create_dataset(kind, size=each, seed=SEED)
        for number in range(each):
            prompt = str(made[number]["question"]).strip() + STEPS
            if len(prompt) <= LONGEST_CHARACTERS:
                yield {"prompt": prompt, "domain": kind}


def main() -> None:
    parser = argparse.ArgumentParser(description="Write questions of reasoning-gym as a file of prompts.")
    parser.add_argument("file", nargs="?", type=Path, default=Path("deployments/prompts/reasoning.jsonl.gz"))
    parser.add_argument("--each", type=int, default=240, help="questions of each of the kinds")
    options = parser.parse_args()
    rows = {row["prompt"]: row for row in questions(options.each)}
    options.file.parent.mkdir(parents=True, exist_ok=True)
    body = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows.values())
    options.file.write_bytes(gzip.compress(body.encode(), mtime=0))
    print(f"questions={len(rows)} kinds={len(KINDS)} bytes={options.file.stat().st_size} file={options.file}")


if __name__ == "__main__":
    main()
