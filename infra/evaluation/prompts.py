"""The prompts that a speculator is measured with: held-out ones, and of other data sets what was not trained on."""

from __future__ import annotations

import itertools
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from infra.errors import InputError
from infra.evaluation.config import EvaluateConfig, Note, Sampling
from infra.generation.config import GenerateConfig
from infra.generation.conversations import split_turns
from infra.generation.responses import Row
from infra.prompts.filters import CountTokens, folded_sha256
from infra.prompts.samples import HELDOUT, PromptsConfig, dataset_revisions, load_prompts

log = logging.getLogger("draftsmith.evaluation")

T = TypeVar("T")

# What decides which token is taken: a measurement by temperature alone has none of the prompt's own.
_SAMPLER_FIELDS = frozenset({"top_p", "top_k", "min_p"})
# A model's own defaults (generation_config.json) may hold penalties, under which greedy is not the likeliest token.
_NO_PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


@dataclass(frozen=True)
class EvaluationPrompt:
    """One prompt, ready to send.

    Attributes:
        sampling: the request's fields as generation would send them for it.
    """

    sample_id: str
    dataset: str
    messages: list[dict[str, Any]]
    domain: str = "general"
    sampling: Mapping[str, Any] = field(default_factory=dict)

    def request(self, sampling: Sampling, max_tokens: int) -> dict[str, Any]:
        """The request's fields, by vLLM's names."""
        fields = dict(self.sampling)
        if not sampling.own:
            fields = {name: value for name, value in fields.items() if name not in _SAMPLER_FIELDS}
            fields |= {"temperature": sampling.temperature, **_NO_PENALTIES}
        return fields | {"max_tokens": max_tokens}


def select_prompts(
    heldout: Iterable[Row], config: EvaluateConfig, generate: GenerateConfig, further: Iterable[Row] = ()
) -> tuple[dict[str, list[EvaluationPrompt]], list[Note]]:
    """The prompts to measure with, by dataset label, in a fixed order; and what is to be said about them.

    Unless `by_dataset`, the held-out datasets take turns in one list, labelled with their names joined by `+`, so
    that its first n prompts (`num_prompts`) are a fair mixture for every n.

    Args:
        heldout: rows of `schemas.PROMPTS`; training rows and further samples of one prompt are left out.
        further: likewise, of `evaluate.sources`, each a dataset of its own, whatever their split.

    Raises:
        InputError: a dataset has fewer prompts than the highest concurrency.
    """
    groups = _by_dataset((row for row in heldout if config.heldout and row["split"] == HELDOUT), generate)
    if groups and not config.by_dataset:
        groups = {"+".join(sorted(groups)): list(_take_turns([groups[name] for name in sorted(groups)]))}
    if config.heldout and not groups:
        check_enough(config, 0)
    others = _by_dataset(further, generate)
    if both := sorted(groups.keys() & others.keys()):
        raise InputError(
            "evaluate.sources", f"{both[0]} is what the held-out prompts are called too; give it another `name`"
        )
    groups |= others
    for source in config.sources:
        groups.setdefault(source.dataset, [])
    wanted, notes = max(config.num_prompts), []
    for dataset, prompts in groups.items():
        check_enough(config, len(prompts), dataset)
        if len(prompts) < wanted:
            text = f"{dataset} has {len(prompts)} prompts of the {wanted} wanted: all are used."
            log.warning(text)
            notes.append(Note("few_prompts", text))
    return {dataset: prompts[:wanted] for dataset, prompts in groups.items()}, notes


def check_enough(config: EvaluateConfig, num_prompts: int, dataset: str = "the held-out part") -> None:
    """Raise InputError where a dataset has fewer prompts to measure with than requests are to be in flight."""
    if num_prompts < (needed := max(config.concurrency)):
        raise InputError(
            "evaluate.concurrency",
            f"{dataset} has {num_prompts} prompts that were not trained on, which cannot keep {needed} requests in "
            "flight; give more, or lower it",
        )


def check_heldout(config: EvaluateConfig, prompts: PromptsConfig) -> None:
    """`check_enough` of the held-out prompts before they are read, where the config says how many there will be."""
    if config.heldout and prompts.heldout_prompts is not None and prompts.duplicates != "keep":
        check_enough(config, prompts.heldout_prompts)


def _by_dataset(rows: Iterable[Row], generate: GenerateConfig) -> dict[str, list[EvaluationPrompt]]:
    groups: dict[str, list[EvaluationPrompt]] = {}
    seen: set[tuple[str, str]] = set()
    for row in rows:
        if (row["dataset"], row["messages"]) in seen:
            continue
        seen.add((row["dataset"], row["messages"]))
        sampling = generate.sampling(row)
        sampling.pop("return_token_ids", None)
        messages = _first_turn(row)
        prompt = EvaluationPrompt(row["sample_id"], row["dataset"], messages, row["domain"], sampling)
        groups.setdefault(prompt.dataset, []).append(prompt)
    return groups


def _first_turn(row: Row) -> list[dict[str, Any]]:
    """Of a conversation the first turn: the next ones stand on replies that each method would have to give."""
    return split_turns(json.loads(row["messages"]))[0]


def _take_turns(lists: Sequence[Sequence[EvaluationPrompt]]) -> Iterator[EvaluationPrompt]:
    for same_place in itertools.zip_longest(*lists):
        yield from (prompt for prompt in same_place if prompt is not None)


def source_revisions(config: EvaluateConfig) -> dict[str, str]:
    """Revision of each of `evaluate.sources`, by data set: as `prompts.dataset_revisions`."""
    return _about_sources(lambda: dataset_revisions(_as_prompts(config, 0))) if config.sources else {}


def read_sources(
    config: EvaluateConfig, seed: int, trained: Iterable[Row], count_tokens: CountTokens | None = None
) -> tuple[list[Row], list[Note], dict[str, str]]:
    """Rows of `evaluate.sources` whose question was not trained on, in an order that `seed` decides.

    Two questions are the same where they differ in case, punctuation, blanks or system message only.

    Args:
        trained: rows of `schemas.PROMPTS` that the draft was trained on.

    Returns:
        The rows, what is to be said about them, and their revisions.

    Raises:
        InputError: a source cannot be used.
        InfrastructureError: the hub or the object store did not answer.
    """
    if not config.sources:
        return [], [], {}
    found = _about_sources(lambda: load_prompts(_as_prompts(config, seed), count_tokens=count_tokens))
    known = {folded_sha256(_first_turn(row)) for row in trained}
    rows = [row for row in found.train if folded_sha256(_first_turn(row)) not in known]
    before, after = Counter(row["dataset"] for row in found.train), Counter(row["dataset"] for row in rows)
    notes = [
        Note(
            "trained_prompts_left_out",
            f"{before[dataset] - after[dataset]} of the {before[dataset]} prompts of {dataset} were trained on and "
            "are left out.",
        )
        for dataset in before
        if after[dataset] < before[dataset]
    ]
    return rows, notes, found.revisions


def _as_prompts(config: EvaluateConfig, seed: int) -> PromptsConfig:
    return PromptsConfig(sources=config.sources, heldout_prompts=0, seed=seed)


def _about_sources(read: Callable[[], T]) -> T:
    """What `read` gives; its errors name the field as it is called here."""
    try:
        return read()
    except InputError as error:
        if not error.field.startswith("prompts."):
            raise
        raise InputError(error.field.replace("prompts.", "evaluate.", 1), error.problem) from error
