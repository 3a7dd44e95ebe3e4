"""What a stage took, for the next plan: how much of it was made, in how many node-seconds.

Each stage counts what its time goes with: prompts in rows, responses and training in tokens, and so on (`UNITS`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from infra.records import ShardRecord
from infra.verifiers.verifier import VerifierShape

UNITS = {
    "prompts": "rows",
    "responses": "completion tokens",
    "hidden_states": "tokens",
    "vocab": "vocabularies",
    "drafts": "trained tokens",
    "evaluations": "requests",
}
# In a record of responses: what its rows hold in all.
NUM_COMPLETION_TOKENS, NUM_PROMPT_TOKENS = "num_completion_tokens", "num_prompt_tokens"

# Guesses, for a machine that nothing has been measured on. Operations per second that an engine or trainer reaches
# where it is given large batches: a third of a recent data-centre GPU's bf16 peak, a core of a server's processor
# with matrix instructions (both near what docs/performance.md has).
GPU_FLOPS, CORE_FLOPS = 3e14, 3e11
# Decoding moves every weight for each step, and waits for that.
DECODING_SHARE = 0.2
# Tokens that could be decoded in the time that a request of an evaluation takes: few are in flight at a time.
TOKENS_PER_MEASURED_REQUEST = 2000
# Everything else is short beside these.
GUESSED_PER_SECOND = {"prompts": 1000.0, "vocab": 0.02}
# Tokens of a prompt, where none has been counted.
GUESSED_PROMPT_TOKENS = 200


@dataclass(frozen=True)
class Effort:
    """How much was made of a stage by one run, and what it took.

    Args:
        amount: in the stage's unit.
        node_seconds: wall time, times the nodes that shared it; starting servers is part of it.
    """

    amount: float
    node_seconds: float

    def to_json(self) -> dict[str, float]:
        return {name: round(value, 3) for name, value in asdict(self).items()}

    @classmethod
    def of_manifest(cls, manifest: Mapping[str, Any] | None) -> Effort | None:
        """What a stage's manifest says; None where it does not, or says nothing of use."""
        provenance: Mapping[str, Any] = (manifest or {}).get("provenance") or {}
        try:
            said = provenance["effort"]
            found = cls(float(said["amount"]), float(said["node_seconds"]))
        except (KeyError, TypeError, ValueError):
            return None
        return found if found.amount > 0 and found.node_seconds > 0 else None

    @property
    def per_second(self) -> float:
        """Of one node."""
        return self.amount / self.node_seconds


def token_counts(rows: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """For a record of responses: tokens of its completions, and of the prompts before them."""
    pairs = [(row["num_completion_tokens"], row["num_prompt_tokens"]) for row in rows]
    completion, prompt = (sum(counts) for counts in zip(*pairs, strict=True)) if pairs else (0, 0)
    return {NUM_COMPLETION_TOKENS: completion, NUM_PROMPT_TOKENS: prompt}


def counted(records: Iterable[ShardRecord], *names: str) -> int | None:
    """Sum of such fields over the records; None where one lacks them (it is of an earlier version)."""
    extras = [record.extra for record in records]
    if not extras or not all(name in extra for extra in extras for name in names):
        return None
    return sum(int(extra[name]) for extra in extras for name in names)


def guessed_per_second(
    stage: str, shape: VerifierShape, num_gpus: int, num_cores: int, ttt_steps: int, draft_vocab_size: int
) -> float:
    """What one node makes of a stage in a second, in its unit, told from sizes alone.

    A forward pass takes two operations for each weight and token; 12 h^2 weights for each layer of width h, which
    of a mixture of experts is about those that are active.
    """
    if stage in GUESSED_PER_SECOND:
        return GUESSED_PER_SECOND[stage]
    flops = num_gpus * GPU_FLOPS if num_gpus else num_cores * CORE_FLOPS
    layer = 12 * shape.hidden_size**2
    forward = 2 * (layer * shape.num_hidden_layers + shape.hidden_size * shape.vocab_size)
    match stage:
        case "hidden_states":
            return flops / forward
        case (
            "drafts"
        ):  # forward and backward of one layer and the draft's head, for each step of the test in training
            return flops / (3 * 2 * ttt_steps * (layer + shape.hidden_size * draft_vocab_size))
    decoded = DECODING_SHARE * flops / forward
    return decoded if stage == "responses" else decoded / TOKENS_PER_MEASURED_REQUEST
