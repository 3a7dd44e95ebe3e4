"""Which prompts of which data set are taken: checked, filtered, each question once, drawn by seed."""

from __future__ import annotations

import heapq
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from infra.fingerprint import content_sha256, sha256_hex
from infra.prompts import filters as prompt_filters
from infra.prompts.config import PromptsConfig, PromptSource
from infra.prompts.files import Entry, UnusableRow
from infra.prompts.filters import CountTokens
from infra.prompts.rows import SYSTEM_ROLES, Messages, conversation

PROMPT_ID_HEX_DIGITS = 12
ORDER_HEX_DIGITS = 64


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt that is taken. Its text is held once, in the form that all its rows share."""

    source: PromptSource
    messages: str
    """JSON."""
    domain: str
    prompt_id: str
    number: int
    """How many prompts of the same id came before it: 0 unless duplicates are kept."""


@dataclass
class Selection:
    """The prompts taken of all sources.

    Attributes:
        prompts: by the hex digits that place a prompt among all others; equal questions share the first
            `ORDER_HEX_DIGITS` of them.
    """

    config: PromptsConfig
    count_tokens: CountTokens | None
    """None: no prompt is dropped for its length."""
    prompts: dict[str, Prompt] = field(default_factory=dict)
    _identities: set[str] = field(default_factory=set)
    """What no other prompt may equal."""

    def take(self, source: PromptSource, entries: Iterable[Entry]) -> tuple[int, dict[str, int], dict[str, int]]:
        """Take what is usable of one source.

        Returns:
            How many prompts were taken; by reason, how many rows were dropped, and which was the first of them
            (from 1, empty lines not counted).
        """
        found: dict[str, tuple[Prompt, str]] = {}  # with their identities
        drawn: list[tuple[int, str]] = []  # a heap, the last of the draw on top
        seen: set[str] = set()
        numbers: Counter[str] = Counter()
        dropped: Counter[str] = Counter()
        first: dict[str, int] = {}
        num_usable = 0
        for row, entry in enumerate(entries, start=1):
            if num_usable == source.limit:
                break
            try:
                place, prompt, identity = self._checked(source, entry, seen, numbers)
            except UnusableRow as reason:
                dropped[str(reason)] += 1
                first.setdefault(str(reason), row)
                continue
            num_usable += 1
            found[place] = prompt, identity
            if source.sample is not None:
                # Not the order itself: a small sample would lie on the heldout side of the split as a whole.
                heapq.heappush(drawn, (-int(sha256_hex(f"sample/{place}".encode())[:16], 16), place))
                if len(drawn) > source.sample:
                    del found[heapq.heappop(drawn)[1]]
                    dropped["not_sampled"] += 1
        self.prompts |= {place: prompt for place, (prompt, _) in found.items()}
        self._identities |= {identity for _, identity in found.values()}
        return len(found), dict(sorted(dropped.items())), first

    def _checked(
        self, source: PromptSource, entry: Entry, seen: set[str], numbers: Counter[str]
    ) -> tuple[str, Prompt, str]:
        """A usable row's place, prompt and identity. Raises UnusableRow.

        Effects: notes in `seen` and `numbers` what came of this source.
        """
        prompt_filters.check_language(entry, source.language)
        messages, domain = conversation(entry, source)
        place = _order(self.config.seed, messages)
        prompt_id = f"{source.dataset}-{content_sha256(messages)[:PROMPT_ID_HEX_DIGITS]}"
        number = numbers[prompt_id]
        if self.config.duplicates == "keep":
            place = identity = f"{place}-{prompt_id}-{number}"
        else:
            exact = self.config.duplicates == "exact"
            identity = place if exact else prompt_filters.folded_sha256(messages)
            # The id has 48 bits: another prompt's may equal it once in many millions.
            if number or identity in seen or identity in self._identities:
                raise UnusableRow("duplicate")
        if self.count_tokens is not None and source.counts_tokens:
            prompt_filters.check_length(messages, source, self.count_tokens)
        seen.add(identity)
        numbers[prompt_id] += 1
        text = json.dumps(messages, ensure_ascii=False)
        return place, Prompt(source, text, domain or source.domain, prompt_id, number), identity


def _order(seed: int, messages: Messages) -> str:
    """`ORDER_HEX_DIGITS` hex digits that place a prompt among all others.

    Taken over the conversation without system message and outer blanks, so that the same question can never be
    trained on from one data set and evaluated on from another.
    """
    said = [
        {**message, "content": message.get("content", "").strip()}
        for message in messages
        if message["role"] not in SYSTEM_ROLES
    ]
    return content_sha256([seed, said])
