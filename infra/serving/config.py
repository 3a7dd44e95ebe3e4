"""Which servers answer the prompts: replicas that are started on this node, or ones that are there already.

None of it changes what is written. What a server must be to write the same (dtype, parsers, max_model_len) is in
`infra.vllm_config`.
"""

from __future__ import annotations

import os
import re
from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from infra.config import Config
from infra.errors import InputError
from infra.gpu_sets import GpuSets, check_gpu_sets, on_gpu_sets
from infra.redaction import learn_secret
from infra.vllm_config import VllmConfig

EXTERNAL_FIELD = "generate.servers.external"
KEY_FIELD = "generate.servers.external_key_variable"

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class ServersConfig(Config):
    """The servers of generation: how many, where, and when one counts as lost."""

    replicas: Annotated[int, Field(ge=1)] = 1
    """vLLM servers to start on this node, each with the whole model."""
    gpu_sets: GpuSets | None = None
    """GPUs of each replica, by number or UUID. By default several replicas share out the visible GPUs in order,
    each as many as its parallel sizes need."""
    external: list[str] = Field(default=[])
    """Base URLs of servers (vLLM or SGLang) to ask instead of starting any, such as `http://gpu7:8000/v1`."""
    external_model: str | None = None
    """What they call the model; by default the verifier's name."""
    external_key_variable: str | None = None
    """Environment variable that holds their API key. The key itself belongs in no config."""
    external_patience_seconds: Annotated[float, Field(gt=0)] = 600.0
    """How long an external server that does not answer is waited for before it is given up."""
    hang_timeout_seconds: Annotated[float, Field(gt=0)] = 300.0
    """A server that has requests but has not moved a token for this long is lost, whatever its /health says."""
    max_restarts: Annotated[int, Field(ge=0)] = 10
    """How often one server may be lost in a run of the stage before it is given up."""

    @field_validator("external")
    @classmethod
    def _base_urls(cls, urls: list[str]) -> list[str]:
        return [_base_url(url) for url in urls]

    @field_validator("external_key_variable")
    @classmethod
    def _no_key(cls, name: str | None) -> str | None:
        if name is not None and not _VARIABLE.fullmatch(name):
            raise ValueError("is no name of an environment variable; the key itself belongs in no config")
        return name

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.external and (self.replicas > 1 or self.gpu_sets is not None):
            raise ValueError("external servers are asked instead of replicas: leave out replicas and gpu_sets")
        if len(set(self.external)) < len(self.external):
            raise ValueError(f"external names a server twice: {', '.join(self.external)}")
        check_gpu_sets(self.gpu_sets, self.replicas, "replicas")
        return self

    def external_key(self) -> str:
        """The API key of the external servers.

        Raises:
            InputError: the variable that should hold it is not set.
        """
        if self.external_key_variable is None:
            return "none"  # a server without a key takes any
        key = os.environ.get(self.external_key_variable)
        if not key:
            raise InputError(KEY_FIELD, f"the environment variable {self.external_key_variable} is not set")
        learn_secret(key, self.external_key_variable)
        return key


def replica_configs(servers: ServersConfig, vllm: VllmConfig) -> list[VllmConfig]:
    """How each replica is started: the config of all, on the replica's own GPUs.

    Raises:
        InputError: fewer GPUs are visible than they need.
    """
    return on_gpu_sets(vllm, servers.gpu_sets, servers.replicas, vllm.gpus_per_server, "generate.servers.replicas")


def _base_url(url: str) -> str:
    """`url` with the path `/v1` where it has none."""
    parts = urlsplit(url)
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError(
            f"the URL of {parts.hostname} must hold no credentials or query; name external_key_variable"
        )
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is no base URL such as http://host:8000/v1")
    return url.rstrip("/") if parts.path.strip("/") else f"{parts.scheme}://{parts.netloc}/v1"
