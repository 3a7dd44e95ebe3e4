"""How the verifier is asked: sampling, seeds, where the token ids come from, what of a conversation is trained."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from infra.config import CONTENT
from infra.generation.completion_client import ClientConfig
from infra.generation.salvage import SalvageConfig
from infra.serving.config import ServersConfig

# Fields of the request that the client sets itself.
FIXED_FIELDS = frozenset({"model", "messages", "n", "stream", "return_token_ids", "seed"})


class GenerateConfig(SalvageConfig, ClientConfig):
    """How the verifier is asked for its responses."""

    temperature: Annotated[float, CONTENT, Field(ge=0, le=2)] = 0.7
    """Sampling temperature; 0 is greedy."""
    top_p: Annotated[float, CONTENT, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling: the share of probability that is kept."""
    max_tokens: Annotated[int, CONTENT, Field(ge=1)] = 8192
    """Most completion tokens of a response, thinking included; one that reaches it is `truncated`."""
    seed: Annotated[int | None, CONTENT] = 0
    """Each sample's own seed is a hash of this and its id. None sends no seed, for servers that take none."""
    extra_body: Annotated[dict[str, Any], CONTENT] = Field(default={})
    """Further request fields by vLLM's names: top_k, min_p, repetition_penalty, chat_template_kwargs."""
    token_source: Annotated[Literal["server", "reconstructed"], CONTENT] = "server"
    """`server`: the exact ids that the server sends; an answer without them is a failed row. `reconstructed`: for
    servers that send none, ids are made of the chat template and the answer's text by the verifier's tokenizer, and
    an answer whose number of tokens is not the one that the server counted is a failed row."""
    think_start_token_id: Annotated[int | None, CONTENT, Field(ge=0)] = None
    """Reconstruction: the token that opens the thinking (163606 of Kimi-K2.5); by default what the tokenizer calls
    `<think>`."""
    think_end_token_id: Annotated[int | None, CONTENT, Field(ge=0)] = None
    """Reconstruction: the token that closes the thinking (163607 of Kimi-K2.5); by default what the tokenizer calls
    `</think>`."""
    loss_on: Annotated[Literal["last_turn", "all_turns"], CONTENT] = "last_turn"
    """What is trained of a conversation with several turns: its last completion, or every completion that stands
    with its exact ids in the last turn's prompt (templates take earlier thinking out; those are counted)."""
    servers: ServersConfig = ServersConfig()
    """Which servers are asked."""
    max_failed_share: Annotated[float, Field(ge=0, le=1)] = 0.02
    """The stage fails when more than this share of its rows failed."""

    @field_validator("extra_body")
    @classmethod
    def _no_fixed_fields(cls, extra_body: dict[str, Any]) -> dict[str, Any]:
        taken = sorted((FIXED_FIELDS | cls.model_fields.keys()).intersection(extra_body))
        if taken:
            raise ValueError(f"{', '.join(taken)} cannot be set in extra_body")
        return extra_body

    def sampling(self, prompt_row: Mapping[str, Any]) -> dict[str, Any]:
        """Request fields for one prompt: this config's, overridden by the prompt's own `sampling`."""
        shared = {"temperature": self.temperature, "top_p": self.top_p, "max_tokens": self.max_tokens}
        own: dict[str, Any] = json.loads(prompt_row["sampling"])
        # A server that knows no ids may refuse a request for them.
        ids = {} if self.token_source == "server" else {"return_token_ids": False}
        return shared | self.extra_body | own | ids

    def sample_seed(self, sample_id: str) -> int | None:
        """A sample's own seed, 31 bits: the same for the same sample, whatever else is in flight."""
        if self.seed is None:
            return None
        return int.from_bytes(hashlib.sha256(f"{self.seed}/{sample_id}".encode()).digest()[:4], "big") >> 1
