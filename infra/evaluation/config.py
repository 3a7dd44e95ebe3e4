"""What is measured of a speculator: which ways of decoding, on which prompts, under which sampling and load."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, PositiveInt, model_validator

from infra.config import CONTENT, Config
from infra.errors import InputError
from infra.generation.config import GenerateConfig
from infra.prompts.config import PromptSource
from infra.provenance import hardware

Method = Literal["none", "ngram", "eagle3"]
BASELINE: Method = "none"
EAGLE3: Method = "eagle3"
PROMOTED = "promoted"
GENERATION: Literal["generation"] = "generation"
GREEDY = 0.0
WRONG_SAMPLER = "vLLM's sampling under a speculative method is wrong on CPU"


def _listed(given: Any) -> Any:
    """One value where several may be given."""
    return given if isinstance(given, list | tuple) else (given,)


def _checked_temperature(given: Any) -> Any:
    """Not a union of types: its errors would name fields that the user did not write."""
    if given == GENERATION:
        return given
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 <= given <= 2:
        raise ValueError(f"{given!r} is neither a number from 0 to 2 nor `generation`")
    return float(given)


Drafted = Annotated[int, Field(ge=1, le=32)]
Temperature = Annotated[
    float | Literal["generation"],
    BeforeValidator(_checked_temperature, json_schema_input_type=float | Literal["generation"]),
]


class EvaluateConfig(Config):
    """What is measured. Speed depends on the load, so concurrency is content here, unlike elsewhere."""

    methods: Annotated[tuple[Method, ...], CONTENT] = ("none", "ngram", "eagle3")
    """Ways of decoding to compare. `none` is needed: every speed-up is a ratio to it."""

    drafts: tuple[str, ...] = ()
    """Speculators to measure beside the new one, all by eagle3: `promoted` (the one in production), a key of the
    drafts stage, or the URI of a folder that `vllm serve` takes. What they hold enters the key."""

    num_speculative_tokens: Annotated[
        tuple[Drafted, ...],
        BeforeValidator(_listed, json_schema_input_type=int | list[int]),
        CONTENT,
        Field(min_length=1),
    ] = (3,)
    """Tokens drafted per step by ngram and eagle3 (k), one or several; each has servers of its own."""

    concurrency: Annotated[tuple[PositiveInt, ...], CONTENT, Field(min_length=1)] = (1, 8)
    """Requests in flight; one series of measurements for each."""

    num_prompts: Annotated[tuple[PositiveInt, ...], CONTENT, Field(min_length=1)] = (16, 32)
    """Prompts of a data set run in each round, one number per entry of `concurrency` and no smaller than it."""

    rounds: Annotated[int, CONTENT, Field(ge=1)] = 3
    """How often every method is measured. With one round the intervals know nothing of the machine's noise."""

    max_tokens: Annotated[int, CONTENT, Field(ge=1)] = 256
    """Limit of each answer."""

    temperature: Annotated[
        tuple[Temperature, ...],
        BeforeValidator(_listed, json_schema_input_type=float | str | list[float | str]),
        CONTENT,
        Field(min_length=1),
    ] = (GREEDY, GENERATION)
    """One or several: 0 is greedy, `generation` samples as `generate` says. On CPU, where vLLM's sampling under a
    speculative method is wrong, only 0 is measured."""

    warmup_requests: Annotated[int, CONTENT, Field(ge=0)] = 2
    """Requests sent before each measurement and not counted."""

    prompt_lookup_max: Annotated[int, CONTENT, Field(ge=1)] = 4
    """ngram: longest run of tokens that is looked up in the text so far."""

    prompt_lookup_min: Annotated[int, CONTENT, Field(ge=1)] = 2
    """ngram: shortest such run."""

    heldout: Annotated[bool, CONTENT] = True
    """Measure on the run's own held-out prompts."""

    by_dataset: Annotated[bool, CONTENT] = False
    """Measure every dataset of held-out prompts by itself (as many times longer) instead of their mixture."""

    sources: Annotated[tuple[PromptSource, ...], CONTENT] = ()
    """Further data sets to measure on, each by itself, as `prompts.sources` has them: `{preset: mt-bench}`,
    `{preset: humaneval}`, `{preset: gsm8k, split: test}`. Prompts that were trained on are left out; of a
    conversation the first turn is asked."""

    context_bins: Annotated[tuple[PositiveInt, ...], CONTENT] = tuple(128 * 2**power for power in range(11))
    """Where one bin of context length (tokens before the drafted ones) ends and the next begins."""

    tie_nats: Annotated[float, CONTENT, Field(gt=0)] = 1.0
    """Greedy answers may part where the two tokens are no further apart than this: two choices that nearly tie are
    rounded one way or the other in bf16, by a few of its steps (0.125 to 0.5 for logits of 16 to 128) at the
    unluckiest of thousands of tokens. A broken speculation gives tokens that are whole nats away."""

    servers: Annotated[Literal["auto", "together", "in_turn"], CONTENT] = "auto"
    """`together`: all servers stand side by side and the rounds are interleaved, so that they must fit in memory
    together (GPUs: each takes an equal share of `vllm.gpu_memory_utilization`). `in_turn`: one server after
    another, each with all its rounds, so that whatever drifts in between is taken for a difference. `auto`:
    together on CPU, in turn on GPUs."""

    allow_beyond_trained_length: bool = False
    """Measure a draft even where more than a twentieth of the answers end beyond the longest trained sequence."""

    max_failed_share: Annotated[float, CONTENT, Field(ge=0.0, lt=1.0)] = 0.02
    """Share of requests that may fail in a measurement before it is refused."""

    request_timeout_seconds: Annotated[float, Field(gt=0)] = 1800.0
    """Longest wait for one answer."""

    settle_seconds: Annotated[float, Field(ge=0)] = 2.0
    """Least time, warm-up included, between two measurements: the last server's workers stop spinning in it."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if BASELINE not in self.methods:
            raise ValueError("methods must contain 'none': every speed-up is a ratio to it")
        for name in ("methods", "concurrency", "drafts", "num_speculative_tokens", "temperature"):
            _refuse_twice(name, getattr(self, name))
        _refuse_twice("sources", [source.dataset for source in self.sources])
        if self.drafts and EAGLE3 not in self.methods:
            raise ValueError("drafts are measured by eagle3: add it to methods, or leave drafts out")
        if not self.heldout and not self.sources:
            raise ValueError("heldout is false and there are no sources: there would be no prompt to measure with")
        if len(self.num_prompts) != len(self.concurrency):
            raise ValueError("num_prompts needs one number per entry of concurrency")
        for streams, prompts in zip(self.concurrency, self.num_prompts, strict=True):
            if prompts < streams:
                raise ValueError(f"num_prompts: {prompts} prompts cannot keep {streams} requests in flight")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError("prompt_lookup_min must not exceed prompt_lookup_max")
        if any(low >= high for low, high in itertools.pairwise(self.context_bins)):
            raise ValueError(f"context_bins must rise: {list(self.context_bins)}")
        return self


def _refuse_twice(name: str, values: Sequence[Any]) -> None:
    if len(set(values)) != len(values):
        raise ValueError(f"{name} names an entry twice: {list(values)}")


@dataclass(frozen=True)
class Draft:
    """A speculator to measure.

    Attributes:
        label: what rows and reports call it, unique among those measured together.
        key: of the drafts stage, or of the folder's content where no such stage made it.
        uri: of the folder that `vllm serve` takes.
        portable: what to call that folder outside this machine.
    """

    label: str
    key: str
    uri: str
    portable: str


@dataclass(frozen=True)
class Way:
    """One way of decoding, which needs a server of its own.

    Attributes:
        num_speculative_tokens: k; 0 for `none`.
        draft: what eagle3 drafts with.
    """

    method: Method
    num_speculative_tokens: int = 0
    draft: Draft | None = None

    @property
    def label(self) -> str:
        """What rows and reports call it: unique but for k."""
        return self.draft.label if self.draft else self.method

    @property
    def name(self) -> str:
        """What its server is called: unique."""
        return f"{self.label} k={self.num_speculative_tokens}" if self.num_speculative_tokens else self.label


def ways(config: EvaluateConfig, drafts: Sequence[Draft]) -> tuple[Way, ...]:
    """Every way of decoding that is measured, `none` once, the others once for each k.

    Args:
        drafts: what eagle3 is measured with, the new one first.
    """
    found: list[Way] = []
    for method in config.methods:
        if method == BASELINE:
            found.append(Way(method))
            continue
        with_drafts: Sequence[Draft | None] = drafts if method == EAGLE3 else [None]
        found += [Way(method, k, draft) for draft in with_drafts for k in config.num_speculative_tokens]
    return tuple(found)


def turns(config: EvaluateConfig, every: Sequence[Way], *, on_gpus: bool) -> tuple[list[list[Way]], list[Note]]:
    """Ways of decoding whose servers stand at the same time, and what is to be said about it.

    In turn the baseline comes last: its server scores where the answers of all the others part from its own.
    """
    if config.servers == "together" or (config.servers == "auto" and not on_gpus):
        return [list(every)], []
    last = sorted(every, key=lambda way: way.method == BASELINE)
    text = (
        "The servers stood one after another, so the rounds are not interleaved: what drifted in between is part "
        "of a speed-up, and its interval does not know of it."
    )
    return [[way] for way in last], [Note("in_turn", text)] if len(last) > 1 else []


@dataclass(frozen=True)
class Sampling:
    """How answers are sampled.

    Attributes:
        temperature: 0 is greedy.
        own: as generation samples, with the prompt's own overrides, of the temperature too; else by the
            temperature alone.
    """

    temperature: float = GREEDY
    own: bool = False

    @property
    def greedy(self) -> bool:
        return self.temperature == GREEDY


GREEDILY = Sampling()


@dataclass(frozen=True)
class Note:
    """What a reader of the figures must know of how they were taken.

    Attributes:
        kind: one word, for machines.
        text: one sentence.
    """

    kind: str
    text: str


def sampler_is_wrong() -> bool:
    """`WRONG_SAMPLER` holds for this machine's vLLM: without a GPU it is the CPU build."""
    return not hardware()["gpus"]


def samplings(
    config: EvaluateConfig, generate: GenerateConfig, *, wrong_above_zero: bool
) -> tuple[list[Sampling], list[Note]]:
    """How answers are sampled here, and what is to be said about it.

    Args:
        wrong_above_zero: vLLM's sampler is known to be wrong under speculation on this machine.

    Raises:
        InputError: nothing is left to measure.
    """
    found: dict[float, Sampling] = {}  # two rows of one temperature could not be told apart
    for asked in config.temperature:
        own = asked == GENERATION
        temperature = generate.temperature if own else float(asked)
        if own or temperature not in found:
            found[temperature] = Sampling(temperature, own and temperature > GREEDY)
    every = list(found.values())
    if not wrong_above_zero or config.methods == (BASELINE,):
        return every, []
    kept = [sampling for sampling in every if sampling.greedy]
    if not kept:
        raise InputError(
            "evaluate.temperature",
            f"{WRONG_SAMPLER}: measure with temperature 0",
        )
    if kept == every:
        return kept, []
    left_out = ", ".join(f"{sampling.temperature:g}" for sampling in every if not sampling.greedy)
    text = (
        "Measured with greedy decoding only: on CPU, vLLM's sampling under a speculative method is wrong, so "
        f"temperature {left_out} was left out."
    )
    return kept, [Note("greedy_only", text)]
